"""What this machine has: cores, memory, shared memory, GPUs; from /proc, /sys and nvidia-smi, without torch.

gemctl doctor
"""

import csv
import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
ROOT = Path("/")


@dataclass(frozen=True)
class Limits:
    """None: no limit. `memory` and `memory_available` in bytes, the latter without what is used already."""

    memory: int | None
    memory_available: int | None
    cores: float | None


@dataclass(frozen=True)
class HostGpu:
    """One GPU as nvidia-smi lists it; memory in bytes."""

    name: str
    memory: int
    driver: str


@dataclass(frozen=True)
class Host:
    """What this process may use: all of the machine's cores and bytes of memory, or less by its control groups."""

    cores: int
    memory: int
    memory_available: int
    shm: int
    gpus: list[HostGpu]


def this_host(gpus: bool = True) -> Host:
    """The facts of the machine that this runs on; `gpus=False` does not ask nvidia-smi (which can take a second)."""
    info = meminfo(Path("/proc/meminfo").read_text(encoding="utf-8"))
    given = limits()
    memory = min(info["MemTotal"], given.memory or info["MemTotal"])
    left = memory if given.memory_available is None else given.memory_available
    available = min(info.get("MemAvailable", memory), left)
    return Host(cores(given), memory, available, shm_bytes(), find_gpus() if gpus else [])


def cores(given: Limits | None = None) -> int:
    """Cores that this process may have at work at once: those of its cpuset, or fewer by its control groups' quota."""
    return whole_cores((given or limits()).cores, len(os.sched_getaffinity(0)))


def meminfo(text: str) -> dict[str, int]:
    """Bytes by key of /proc/meminfo."""
    fields = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3 and words[2] == "kB"}


def shm_bytes(path: str = "/dev/shm") -> int:
    """Size of the shared-memory file system; 0 if there is none."""
    return shutil.disk_usage(path).total if Path(path).is_dir() else 0


def find_gpus() -> list[HostGpu]:
    """GPUs that nvidia-smi lists; none where it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, encoding="utf-8", errors="replace", timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> list[HostGpu]:
    """nvidia-smi's lines "name, MiB, driver" as values; a line whose memory is no number (N/A) is left out."""
    rows = [[field.strip() for field in row] for row in csv.reader(text.splitlines())]
    return [HostGpu(row[0], int(row[1]) * MIB, row[2]) for row in rows if len(row) == 3 and row[1].isdigit()]


def limits(root: Path = ROOT) -> Limits:
    """The limits of this process's control groups. `root`: the folder that holds proc and sys."""
    groups = [folder for chain in own_groups("memory", root) for folder in chain]
    memory = {folder: limit for folder in groups if (limit := _memory_limit(folder)) is not None}
    left = [max(0, limit - _used(folder)) for folder, limit in memory.items()]
    cores = [
        quota for chain in own_groups("cpu", root) for folder in chain if (quota := _cpu_quota(folder)) is not None
    ]
    return Limits(min(memory.values(), default=None), min(left, default=None), min(cores, default=None))


def own_groups(controller: str, root: Path = ROOT) -> list[list[Path]]:
    """For each hierarchy with the controller (version 2 counts for all): this process's group, then those around it."""
    own = _paths(root)
    chains = []
    for mounted, point, kind, options in _mounts(root):
        path = own.get("") if kind == "cgroup2" else own.get(controller) if controller in options else None
        if path is not None:
            inside = _below(path, mounted)
            top = root / point.lstrip("/")
            chain = [top.joinpath(*inside[:depth]) for depth in range(len(inside), -1, -1)]
            chains.append([folder for folder in chain if folder.is_dir()])
    return [chain for chain in chains if chain]


def whole_cores(quota: float | None, cores: int) -> int:
    """Cores that may be at work at once, of `cores` that the process may run on."""
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _paths(root: Path) -> dict[str, str]:
    """Controller → path of this process's group; "" stands for version 2."""
    found: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def _mounts(root: Path) -> list[tuple[str, str, str, list[str]]]:
    """(path inside the hierarchy, mount point, type, options) of every mounted hierarchy."""
    found = []
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        fields, (kind, *rest) = mount.split(" "), system.split(" ") or [""]
        if kind in {"cgroup", "cgroup2"} and len(fields) > 4:
            found.append((_unescape(fields[3]), _unescape(fields[4]), kind, rest[-1].split(",")))
    return found


def _below(path: str, mounted: str) -> list[str]:
    """The folders from the mounted one down to the group; none where the group lies outside of what is mounted."""
    parts, top = Path(path).parts[1:], Path(mounted).parts[1:]
    if ".." in parts or parts[: len(top)] != top:
        return []
    return list(parts[len(top) :])


def _memory_limit(folder: Path) -> int | None:
    return _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")


def _used(folder: Path) -> int:
    """Bytes that the group holds, but for file pages that the kernel gives up first."""
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    idle = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
    return max(0, used - int(idle)) if idle.isdigit() else used


def _cpu_quota(folder: Path) -> float | None:
    """Cores' worth of time that the group may have."""
    both = [word for line in _lines(folder / "cpu.max") for word in line.split()]
    if len(both) == 2 and all(word.isdigit() for word in both):
        return int(both[0]) / int(both[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _number(file: Path) -> int | None:
    """The number in the file; None where there is no file, or it says "max" or −1."""
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescape(text: str) -> str:
    r"""A field of mountinfo, where a blank is \040."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
