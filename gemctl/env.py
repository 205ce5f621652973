"""Every environment variable that gemctl reads, one function each."""

import os


def rank() -> int:
    """This process's global rank; 0 outside a launched world."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Ranks of the launched world; 1 outside of one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's rank among those of its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def in_ci() -> bool:
    """True where a required suite must not skip."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def test_data() -> str | None:
    """Folder with the real data sets that tests use, or None."""
    return os.environ.get("GEMCTL_TEST_DATA") or None
