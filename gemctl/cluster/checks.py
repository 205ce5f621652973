"""Checks of this machine and its installed software: each has a result, and advice if something is wrong.

gemctl doctor
"""

import platform
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gemctl import env
from gemctl.cluster import software
from gemctl.cluster.hardware import GIB
from gemctl.cluster.host import Host, this_host
from gemctl.durable import has_links

MEMORY = 4 * GIB  # the default experiment needs about 3 GiB on four ranks
SHM = GIB // 2  # NCCL's buffers between GPUs of one host are in shared memory; containers have 64 MiB by default

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One result; `advice` says what to do about a warning or a failure."""

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Doctor:
    """All results. Exit code 1 if one of them is a failure."""

    checks: list[Check]

    @property
    def exit_code(self) -> int:
        """0 or 1."""
        return int(any(check.status == "fail" for check in self.checks))


def check_machine(root: Path) -> Doctor:
    """Runs all checks of this machine; `root`: where run directories will be created."""
    host = this_host()
    return Doctor(
        [
            Check("python", "ok", f"{platform.python_version()}, {sys.executable}"),
            *_software(),
            *(check(host) for check in (_cores, _memory, _shm, _gpus)),
            _root(root),
            _network(),
            *_schedulers(),
        ]
    )


def _software() -> list[Check]:
    builds = software.builds()
    found = f"torch {builds.torch}, FBGEMM {builds.fbgemm} ({builds.fbgemm_build}), torchrec {builds.torchrec}"
    wrong = software.problems(builds)
    checks = [Check("torch builds", "fail", found, problem) for problem in wrong] or [
        Check("torch builds", "ok", found)
    ]
    path = software.constraints_file(builds.torch_build)
    if path is None:
        return [*checks, Check("versions", "ok", "not installed from a checkout: no constraints to compare with")]
    other = software.off_pin(path)
    if other:
        advice = f"only the versions in {path.parent.name}/{path.name} are tested: pip install -c {path} …, or run make"
        return [*checks, Check("versions", "warn", ", ".join(other), advice)]
    return [*checks, Check("versions", "ok", f"all as in {path.parent.name}/{path.name}")]


def _cores(host: Host) -> Check:
    if host.cores < 2:
        return Check(
            "cores", "warn", str(host.cores), "four ranks would share one core: start fewer (launcher.ranks_per_node)"
        )
    return Check("cores", "ok", str(host.cores))


def _memory(host: Host) -> Check:
    found = f"{host.memory_available / GIB:.1f} of {host.memory / GIB:.1f} GiB free"
    if host.memory_available < MEMORY:
        return Check(
            "memory",
            "warn",
            found,
            f"the default experiment needs {MEMORY // GIB} GiB; `gemctl plan` shows what yours needs",
        )
    return Check("memory", "ok", found)


def _shm(host: Host) -> Check:
    found = f"{host.shm / GIB:.2f} GiB"
    if host.shm < SHM:
        advice = f"NCCL's buffers are there in GPU runs: give it {SHM / GIB:.1f} GiB or more (docker run --shm-size=2g)"
        return Check("/dev/shm", "warn", found, advice)
    return Check("/dev/shm", "ok", found)


def _gpus(host: Host) -> Check:
    if not host.gpus:
        return Check("gpus", "ok", "none found by nvidia-smi (only cluster.device=cuda needs them)")
    first = host.gpus[0]
    return Check("gpus", "ok", f"{len(host.gpus)} × {first.name}, {first.memory / GIB:.0f} GiB, driver {first.driver}")


def _root(root: Path) -> Check:
    """Whether run directories can be created, with hard links; tested in the nearest folder that exists."""
    folder = root.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        links = has_links(folder)
    except OSError as error:
        advice = f"can't write to {folder} ({error.strerror}): choose another folder (run.root)"
        return Check("run.root", "fail", str(root.absolute()), advice)
    free = shutil.disk_usage(folder).free
    if free < GIB:
        return Check(
            "run.root", "warn", f"{root.absolute()}, {free / GIB:.2f} GiB free", "checkpoints need space there"
        )
    found = f"{root.absolute()}, {free / GIB:.0f} GiB free"
    if not links:
        advice = "without hard links run files are published by rename, which must be atomic for all hosts"
        return Check("run.root", "warn", f"{found}, no hard links", advice)
    return Check("run.root", "ok", found)


def _network() -> Check:
    """The address that gloo would use: that of GLOO_SOCKET_IFNAME, or else the one that the host name resolves to."""
    names = [name for _, name in socket.if_nameindex()]
    chosen = env.gloo_interface()
    if chosen is not None:
        missing = [name for name in chosen.split(",") if name not in names]
        if missing:
            advice = f"GLOO_SOCKET_IFNAME is not an interface of this machine, which has {', '.join(names)}"
            return Check("gloo", "fail", chosen, advice)
        return Check("gloo", "ok", f"GLOO_SOCKET_IFNAME={chosen}")
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)[0][4][0]
        with socket.create_server((str(address), 0), family=socket.AF_INET6 if ":" in str(address) else socket.AF_INET):
            return Check("gloo", "ok", f"{host} resolves to {address}")
    except OSError as error:
        advice = f"set GLOO_SOCKET_IFNAME to one of {', '.join(names)} (lo for a single machine)"
        return Check("gloo", "warn", f"{host} does not resolve to an address of this machine ({error})", advice)


def _schedulers() -> list[Check]:
    wanted = {"SLURM": ("sbatch", "srun", "squeue", "scancel"), "Kubernetes": ("kubectl",)}
    checks = []
    for name, programs in wanted.items():
        found = [program for program in programs if shutil.which(program)]
        missing = [program for program in programs if program not in found]
        if found and missing:
            text = f"{', '.join(found)} found, {', '.join(missing)} missing"
            checks.append(Check(name, "warn", text, f"add the folder of {missing[0]} to PATH"))
        else:
            where = ", ".join(found) if found else "not on this machine (not needed for launcher=local)"
            checks.append(Check(name, "ok", where))
    return checks
