"""The resources of this machine: cores, memory, shared memory and GPUs, from /proc, /sys and nvidia-smi.

    this_host(gpus=False).memory   # bytes that this process may use
    limits().memory                # bytes; None if no control group has a limit
    own_groups("memory")           # the folders of this process's control groups and their parents

Control groups (versions 1 and 2; SLURM, Kubernetes, systemd) limit memory and cores. A group's limit holds for
everything below it, so the smallest limit of the chain counts. A container mostly sees its own group as the root of the
hierarchy; a SLURM job or a systemd service is far below it.
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
    """Limits of control groups; None means no limit. Bytes; `memory_available` excludes memory already in use."""

    memory: int | None
    memory_available: int | None
    cores: float | None


@dataclass(frozen=True)
class HostGpu:
    """One GPU as listed by nvidia-smi; memory in bytes."""

    name: str
    memory: int
    driver: str


@dataclass(frozen=True)
class Host:
    """What this process may use: all cores and bytes of memory of the machine, or less if control groups limit it."""

    cores: int
    memory: int
    memory_available: int
    shm: int
    gpus: list[HostGpu]


def this_host(gpus: bool = True) -> Host:
    """The resources of this machine; `gpus=False` skips nvidia-smi, which can take a second."""
    info = meminfo(Path("/proc/meminfo").read_text(encoding="utf-8"))
    given = limits()
    memory = min(info["MemTotal"], given.memory or info["MemTotal"])
    left = memory if given.memory_available is None else given.memory_available
    available = min(info.get("MemAvailable", memory), left)
    return Host(cores(given), memory, available, shm_bytes(), find_gpus() if gpus else [])


def cores(given: Limits | None = None) -> int:
    """Cores that this process may use at once: those of its cpuset, or fewer under a control group's quota."""
    return whole_cores((given or limits()).cores, len(os.sched_getaffinity(0)))


def meminfo(text: str) -> dict[str, int]:
    """Bytes by key, from the text of /proc/meminfo."""
    fields = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3 and words[2] == "kB"}


def shm_bytes(path: str = "/dev/shm") -> int:
    """Size of the shared-memory file system; 0 if there is none."""
    return shutil.disk_usage(path).total if Path(path).is_dir() else 0


def find_gpus() -> list[HostGpu]:
    """GPUs listed by nvidia-smi; none if it is missing or fails."""
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
    """Parses nvidia-smi's lines "name, MiB, driver"; skips lines whose memory is not a number (N/A)."""
    rows = [[field.strip() for field in row] for row in csv.reader(text.splitlines())]
    return [HostGpu(row[0], int(row[1]) * MIB, row[2]) for row in rows if len(row) == 3 and row[1].isdigit()]


def limits(root: Path = ROOT) -> Limits:
    """The limits of this process's control groups. `root`: the folder that contains proc and sys."""
    groups = [folder for chain in own_groups("memory", root) for folder in chain]
    memory = {folder: limit for folder in groups if (limit := _memory_limit(folder)) is not None}
    left = [max(0, limit - _used(folder)) for folder, limit in memory.items()]
    cores = [
        quota for chain in own_groups("cpu", root) for folder in chain if (quota := _cpu_quota(folder)) is not None
    ]
    return Limits(min(memory.values(), default=None), min(left, default=None), min(cores, default=None))


def own_groups(controller: str, root: Path = ROOT) -> list[list[Path]]:
    """For each hierarchy with the controller (version 2 has all): this process's group, then its parents."""
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
    """Of `cores`, how many may be used at once under the quota."""
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _paths(root: Path) -> dict[str, str]:
    """Path of this process's group by controller; "" for version 2."""
    groups: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _mounts(root: Path) -> list[tuple[str, str, str, list[str]]]:
    """(path inside the hierarchy, mount point, type, options) of every mounted hierarchy."""
    mounts = []
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        fields, (kind, *rest) = mount.split(" "), system.split(" ") or [""]
        if kind in {"cgroup", "cgroup2"} and len(fields) > 4:
            mounts.append((_unescape(fields[3]), _unescape(fields[4]), kind, rest[-1].split(",")))
    return mounts


def _below(path: str, mounted: str) -> list[str]:
    """The folders from the mounted one down to the group; none if the group is outside of the mount."""
    parts, top = Path(path).parts[1:], Path(mounted).parts[1:]
    if ".." in parts or parts[: len(top)] != top:
        return []
    return list(parts[len(top) :])


def _memory_limit(folder: Path) -> int | None:
    return _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")


def _used(folder: Path) -> int:
    """Bytes used by the group, except file pages that the kernel would reclaim first."""
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    idle = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
    return max(0, used - int(idle)) if idle.isdigit() else used


def _cpu_quota(folder: Path) -> float | None:
    """CPU time that the group may use, in cores."""
    both = [word for line in _lines(folder / "cpu.max") for word in line.split()]
    if len(both) == 2 and all(word.isdigit() for word in both):
        return int(both[0]) / int(both[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _number(file: Path) -> int | None:
    """The number in the file; None if there is no file, or it contains "max" or −1."""
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescape(text: str) -> str:
    r"""Decodes a field of mountinfo, where a blank is \040."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
