"""Every environment variable that gemctl reads, one function each."""

import os
from pathlib import Path


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


def topology_address() -> str:
    """Where this host lies in the network, outermost switch first ("spine.leaf1.n2"); empty if nobody said."""
    return os.environ.get("GEMCTL_TOPOLOGY_ADDRESS", "")


def triton_interpret() -> bool:
    """True where Triton interprets kernels on the CPU; it reads the variable itself, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "y", "yes"}


def cache_folder() -> Path:
    """Where measurements that outlive a run are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "gemctl"
