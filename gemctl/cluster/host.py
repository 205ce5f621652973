"""What this machine has: cores, memory, shared memory, GPUs; from /proc, /sys and nvidia-smi, without torch.

gemctl doctor
"""

import csv
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gemctl.cluster.cgroup import Limits, limits, whole_cores

MIB = 1 << 20


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
