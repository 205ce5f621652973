"""How often the kernel has killed for want of memory, where this process's memory is counted (Linux).

before = oom_kills()
…                       # a child dies by SIGKILL
oom_kills() > before    # then it was out of memory, most likely
"""

from collections.abc import Iterator
from pathlib import Path

from gemctl.cluster.cgroup import own_groups


def oom_kills() -> int:
    """The counter of this process's memory cgroup (version 2 or 1), else the machine's; 0 where neither is kept."""
    for file in _counters():
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        counts = [int(count) for name, _, count in (line.partition(" ") for line in lines) if name == "oom_kill"]
        if counts:
            return counts[0]
    return 0


def _counters() -> Iterator[Path]:
    """Where the counter may be, the nearest to this process first."""
    for folder, *_ in own_groups("memory"):
        yield folder / "memory.events"
        yield folder / "memory.oom_control"
    yield Path("/proc/vmstat")
