"""A SLURM job as a value: one component, one allocation, one replica of the request's role on each node.

    gemctl train launcher=slurm --dry-run      # prints the batch script

    job = batch_job(app, slurm, output, ["gemctl", "supervise", "RUN"])
    job.script()

TorchX's own SLURM scheduler submits a heterogeneous job of one component per node: SLURM ignores the network topology
for it, and it cannot be an array.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl.config.schema import SlurmConfig
from gemctl.launchers.api import literal

if TYPE_CHECKING:
    from torchx.specs import AppDef, Role

# SLURM sets the topology address of a host on that host only.
ADDRESS = 'export GEMCTL_TOPOLOGY_ADDRESS="${SLURM_TOPOLOGY_ADDR:-}"'
HEAD = "GEMCTL_FIRST_HOST"  # variable with the name of the first node
FIRST_HOST = f'{HEAD}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1); export {HEAD}'
# The shell variables of a replica that hold the values of TorchX's macros.
VARIABLES = {"replica_id": "$SLURM_PROCID", "app_id": "$SLURM_JOB_ID"}


@dataclass(frozen=True)
class BatchJob:
    """What is submitted to sbatch. `options`: long names and values, None for a flag; `command`: what the script execs,
    as shell words that are quoted already."""

    name: str
    options: dict[str, str | None]
    env: dict[str, str]
    setup: list[str]
    command: str
    before: list[str] = field(default_factory=list)  # lines before the command

    def script(self) -> str:
        """The batch script.

        SIGUSR1 warns that the time limit is near: it must not kill the script before the command handles it.
        """
        options = {"job-name": self.name, **self.options}
        lines = [
            f"#SBATCH --{key}" + ("" if value is None else f"={directive(value)}") for key, value in options.items()
        ]
        exports = [f"export {name}={shell_word(value)}" for name, value in self.env.items()]
        body = ["set -euo pipefail", "trap '' USR1", *exports, *self.setup, *self.before, f"exec {self.command}"]
        return "\n".join(["#!/bin/bash", *lines, "", *body]) + "\n"


def batch_job(app: "AppDef", slurm: SlurmConfig, output: str, command: str, before: Sequence[str] = ()) -> BatchJob:
    """The job for the one role of `app`. `output`: file for the script's stdout and stderr, in SLURM's syntax."""
    (role,) = app.roles
    return BatchJob(
        app.name, _options(role, slurm, output), environment(role, slurm), list(slurm.setup), command, list(before)
    )


def _options(role: "Role", slurm: SlurmConfig, output: str) -> dict[str, str | None]:
    asked = {
        "nodes": str(role.num_replicas + slurm.spare_nodes),
        "ntasks-per-node": "1",
        "output": output,
        "open-mode": "append",
        "signal": f"B:USR1@{slurm.save_before_limit}",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "reservation": slurm.reservation,
        "time": slurm.time_limit,
        "dependency": slurm.dependency,
        "gres": slurm.gres or (f"gpu:{role.resource.gpu}" if role.resource.gpu > 0 else None),
        "cpus-per-task": _positive(role.resource.cpu),
        "mem": f"{role.resource.memMB}M" if role.resource.memMB > 0 else None,
        "exclude": ",".join(slurm.exclude) or None,
        "switches": slurm.switches,
        "segment": str(slurm.segment) if slurm.segment else None,
        "export": ",".join(["ALL", *slurm.env_from]) if slurm.env_from else None,  # sbatch reads their values
    }
    flags = ["requeue" if slurm.requeue else "no-requeue"]
    flags += ["exclusive"] if slurm.exclusive else []
    flags += ["no-kill"] if slurm.spare_nodes else []  # without spares, a lost node ends the job
    return {key: value for key, value in asked.items() if value is not None} | dict.fromkeys(flags)


def environment(role: "Role", slurm: SlurmConfig) -> dict[str, str]:
    """The role's variables, those that name network interfaces, and the user's own, which override both."""
    named: dict[str, str] = {}
    if slurm.interface:
        named |= {"NCCL_SOCKET_IFNAME": slurm.interface, "GLOO_SOCKET_IFNAME": slurm.interface}
    if slurm.ib_hca:
        named["NCCL_IB_HCA"] = slurm.ib_hca
    return role.env | named | {name: literal(value) for name, value in slurm.env.items()}


def step(role: "Role", slurm: SlurmConfig, hosts: Sequence[str] | None = None, output: str | None = None) -> list[str]:
    """The srun command that runs one replica of the role on each of `hosts` (None: on all nodes of the job).

    SLURM numbers the replicas in its own order of the nodes. A step outlives the loss of a node or a replica.
    """
    nodes = role.num_replicas if hosts is None else len(hosts)
    options = [
        *(() if hosts is None else (f"--nodelist={','.join(hosts)}",)),
        *(() if (cpus := _positive(role.resource.cpu)) is None else (f"--cpus-per-task={cpus}",)),
        f"--cpu-bind={slurm.cpu_bind or 'none'}",
        *(() if slurm.mem_bind is None else (f"--mem-bind={slurm.mem_bind}",)),
        *(() if output is None else (f"--output={output}",)),
        *_container(slurm),
    ]
    command = " ".join([shlex.quote(role.entrypoint), *map(shell_word, role.args)])
    return [
        "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--mem=0",
        "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--input=none", "--export=ALL",
        *options, "bash", "-c", f"{ADDRESS}; exec {command}",
    ]  # fmt: skip


def _container(slurm: SlurmConfig) -> list[str]:
    if slurm.container_image is None:
        return []
    mounts, workdir = ",".join(slurm.container_mounts), slurm.container_workdir
    return [
        f"--container-image={slurm.container_image}",
        *([f"--container-mounts={mounts}"] if mounts else []),
        *([f"--container-workdir={workdir}"] if workdir else []),
    ]


def directive(value: str) -> str:
    """`value` for a #SBATCH line: in quotes where a blank or # would end it. A backslash escapes any character but a
    blank, in quotes too. A line break cannot be expressed."""
    if not re.search(r"[\s\"'\\#]", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def file_name(path: Path) -> str:
    """`path` as an output file's name in SLURM's syntax: if it has a backslash, % is literal and backslashes are
    doubled; otherwise % begins a placeholder and %% is a literal %."""
    text = str(path)
    return text.replace("\\", "\\\\") if "\\" in text else text.replace("%", "%%")


def shell_word(text: str) -> str:
    """`text` as one shell word, with TorchX's macros replaced by the variables that SLURM sets for each replica."""
    from torchx.specs import macros  # noqa: PLC0415

    marks = {name: f"\0{name}\0" for name in VARIABLES}
    marked = macros.Values(img_root="", base_img_root="", rank0_env=HEAD, **marks).substitute(text)
    parts = marked.split("\0")
    words = [f'"{VARIABLES[part]}"' if at % 2 else shlex.quote(part) for at, part in enumerate(parts)]
    return "".join(word for word in words if word != "''") or "''"


def _positive(count: int) -> str | None:
    return str(count) if count > 0 else None
