"""The launch request of an attempt as a value: a TorchX AppDef with one agent a host, before anything is submitted.

    gemctl train --dry-run --json      # shows it

The schedulers of launchers/*.py turn it into their own form; attempts/<n>/request.json keeps it.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemctl import env
from gemctl.config.schema import LauncherConfig

if TYPE_CHECKING:
    from torchx.specs import AppDef

ROLE = "agent"
NODE = "${replica_id}"  # TorchX puts the number of the host in its place


def request(run_path: Path, attempt: int, launcher: LauncherConfig) -> "AppDef":
    """One agent on each of `launcher.nodes` hosts for attempt `attempt` of the run in `run_path`."""
    from torchx.specs import AppDef, Resource, Role

    role = Role(
        name=ROLE,
        image="",
        entrypoint=sys.executable,
        args=["-m", "gemctl.agent", str(run_path), "--attempt", str(attempt), "--node", NODE],
        env=_environment(launcher),
        num_replicas=launcher.nodes,
        max_retries=0,
        resource=Resource(cpu=-1, gpu=-1, memMB=-1),
    )
    return AppDef(name=run_path.name, roles=[role])


def to_json(app: "AppDef") -> dict[str, Any]:
    """The request as JSON has it."""
    return dataclasses.asdict(app)


def _environment(launcher: LauncherConfig) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // launcher.ranks_per_node)
    values = {
        "OMP_NUM_THREADS": env.omp_threads() or str(threads),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch must not open CUDA before the agent forks
    }
    if launcher.nodes == 1:
        values["GLOO_SOCKET_IFNAME"] = env.gloo_interface() or "lo"
    return values
