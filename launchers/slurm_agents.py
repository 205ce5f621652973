"""Agents as one step of a SLURM job: on which nodes, where they meet, and how they ended.

    choose(["n1", "n2", "n3"], {"n1": "spine.leaf1.n1", "n3": "spine.leaf1.n3"}, {"n2": NO_REPORT}, wanted=2)

The supervisor runs on the job's first node. Living agents serve the next attempt too; if one was lost, all are started
anew. Before agents start, a step of `gemctl doctor --node` checks every node. Nodes that fail the check or do not
report are left out, and spare ones take their places.
"""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl import env
from gemctl.cluster.node import NodeReport, read_report
from gemctl.config.schema import Config, SlurmConfig
from gemctl.errors import GemctlError, TooFewHosts
from gemctl.launchers import slurm_client
from gemctl.launchers.api import literal, request, to_json
from gemctl.launchers.slurm_job import file_name, step
from gemctl.mesh.groups import LISTED, topology_key
from gemctl.process import python
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import create_json, entries, read_json
from gemctl.run.submission import newest

if TYPE_CHECKING:
    from torchx.specs import AppDef, Role

FIRST_PORT, PORTS = 20_000, 12_000  # below the system's ephemeral ports
PORT_STRIDE = 31  # so that consecutive jobs, and attempts of a job, have ports of their own
CHECK_SECONDS = 60.0  # for as many nodes to report as are needed
LATE_SECONDS = 5.0  # for the others, once that many have
POLL = 0.05
NO_REPORT = "it did not report"
LEAVE_SECONDS = 1.0  # for idle agents to exit by themselves
KILL_SECONDS = 10.0
MEMORY = re.compile(r"exceeded memory limit(?: \(\d+ > \d+\))?|oom_kill event", re.IGNORECASE)
TASK_END = re.compile(r"^srun: error: \S+: tasks? ([\d,\-]+): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Chosen:
    """The nodes of an attempt in SLURM's order, which numbers its agents, and why others were left out."""

    hosts: list[str]
    left_out: dict[str, str]


class SlurmAgents:
    """The agents of a run's attempts, as a step of the job that this process runs in."""

    def __init__(self, run: RunDir, config: Config, allocation: env.SlurmAllocation) -> None:
        self._run, self._config, self._allocation = run, config, allocation
        self._slurm = config.launcher.slurm or SlurmConfig()
        self._step: subprocess.Popen[bytes] | None = None
        self._log = Path()
        self._hosts: list[str] = []

    def start(self, attempt: Attempt) -> None:
        chosen = self._choose(attempt)
        create_json(attempt.path / "hosts.json", {"hosts": chosen.hosts, "left_out": chosen.left_out})
        for host, why in chosen.left_out.items():
            sys.stderr.write(f"node {host} is left out: {why}\n")
        _check_name(chosen.hosts[0])
        self._hosts, self._log = chosen.hosts, attempt.logs / "srun.log"
        (role,) = self._request(attempt).roles
        # `Attempt.agent_output`, from the agent's first line on. In a path with a backslash SLURM expands no %t: there,
        # what an agent writes before it opens that file itself is in srun.log.
        output_file = None if "\\" in str(attempt.logs) else f"{file_name(attempt.logs)}/agent-%t.log"
        with self._log.open("ab") as output:
            self._step = slurm_client.start_step(step(role, self._slurm, chosen.hosts, output_file), output)

    def submit(self, attempt: Attempt) -> None:
        """Tells the agents that all files of `attempt` are there."""
        create_json(attempt.request, to_json(self._request(attempt)))

    def ended(self) -> dict[int, str]:
        """As `Agents.ended`; an agent that succeeded is reported only when the whole step has ended."""
        nodes = range(self._config.launcher.nodes)
        if self._step is None:
            return dict.fromkeys(nodes, "it was killed")
        code = self._step.poll()
        failed = task_ends(self._log.read_text(encoding="utf-8", errors="replace"))
        return failed if code is None else dict.fromkeys(nodes, f"its step ended (exit code {code})") | failed

    def kill(self) -> list[int]:
        """Kills the step with all agents and ranks. Processes on an unreachable node are fenced by the next attempt's
        folder."""
        if self._step is not None:
            end_step(self._step, KILL_SECONDS, LEAVE_SECONDS)
            self._step = None
        return []

    def _request(self, attempt: Attempt) -> "AppDef":
        app = request(self._run.path, attempt.number, self._config.launcher, self._config.cluster.device)
        if len(self._hosts) > 1:
            app.roles[0].args += ["--store", f"{self._hosts[0]}:{port(self._allocation.job, attempt.number)}"]
        return app

    def _choose(self, attempt: Attempt) -> Chosen:
        wanted = self._config.launcher.nodes
        allocated = slurm_client.hostnames(self._allocation.nodelist)
        left_out = slurm_client.dead(allocated)
        lost = bool(left_out)
        addresses = {host: "" for host in allocated if host not in left_out}
        check_enough(list(addresses), left_out, lost, wanted)
        if self._slurm.check_nodes:
            folder = attempt.path / "nodes"
            command = step(self._node_check(folder), self._slurm, list(addresses))
            reports = check_nodes(command, folder, list(addresses), wanted)
            silent = [host for host in addresses if host not in reports]
            left_out |= dict.fromkeys(silent, NO_REPORT)
            left_out |= {host: report.wrong for host, report in reports.items() if report.wrong}
            lost |= bool(silent)
            addresses = {host: reports[host].address for host in addresses if host not in left_out}
            check_enough(list(addresses), left_out, lost, wanted)
        return choose(allocated, addresses, left_out, wanted)

    def _node_check(self, folder: Path) -> "Role":
        (role,) = request(self._run.path, 1, self._config.launcher, self._config.cluster.device).roles
        submission = newest(self._run)
        memory = 0 if submission is None else read_json(submission.plan)["fit"]["needs"][0]["needed"]
        gpus = self._config.launcher.ranks_per_node if self._config.cluster.device == "cuda" else 0
        doctor = ("doctor", "--node", literal(str(folder)), "--memory", str(memory), "--gpus", str(gpus))
        role.entrypoint, *role.args = python("-m", "gemctl", *doctor)
        return role


def choose(allocated: Sequence[str], addresses: Mapping[str, str], left_out: Mapping[str, str], wanted: int) -> Chosen:
    """`wanted` of the nodes in `addresses` (host → topology address), below as few switches as possible.

    `allocated`: all nodes, in SLURM's order; `left_out`: those that cannot be used, and why.
    """
    ordered = sorted(addresses, key=lambda host: topology_key(addresses[host]))
    windows = [ordered[start : start + wanted] for start in range(len(ordered) - wanted + 1)]
    best = min(windows, key=lambda hosts: len({above for host in hosts for above in _above(addresses[host])}))
    return Chosen([host for host in allocated if host in best], dict(left_out))


def check_enough(usable: Sequence[str], left_out: Mapping[str, str], lost: bool, wanted: int) -> None:
    """TooFewHosts, naming the nodes that were left out, if fewer than `wanted` are usable."""
    if len(usable) >= wanted:
        return
    named = [f"{host}: {why}" for host, why in left_out.items()]
    listed = "; ".join(named[:LISTED] + ["…"] * (len(named) > LISTED)) or "no others were allocated"
    raise TooFewHosts(f"{wanted} nodes are planned, {len(usable)} can take part ({listed})", lost)


def _above(address: str) -> list[str]:
    """The switches above a host, each by its whole path."""
    parts = address.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def check_nodes(command: list[str], folder: Path, hosts: Sequence[str], wanted: int) -> dict[str, NodeReport]:
    """Runs the step `command`, in which every host writes its report into `folder`; returns the reports received."""
    folder.mkdir()
    with (folder / "srun.log").open("wb") as log:
        step = slurm_client.start_step(command, log)
    deadline = time.monotonic() + CHECK_SECONDS
    reports: dict[str, NodeReport] = {}
    enough = False
    while len(reports) < len(hosts) and time.monotonic() < deadline and step.poll() is None:
        reports = _reports(folder, hosts)
        if not enough and sum(not report.wrong for report in reports.values()) >= wanted:
            enough, deadline = True, min(deadline, time.monotonic() + LATE_SECONDS)
        time.sleep(POLL)
    end_step(step, LATE_SECONDS, grace=LATE_SECONDS if len(reports) == len(hosts) else 0)
    return _reports(folder, hosts)


def _reports(folder: Path, hosts: Sequence[str]) -> dict[str, NodeReport]:
    files = (path for path in entries(folder) if path.suffix == ".json" and not path.name.startswith("."))
    return {report.host: report for report in map(read_report, files) if report.host in hosts}


def end_step(step: "subprocess.Popen[bytes]", seconds: float, grace: float) -> None:
    """Ends all processes of a step that do not exit within `grace`; after `seconds`, when a node cannot be reached,
    kills srun alone.

    srun forwards SIGUSR2 to every process even while no controller answers, and nothing handles it. An interrupt of
    srun would begin with SIGTERM, which an agent takes as a request to save.
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


def port(job: int, attempt: int) -> int:
    """The port at which the agents of an attempt meet on their first host; other jobs there have other ports."""
    return FIRST_PORT + (PORT_STRIDE * job + attempt) % PORTS


def task_ends(text: str) -> dict[int, str]:
    """How each task ended that srun reports as failed: "n2: task 1: Killed" and "n[1-3]: tasks 0-2: …"."""
    ends: dict[int, str] = {}
    memory = MEMORY.search(text)
    for numbers, how in TASK_END.findall(text):
        how_ended = how[0].lower() + how[1:] + (f" (SLURM: {memory[0]})" if memory and how == "Killed" else "")
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            ends |= dict.fromkeys(range(int(first), int(last or first) + 1), how_ended)
    return ends


def _check_name(host: str) -> None:
    """GemctlError if the name of the first host, where the agents meet, does not resolve."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise GemctlError(
            f"node {host}, where the agents meet, does not resolve to an address on {socket.gethostname()}: "
            f"{error.strerror}"
        ) from None
