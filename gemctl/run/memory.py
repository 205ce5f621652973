"""How often the kernel has killed for want of memory, where this process's memory is counted (Linux).

before = oom_kills()
…                       # a child dies by SIGKILL
oom_kills() > before    # then it was out of memory, most likely
"""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


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


def own_cgroup() -> Path | None:
    """The folder of this process's memory cgroup; None where there is none. A container sees its own as the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    paths = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    first = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), None)
    root, path = (CGROUPS, paths.get("", "")) if first is None else (CGROUPS / "memory", first)
    return next((folder for folder in (root / path, root) if folder.is_dir()), None)


def _counters() -> Iterator[Path]:
    """Where the counter may be, the nearest to this process first."""
    folder = own_cgroup()
    if folder is not None:
        yield folder / "memory.events"
        yield folder / "memory.oom_control"
    yield Path("/proc/vmstat")
