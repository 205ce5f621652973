"""Checks whether a cluster node can take part in a run, before an agent is started on it.

    srun --ntasks-per-node=1 gemctl doctor --node RUN/attempts/1/nodes --memory 2000000000 --gpus 8

Each node writes its report to a folder of the run, so a node that does not see the shared run directory is missing.
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
CLOCK = 30.0  # seconds by which clocks may differ: requests and records of several hosts are ordered by time
SECONDS = 2.0  # for a message to return over the loopback
MESSAGE = b"gemctl"


@dataclass(frozen=True)
class NodeReport:
    """A node's report. `address`: its position in the network; `time`: its clock."""

    host: str
    address: str
    time: float
    checks: list[Check]

    @property
    def wrong(self) -> str:
        """Why the node can't take part, in words; empty if it can."""
        return "; ".join(f"{check.name}: {check.found}" for check in self.checks if check.status == "fail")


def read_report(path: Path) -> NodeReport:
    """The report that a node wrote to `path`."""
    value = json.loads(path.read_text(encoding="utf-8"))
    return NodeReport(**{**value, "checks": [Check(**check) for check in value["checks"]]})


def check_node(folder: Path, memory: int, gpus: int) -> NodeReport:
    """Runs all checks of this node and also writes the report to `folder`.

    `folder`: in the run directory, on storage that all hosts share. `memory`, `gpus`: bytes and GPUs that the ranks of
    this host need.
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
    draft.rename(folder / f"{report.host}.json")  # so that readers never see half of it
    return report


def _memory(host: Host, needed: int) -> Check:
    found = f"{host.memory_available / GIB:.1f} GiB free, the plan needs {needed / GIB:.1f}"
    return Check("memory", "ok" if host.memory_available >= needed else "fail", found)


def _shm(host: Host) -> Check:
    found = f"{host.shm / GIB:.2f} GiB"
    return Check(
        "/dev/shm",
        "ok" if host.shm >= SHM else "warn",
        found,
        "" if host.shm >= SHM else "NCCL's buffers are there, in GPU runs",
    )


def _disk(folder: str) -> Check:
    free = shutil.disk_usage(folder).free
    return Check("disk", "ok" if free >= GIB // 4 else "fail", f"{free / GIB:.2f} GiB free in {folder}")


def _folder(folder: Path) -> list[Check]:
    """Writes a file. The storage's timestamp must agree with this host's clock."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(MESSAGE)
            file.flush()
            apart = abs(Path(file.name).stat().st_mtime - time.time())
    except OSError as error:
        return [Check("run directory", "fail", str(error.strerror))]
    clock = Check("clock", "ok" if apart <= CLOCK else "fail", f"{apart:.0f} s away from the storage's clock")
    return [Check("run directory", "ok", "can be written"), clock]


def _loopback() -> Check:
    """Sends a message to this host, as torch's rendezvous and gloo will."""
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
