"""The launch request of an attempt as a value: a TorchX AppDef with one agent a host, before anything is submitted.

    gemctl train --dry-run --json      # shows it

The schedulers of launchers/*.py turn it into their own form; attempts/<n>/request.json keeps it.
"""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemctl import env
from gemctl.cluster.host import cores
from gemctl.config.schema import LauncherConfig
from gemctl.config.slurm import SlurmConfig
from gemctl.errors import InputError
from gemctl.process import FORK_SAFE, python

if TYPE_CHECKING:
    from torchx.specs import AppDef, Resource

ROLE = "agent"
GIB_MB = 1024
NODE = "${replica_id}"  # TorchX puts the number of the host in its place


def request(run_path: Path, attempt: int, launcher: LauncherConfig, device: str = "cpu") -> "AppDef":
    """One agent on each of `launcher.nodes` hosts for attempt `attempt` of the run in `run_path`.

    `device`: cluster.device. What a scheduler has to set aside is asked of a scheduler alone.
    """
    from torchx.specs import AppDef, Role

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
    """The request as JSON has it."""
    return dataclasses.asdict(app)


def from_json(value: dict[str, Any]) -> "AppDef":
    """The request that `to_json` made."""
    from torchx.specs import AppDef, Resource, RetryPolicy, Role

    def role(fields: dict[str, Any]) -> Role:
        known = {name: item for name, item in fields.items() if name not in {"resource", "retry_policy"}}
        return Role(**known, resource=Resource(**fields["resource"]), retry_policy=RetryPolicy(fields["retry_policy"]))

    try:
        return AppDef(**{**value, "roles": [role(fields) for fields in value["roles"]]})
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{getattr(value, 'where', 'the launch request')}: app is none of TorchX's: {error}"
        ) from error


def _resource(launcher: LauncherConfig, device: str) -> "Resource":
    from torchx.specs import Resource

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
    if launcher.kind == "slurm":  # its nodes are other machines
        threads = (launcher.slurm and launcher.slurm.cpus_per_rank) or 1
    return {"OMP_NUM_THREADS": env.omp_threads() or str(threads), **FORK_SAFE}
