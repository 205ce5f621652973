"""Which nodes of a SLURM allocation an attempt gets: those that are well, below as few leaf switches as possible.

    choose(["n1", "n2", "n3"], {"n1": "spine.leaf1.n1", "n3": "spine.leaf1.n3"}, {"n2": "it gave no sign"}, wanted=2)

Before agents start, a step of `gemctl doctor --node` asks every node how it is. Bad and silent ones are left out, spare
ones take their places.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemctl.cluster.node import NodeReport, read_report
from gemctl.errors import TooFewHosts
from gemctl.launchers.slurm_client import start_step
from gemctl.mesh.groups import LISTED, topology_key
from gemctl.run.files import entries

SECONDS = 60.0  # for as many nodes to answer as are needed
LATE = 5.0  # seconds for the others, once that many have
POLL = 0.05
SILENT = "it gave no sign"


@dataclass(frozen=True)
class Chosen:
    """The nodes of an attempt in SLURM's order, which numbers its agents; and why others were left out."""

    hosts: list[str]
    left_out: dict[str, str]


def choose(allocated: Sequence[str], addresses: Mapping[str, str], left_out: Mapping[str, str], wanted: int) -> Chosen:
    """`wanted` of the nodes in `addresses` (host → its place in the network) that lie beside each other.

    `allocated`: all nodes, in SLURM's order; `left_out`: those that cannot take part, and why.
    """
    ordered = sorted(addresses, key=lambda host: topology_key(addresses[host]))
    windows = [ordered[start : start + wanted] for start in range(len(ordered) - wanted + 1)]
    best = min(windows, key=lambda hosts: len({above for host in hosts for above in _above(addresses[host])}))
    return Chosen([host for host in allocated if host in best], dict(left_out))


def check_enough(well: Sequence[str], left_out: Mapping[str, str], lost: bool, wanted: int) -> None:
    """TooFewHosts, which names those that were left out, unless `wanted` are well."""
    if len(well) >= wanted:
        return
    named = [f"{host}: {why}" for host, why in left_out.items()]
    listed = "; ".join(named[:LISTED] + ["…"] * (len(named) > LISTED)) or "no others were allocated"
    raise TooFewHosts(f"{wanted} nodes are planned, {len(well)} can take part ({listed})", lost)


def _above(address: str) -> list[str]:
    """The switches above a host, each by its whole path."""
    parts = address.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def ask(command: list[str], folder: Path, hosts: Sequence[str], wanted: int) -> dict[str, NodeReport]:
    """Runs the step `command`, which has every host write its report into `folder`; returns those that came."""
    folder.mkdir()
    with (folder / "srun.log").open("wb") as log:
        step = start_step(command, log)
    deadline = time.monotonic() + SECONDS
    reports: dict[str, NodeReport] = {}
    late = False
    while len(reports) < len(hosts) and time.monotonic() < deadline and step.poll() is None:
        reports = _reports(folder, hosts)
        if not late and sum(not report.wrong for report in reports.values()) >= wanted:
            late, deadline = True, min(deadline, time.monotonic() + LATE)
        time.sleep(POLL)
    end(step, LATE, grace=LATE if len(reports) == len(hosts) else 0)
    return _reports(folder, hosts)


def _reports(folder: Path, hosts: Sequence[str]) -> dict[str, NodeReport]:
    found = (read_report(path) for path in entries(folder) if path.suffix == ".json" and not path.name.startswith("."))
    return {report.host: report for report in found if report.host in hosts}


def end(step: "subprocess.Popen[bytes]", seconds: float, grace: float) -> None:
    """Ends all of a step's processes unless they do by themselves within `grace`; after `seconds` kills srun alone,
    as a node is not reached.

    srun passes SIGUSR2 on to every process by itself, also while no controller answers, and nothing handles it. What
    srun does at an interrupt would begin with a SIGTERM, which an agent takes for the wish that its ranks save.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        step.wait(grace)
    if step.poll() is None:
        step.send_signal(signal.SIGUSR2)
        try:
            step.wait(seconds)
        except subprocess.TimeoutExpired:
            step.kill()
            step.wait()
