"""Agents as one step of a SLURM job: on which nodes, where they meet, and how they ended.

The supervisor runs on the job's first node. A next attempt is served by the agents that live; where one was lost, all
are started anew on nodes that are well (launchers/slurm_nodes.py).
"""

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl import env
from gemctl.config.schema import Config
from gemctl.config.slurm import SlurmConfig
from gemctl.errors import GemctlError
from gemctl.launchers import slurm_client
from gemctl.launchers.request import literal, request, to_json
from gemctl.launchers.slurm_job import file_name, step
from gemctl.launchers.slurm_nodes import SILENT, Chosen, ask, check_enough, choose, end
from gemctl.process import python
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import create_json, read_json
from gemctl.run.submission import newest

if TYPE_CHECKING:
    from torchx.specs import AppDef, Role

FIRST_PORT, PORTS = 20_000, 12_000  # below those that the system gives away
APART = 31  # jobs that follow each other, and a job's attempts, have ports of their own
LEAVE_SECONDS = 1.0  # for agents that have nothing left to do to end by themselves
KILL_SECONDS = 10.0
MEMORY = re.compile(r"exceeded memory limit(?: \(\d+ > \d+\))?|oom_kill event", re.IGNORECASE)
TASK_END = re.compile(r"^srun: error: \S+: tasks? ([\d,\-]+): (.+)$", re.MULTILINE)


class SlurmAgents:
    """The agents of a run's attempts, in the job that this process runs in."""

    def __init__(self, run: RunDir, config: Config, allocation: env.SlurmAllocation) -> None:
        self._run, self._config, self._allocation = run, config, allocation
        self._slurm = config.launcher.slurm or SlurmConfig()
        self._step: subprocess.Popen[bytes] | None = None
        self._log = Path()
        self._hosts: list[str] = []

    def start(self, attempt: Attempt) -> None:
        """Starts agents that begin with `attempt`. TooFewHosts if it cannot have as many as were planned."""
        chosen = self._choose(attempt)
        create_json(attempt.path / "hosts.json", {"hosts": chosen.hosts, "left_out": chosen.left_out})
        for host, why in chosen.left_out.items():
            sys.stderr.write(f"node {host} is left out: {why}\n")
        _check_name(chosen.hosts[0])
        self._hosts, self._log = chosen.hosts, attempt.logs / "srun.log"
        (role,) = self._request(attempt).roles
        # `Attempt.agent_output`, from the agent's first word on; below a backslash SLURM knows no %t, and what an agent
        # says before it opens that file itself is in srun.log.
        words = None if "\\" in str(attempt.logs) else f"{file_name(attempt.logs)}/agent-%t.log"
        with self._log.open("ab") as output:
            self._step = slurm_client.start_step(step(role, self._slurm, chosen.hosts, words), output)

    def submit(self, attempt: Attempt) -> None:
        """Tells the agents that all files of `attempt` are there."""
        create_json(attempt.request, to_json(self._request(attempt)))

    def ended(self) -> dict[int, str]:
        """How agents ended, by node; one that ended well is told of when the whole step has ended."""
        nodes = range(self._config.launcher.nodes)
        if self._step is None:
            return dict.fromkeys(nodes, "it was ended")
        code = self._step.poll()
        told = task_ends(self._log.read_text(encoding="utf-8", errors="replace"))
        return told if code is None else dict.fromkeys(nodes, f"its step has ended (exit code {code})") | told

    def kill(self) -> list[int]:
        """Kills the step with all agents and ranks. What runs on a node that is not reached is fenced by the next
        attempt's folder."""
        if self._step is not None:
            end(self._step, KILL_SECONDS, LEAVE_SECONDS)
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
            reports = ask(step(self._doctor(folder), self._slurm, list(addresses)), folder, list(addresses), wanted)
            silent = [host for host in addresses if host not in reports]
            left_out |= dict.fromkeys(silent, SILENT)
            left_out |= {host: report.wrong for host, report in reports.items() if report.wrong}
            lost |= bool(silent)
            addresses = {host: reports[host].address for host in addresses if host not in left_out}
            check_enough(list(addresses), left_out, lost, wanted)
        return choose(allocated, addresses, left_out, wanted)

    def _doctor(self, folder: Path) -> "Role":
        (role,) = request(self._run.path, 1, self._config.launcher, self._config.cluster.device).roles
        submission = newest(self._run)
        memory = 0 if submission is None else read_json(submission.plan)["fit"]["needs"][0]["needed"]
        gpus = self._config.launcher.ranks_per_node if self._config.cluster.device == "cuda" else 0
        doctor = ("doctor", "--node", literal(str(folder)), "--memory", str(memory), "--gpus", str(gpus))
        role.entrypoint, *role.args = python("-m", "gemctl", *doctor)
        return role


def port(job: int, attempt: int) -> int:
    """Where the agents of an attempt meet, on their first host; another job there has another."""
    return FIRST_PORT + (APART * job + attempt) % PORTS


def task_ends(text: str) -> dict[int, str]:
    """How tasks ended that srun says have failed: "n2: task 1: Killed" and "n[1-3]: tasks 0-2: …"."""
    ends: dict[int, str] = {}
    memory = MEMORY.search(text)
    for numbers, how in TASK_END.findall(text):
        told = how[0].lower() + how[1:] + (f" (SLURM: {memory[0]})" if memory and how == "Killed" else "")
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            ends |= dict.fromkeys(range(int(first), int(last or first) + 1), told)
    return ends


def _check_name(host: str) -> None:
    """GemctlError if the first host, where the agents meet, has no address."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise GemctlError(
            f"node {host}, where the agents meet, does not resolve to an address on {socket.gethostname()}: "
            f"{error.strerror}"
        ) from None
