"""Processes that end together: a child dies with its parent, and a process is known to be gone, not just a zombie."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

UNREPORTED = "it exited without reporting a cause"
PR_SET_PDEATHSIG = 1
FORK_SAFE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment of a process that imports torch and forks: torchrec asks for GPUs as it is imported, which would open
CUDA in the parent and make it useless in the children."""


def python(*arguments: str) -> list[str]:
    """The command line that runs this interpreter with `arguments`. Every Python process of gemctl is started by it.

    -P keeps the current folder off the module path: a `random.py` there would be imported in place of Python's own.
    """
    return [sys.executable, "-P", *arguments]


def die_with_parent(parent: int) -> None:
    """From now on this process is killed when its parent, process `parent`, dies, however that happens (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def exit_code(pid: int) -> int | None:
    """How child `pid` ended, without reaping it: its exit code, −signal, or None while it runs.

    ChildProcessError once its parent has reaped it.
    """
    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def started(pid: int) -> int | None:
    """When process `pid` was started, in ticks since the machine was: with its number it names it for good.

    None if it does not run.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def running(pid: int) -> bool:
    """True while process `pid` runs; a zombie, which only waits to be reaped, does not."""
    return started(pid) is not None


def how_ended(pid: int) -> str | None:
    """How this process's child `pid` ended, in words; None while it runs, or if nobody can tell. It is not reaped."""
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
    """Waits until none of `pids` runs; returns those that still do after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left
