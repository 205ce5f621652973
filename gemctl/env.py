"""Every environment variable that gemctl reads, one function each, and the user and home that they usually name."""

import getpass
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Variables that change the options of SLURM's clients.
SLURM_OPTIONS = ("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_")
SLURM_KEPT = {
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_JWT",
    "SLURM_CLUSTERS",
}  # which cluster, as which user


def rank() -> int:
    """This process's global rank; 0 outside a launched world."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Ranks of the launched world; 1 outside of one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's rank among those of its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Ranks of the launched world on this host; 1 outside of one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def in_ci() -> bool:
    """True if a required test suite must not be skipped."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def test_data() -> str | None:
    """The folder of the real data sets that tests use, or None."""
    return os.environ.get("GEMCTL_TEST_DATA") or None


def inject() -> str | None:
    """The faults that gemctl.failpoints injects, or None."""
    return os.environ.get("GEMCTL_INJECT") or None


def attempt() -> int:
    """The number of this rank's attempt; 1 if no agent started it."""
    return int(os.environ.get("GEMCTL_ATTEMPT", "1"))


def omp_threads() -> str | None:
    """The user's own choice of threads per rank, or None."""
    return os.environ.get("OMP_NUM_THREADS") or None


def gloo_interface() -> str | None:
    """The user's own choice of network interface for gloo, or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def nccl_interface() -> str | None:
    """The user's own choice of network interface for NCCL, or None."""
    return os.environ.get("NCCL_SOCKET_IFNAME") or None


def store() -> str | None:
    """The endpoint of the store in which this attempt's ranks meet; None if no agent started this rank."""
    return os.environ.get("GEMCTL_STORE") or None


def topology_address() -> str:
    """This host's address in the network topology, outermost switch first ("spine.leaf1.n2"); empty if unknown."""
    return os.environ.get("GEMCTL_TOPOLOGY_ADDRESS", "")


@dataclass(frozen=True)
class SlurmAllocation:
    """The SLURM job that this process runs in. `restarts`: how often it was requeued."""

    job: int
    nodelist: str
    restarts: int
    task: str | None = None  # the id of an array's task

    @property
    def names(self) -> set[str]:
        """The ids by which SLURM's clients know it."""
        return {str(self.job), *([self.task] if self.task else [])}


def slurm_allocation() -> SlurmAllocation | None:
    """None outside of a SLURM job."""
    job, nodelist = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if job is None or nodelist is None:
        return None
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return SlurmAllocation(int(job), nodelist, restarts, f"{array}_{task}" if array else None)


def for_slurm() -> dict[str, str]:
    """The environment for SLURM's clients, without the options of a job that this process may run in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SLURM_OPTIONS)}
    return kept | {name: os.environ[name] for name in SLURM_KEPT if name in os.environ}


def slurm_topology() -> str:
    """This host's topology address according to SLURM; empty outside of a step, or if SLURM does not know it."""
    return os.environ.get("SLURM_TOPOLOGY_ADDR", "")


def triton_interpret() -> bool:
    """True if Triton interprets kernels on the CPU; it reads the variable itself on import."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "y", "yes"}


def cache_folder() -> Path:
    """The folder for measurements that outlive a run."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else home() / ".cache") / "gemctl"


def keep_compiled_code_private() -> None:
    """Gives torch a private folder for compiled code, unless the user has chosen one.

    Its default is /tmp/torchinductor_<user>: another user who creates that first could make torch run their code, or
    keep it from being imported at all.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    for root in (cache_folder, _temporary_home):
        folder = root() / "torchinductor"
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _own(folder):
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
                return


def user() -> str:
    """The name of the user; "uid" and the number for one without a name, as in many containers."""
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        return f"uid{os.getuid()}"


def home() -> Path:
    """The user's home; for a user without one, a private temporary folder."""
    try:
        return Path.home()
    except RuntimeError:
        return _temporary_home()


def _temporary_home() -> Path:
    with suppress(OSError):
        folder = Path(tempfile.gettempdir()) / f"gemctl-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if _own(folder):
            return folder
    return Path("/nonexistent")  # the folder there is another user's: nothing is stored


def _own(folder: Path) -> bool:
    """Whether the folder is not a link, and only this user may write to it."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
