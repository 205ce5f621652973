"""Every environment variable that gemctl reads, one function each; the user and the home, which they mostly name."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# What changes the meaning of a call of SLURM's clients behind its options' back.
SLURM_OPTIONS = ("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_")
SLURM_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"}  # which SLURM, and as whom


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
    """True where a required suite must not skip."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def test_data() -> str | None:
    """Folder with the real data sets that tests use, or None."""
    return os.environ.get("GEMCTL_TEST_DATA") or None


def inject() -> str | None:
    """The event that gemctl.run.inject plants, or None."""
    return os.environ.get("GEMCTL_INJECT") or None


def attempt() -> int:
    """Number of the attempt that this rank belongs to; 1 where no agent started it."""
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
    """Where the ranks of this attempt meet; None where no agent started this one."""
    return os.environ.get("GEMCTL_STORE") or None


def topology_address() -> str:
    """Where this host lies in the network, outermost switch first ("spine.leaf1.n2"); empty if nobody said."""
    return os.environ.get("GEMCTL_TOPOLOGY_ADDRESS", "")


@dataclass(frozen=True)
class SlurmAllocation:
    """The SLURM job that this process runs in. `restarts`: how often it was queued again."""

    job: int
    nodelist: str
    restarts: int
    task: str | None = None  # an array's task: its other name

    @property
    def names(self) -> set[str]:
        """What SLURM's clients know it by."""
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
    """The environment for SLURM's clients, without what this process may have from a job around it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SLURM_OPTIONS)}
    return kept | {name: os.environ[name] for name in SLURM_KEPT if name in os.environ}


def slurm_topology() -> str:
    """Where SLURM says that this host lies in the network; empty outside of a step, or where it does not know."""
    return os.environ.get("SLURM_TOPOLOGY_ADDR", "")


def triton_interpret() -> bool:
    """True where Triton interprets kernels on the CPU; it reads the variable itself, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "y", "yes"}


def cache_folder() -> Path:
    """Where measurements that outlive a run are kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else home() / ".cache") / "gemctl"


def keep_compiled_code_private() -> None:
    """Gives torch, if the user has not, a folder of this user's own for the code that it compiles.

    By itself it takes /tmp/torchinductor_<user>: another user who was there first would give it code to run, or keep it
    from being imported at all.
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
    """The name of the user; its number where it has no name, as in many containers."""
    import getpass

    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        return f"uid{os.getuid()}"


def home() -> Path:
    """The user's home; where it has none, a folder of its own among the temporary ones."""
    try:
        return Path.home()
    except RuntimeError:
        return _temporary_home()


def _temporary_home() -> Path:
    import tempfile

    with suppress(OSError):
        folder = Path(tempfile.gettempdir()) / f"gemctl-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if _own(folder):
            return folder
    return Path("/nonexistent")  # a folder there is another user's: nothing is kept


def _own(folder: Path) -> bool:
    """Whether this user alone may write to the folder, which is no link."""
    import stat

    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
