"""Processes: how Python ones are started, children that die with their parent, and whether and how one has ended."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

UNREPORTED = "it exited without reporting a cause"
PR_SET_PDEATHSIG = 1
FORK_SAFE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment of a process that imports torch and forks: torchrec looks for GPUs on import, which would initialise CUDA
in the parent and make it unusable in the children."""


def python(*arguments: str) -> list[str]:
    """The command line that runs this interpreter with `arguments`; every Python process of gemctl is started with it.

    -P keeps the current folder off the module path: a `random.py` there would be imported in place of Python's.
    """
    return [sys.executable, "-P", *arguments]


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent, process `parent`, dies, however that happens (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def exit_code(pid: int) -> int | None:
    """The exit code of child `pid`, or −signal, without reaping it; None while it runs.

    ChildProcessError once it has been reaped.
    """
    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def started(pid: int) -> int | None:
    """The start time of process `pid` in clock ticks since boot, which together with the pid identifies it for good.

    None if it is not running.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def running(pid: int) -> bool:
    """True while process `pid` runs; a zombie does not count."""
    return started(pid) is not None


def how_ended(pid: int) -> str | None:
    """How this process's child `pid` ended, in words, without reaping it; None while it runs or if unknown."""
    try:
        code = exit_code(pid)
    except ChildProcessError:
        return None
    if code is None:
        return None
    return describe_exit(code)


def describe_exit(code: int) -> str:
    """An exit code, or −signal, in words."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Waits until none of `pids` runs; returns those still running after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left
