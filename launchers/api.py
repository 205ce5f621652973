"""What a launcher is and what it starts: the `Launcher` protocol, and the launch request that every launcher is given.

    launcher_of("slurm").start(run, submission, config)
    request(run.path, 1, config.launcher)      # a TorchX AppDef: one agent per host

`launcher.kind` selects a module of launchers/ that has the functions of `Launcher`. A new scheduler is one more module
here, its name in LAUNCHERS below, and its kind and options in LauncherConfig (gemctl/config/schema.py): see "Add a
scheduler" in docs/architecture.md.
"""

import dataclasses
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from gemctl import env
from gemctl.cluster.host import cores
from gemctl.config.schema import Config, LauncherConfig, SlurmConfig
from gemctl.errors import InputError
from gemctl.process import FORK_SAFE, python
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.submission import Job, Submission

if TYPE_CHECKING:
    from torchx.specs import AppDef, Resource

LAUNCHERS = {"local": "gemctl.launchers.local", "slurm": "gemctl.launchers.slurm"}
ROLE = "agent"
GIB_MB = 1024
NODE = "${replica_id}"  # TorchX replaces it by the number of the host
RequeueReason = Literal["time_limit", "lost_hosts", "terminated"]


class Agents(Protocol):
    """The agents that serve the attempts of one run, one agent per host."""

    def start(self, attempt: Attempt) -> None:
        """Starts agents, which import what the ranks need and then wait for `attempt`. TooFewHosts if it cannot."""

    def submit(self, attempt: Attempt) -> None:
        """Tells the agents that all files of `attempt` are written, so that its ranks may start."""

    def ended(self) -> dict[int, str]:
        """How the agents that have exited ended, in words, by node."""

    def kill(self) -> list[int]:
        """Kills all agents and ranks; returns the processes of this host that survived."""


class Launcher(Protocol):
    """What a module of launchers/ provides. Every call of a scheduler's client has a time-out."""

    IN_PROCESS: bool  # a run in the foreground is supervised by the command's own process

    def check(self, config: Config) -> None:
        """InputError for a configuration that this launcher cannot launch anywhere."""

    def check_here(self, config: Config) -> None:
        """InputError or GemctlError if this machine cannot launch the configuration now."""

    def script(self, app: "AppDef", config: Config, submission: Path) -> str | None:
        """The batch script that `start` would submit for the submission's folder; None for a launcher without one."""

    def start(self, run: RunDir, submission: Submission, config: Config) -> None:
        """Has `gemctl supervise` started for the submission, outside this process, and writes submitted.json."""

    def jobs(self, submissions: Sequence[Submission]) -> list[Job | None]:
        """The state of the job that `start` created for each, by one query; None where there is none."""

    def cancel(self, submission: Submission) -> None:
        """Removes a waiting job from the queue."""

    def requeue(self, config: Config, reason: RequeueReason) -> bool:
        """Has the scheduler start this process, the supervisor, again in another job. `reason`: the time limit is near,
        hosts were lost, or this process was told to terminate (then only if the job is being preempted). False if the
        scheduler will not."""

    def replaces_supervisor(self, submission: Submission) -> bool:
        """True if the scheduler started this process in place of an earlier supervisor of the submission that it has
        ended: an attempt whose heartbeat is still fresh is beyond its reach and is not waited for."""

    def agents(self, run: RunDir, config: Config) -> Agents:
        """Starts the agents of the run's attempts, from the supervisor's process."""


def launcher_of(kind: str) -> Launcher:
    """The launcher for a `launcher.kind`. InputError for one that this gemctl does not have."""
    if kind not in LAUNCHERS:
        raise InputError(f"launcher.kind={kind}: unknown to this gemctl (it has {', '.join(LAUNCHERS)})")
    return cast("Launcher", importlib.import_module(LAUNCHERS[kind]))


def request(run_path: Path, attempt: int, launcher: LauncherConfig, device: str = "cpu") -> "AppDef":
    """The launch request of an attempt: one agent on each of `launcher.nodes` hosts. `device`: cluster.device.

    attempts/<n>/request.json keeps it; `gemctl train --dry-run --json` shows it.
    """
    from torchx.specs import AppDef, Role  # noqa: PLC0415

    program, *arguments = python(
        "-m", "gemctl.ranks.agent", literal(str(run_path)), "--attempt", str(attempt), "--node", NODE
    )
    role = Role(
        name=ROLE,
        image="",
        entrypoint=program,
        args=arguments,
        env=_environment(launcher),
        num_replicas=launcher.nodes,
        max_retries=0,
        resource=_resource(launcher, device),
    )
    return AppDef(name=run_path.name, roles=[role])


def literal(text: str) -> str:
    """`text` as an argument in which TorchX finds no macro."""
    return text.replace("$", "$$")


def to_json(app: "AppDef") -> dict[str, Any]:
    """The request as a JSON object."""
    return dataclasses.asdict(app)


def from_json(value: dict[str, Any]) -> "AppDef":
    """The request that `to_json` made. InputError if it is not one."""
    from torchx.specs import AppDef, Resource, RetryPolicy, Role  # noqa: PLC0415

    def role(fields: dict[str, Any]) -> Role:
        known = {name: item for name, item in fields.items() if name not in {"resource", "retry_policy"}}
        return Role(**known, resource=Resource(**fields["resource"]), retry_policy=RetryPolicy(fields["retry_policy"]))

    try:
        return AppDef(**{**value, "roles": [role(fields) for fields in value["roles"]]})
    except (TypeError, ValueError, AttributeError) as error:
        where = getattr(value, "where", "the launch request")
        raise InputError(f"{where}: app is not a TorchX AppDef: {error}") from error


def _resource(launcher: LauncherConfig, device: str) -> "Resource":
    """What a scheduler reserves on each host; −1: nothing in particular."""
    from torchx.specs import Resource  # noqa: PLC0415

    if launcher.kind == "local":
        return Resource(cpu=-1, gpu=-1, memMB=-1)
    ranks, slurm = launcher.ranks_per_node, launcher.slurm or SlurmConfig()
    cpus, memory = slurm.cpus_per_rank, slurm.memory_gb
    return Resource(
        cpu=ranks * cpus if cpus else -1,
        gpu=ranks if device == "cuda" else -1,
        memMB=math.ceil(memory * GIB_MB) if memory else -1,
    )


def _environment(launcher: LauncherConfig) -> dict[str, str]:
    threads = max(1, cores() // launcher.ranks_per_node)
    if launcher.kind != "local":  # the nodes are other machines
        threads = (launcher.slurm and launcher.slurm.cpus_per_rank) or 1
    return {"OMP_NUM_THREADS": env.omp_threads() or str(threads), **FORK_SAFE}
