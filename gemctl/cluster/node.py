"""Whether a node of a cluster can take part in a run: what an agent's host needs, found before one is started.

    srun --ntasks-per-node=1 gemctl doctor --node RUN/attempts/1/nodes --memory 2000000000 --gpus 8

Each node leaves its report in a folder of the run, so one that does not see the shared run directory is missing there.
"""

import json
import shutil
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from gemctl import env
from gemctl.cluster.checks import SHM, Check
from gemctl.cluster.hardware import GIB
from gemctl.cluster.host import Host, this_host

LOOPBACK = "127.0.0.1"
CLOCK = 30.0  # seconds that clocks may differ: requests and records of several hosts are put in order by time
SECONDS = 2.0  # for a message to come back over the loopback
MESSAGE = b"gemctl"


@dataclass(frozen=True)
class NodeReport:
    """What a node says of itself. `address`: where it lies in the network; `time`: its clock."""

    host: str
    address: str
    time: float
    checks: list[Check]

    @property
    def wrong(self) -> str:
        """Why it can take no part, in words; empty if it can."""
        return "; ".join(f"{check.name}: {check.found}" for check in self.checks if check.status == "fail")


def read_report(path: Path) -> NodeReport:
    """The report that a node left in `path`."""
    value = json.loads(path.read_text(encoding="utf-8"))
    return NodeReport(**{**value, "checks": [Check(**check) for check in value["checks"]]})


def check_node(folder: Path, memory: int, gpus: int) -> NodeReport:
    """Every check of this node, written to `folder` too.

    `folder`: of the run, on storage that all hosts share; `memory`: bytes, and `gpus` that its ranks here will need.
    """
    host = this_host(gpus=gpus > 0)
    report = NodeReport(
        socket.gethostname(),
        env.slurm_topology(),
        time.time(),
        [
            _memory(host, memory),
            _shm(host),
            _disk(tempfile.gettempdir()),
            *_folder(folder),
            _loopback(),
            *([_gpus(host, gpus)] if gpus else []),
        ],
    )
    draft = folder / f".{report.host}"
    draft.write_text(json.dumps(asdict(report)), encoding="utf-8")
    draft.rename(folder / f"{report.host}.json")  # readers never see half of it
    return report


def _memory(host: Host, needed: int) -> Check:
    found = f"{host.memory_available / GIB:.1f} GiB free, the plan needs {needed / GIB:.1f}"
    return Check("memory", "ok" if host.memory_available >= needed else "fail", found)


def _shm(host: Host) -> Check:
    found = f"{host.shm / GIB:.2f} GiB"
    return Check("/dev/shm", "ok" if host.shm >= SHM else "warn", found, "" if host.shm >= SHM else "saves stage there")


def _disk(folder: str) -> Check:
    free = shutil.disk_usage(folder).free
    return Check("disk", "ok" if free >= GIB // 4 else "fail", f"{free / GIB:.2f} GiB free in {folder}")


def _folder(folder: Path) -> list[Check]:
    """Writes there. The time that the storage gives the file must be this host's."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(MESSAGE)
            file.flush()
            apart = abs(Path(file.name).stat().st_mtime - time.time())
    except OSError as error:
        return [Check("run directory", "fail", str(error.strerror))]
    clock = Check("clock", "ok" if apart <= CLOCK else "fail", f"{apart:.0f} s away from the storage's")
    return [Check("run directory", "ok", "can be written"), clock]


def _loopback() -> Check:
    """A message to itself, as torch's rendezvous and gloo will send it."""
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=SECONDS) as client,
        ):
            client.sendall(MESSAGE)
            server.settimeout(SECONDS)
            with server.accept()[0] as accepted:
                accepted.settimeout(SECONDS)
                same = accepted.recv(len(MESSAGE), socket.MSG_WAITALL) == MESSAGE
    except OSError as error:
        return Check("loopback", "fail", str(error))
    return Check("loopback", "ok" if same else "fail", "a message came back" if same else "a message was changed")


def _gpus(host: Host, needed: int) -> Check:
    found = f"{len(host.gpus)} listed by nvidia-smi, {needed} needed"
    return Check("gpus", "ok" if len(host.gpus) >= needed else "fail", found)
