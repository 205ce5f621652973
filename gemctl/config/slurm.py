"""What a SLURM job asks for: the keys of `launcher.slurm`.

    gemctl train launcher=slurm launcher.nodes=8 launcher.slurm.partition=gpu launcher.slurm.account=ads --dry-run

Each key is one option of sbatch or srun, or an environment variable; docs/slurm.md has an example of each.
"""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from gemctl.specs.limits import FORBID, NonNegative, Positive, PositiveFloat

Word = Annotated[str, Field(pattern=r"^[^\s'\"]+$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Line = Annotated[str, Field(pattern=r"^[^\n]+$")]
TIME = r"^(\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2})$"


@dataclass
class SlurmConfig:
    """One job of `launcher.nodes` nodes and spare ones, with one agent on each."""

    __pydantic_config__ = FORBID
    partition: Annotated[Word | None, Field(description="--partition")] = None
    account: Annotated[Word | None, Field(description="--account")] = None
    qos: Annotated[Word | None, Field(description="--qos")] = None
    constraint: Annotated[Word | None, Field(description="--constraint: features of the nodes")] = None
    reservation: Annotated[Word | None, Field(description="--reservation")] = None
    time_limit: Annotated[
        str | None, Field(pattern=TIME, description="--time: minutes, H:MM:SS or D-HH:MM:SS; null: the partition's")
    ] = None
    save_before_limit: Annotated[
        Positive, Field(description="seconds before the time limit at which the run saves and is requeued")
    ] = 120
    requeue: Annotated[
        bool, Field(description="the job is queued again after its time limit, a preemption or a lost node")
    ] = True
    dependency: Annotated[Word | None, Field(description="--dependency, as in afterok:1234")] = None
    array_at_once: Annotated[Positive | None, Field(description="runs of a sweep (-m) at work at once; null: all")] = (
        None
    )
    gres: Annotated[
        Word | None, Field(description="--gres, as in gpu:h100:8; null: with cluster.device=cuda a GPU for each rank")
    ] = None
    cpus_per_rank: Annotated[Positive | None, Field(description="cores of each rank; null: SLURM's default")] = None
    memory_gb: Annotated[PositiveFloat | None, Field(description="--mem, GiB of a node; null: SLURM's default")] = None
    cpu_bind: Annotated[Word | None, Field(description="--cpu-bind of the agents; null: they take the job's cores")] = (
        None
    )
    mem_bind: Annotated[Word | None, Field(description="--mem-bind of the agents (NUMA), as in local")] = None
    exclusive: Annotated[bool, Field(description="--exclusive: no other job on its nodes")] = False
    exclude: Annotated[list[Word], Field(description="--exclude: nodes that it must not get")] = field(
        default_factory=list
    )
    spare_nodes: Annotated[
        NonNegative, Field(description="nodes beyond launcher.nodes, which take the places of lost or bad ones")
    ] = 0
    check_nodes: Annotated[bool, Field(description="gemctl doctor --node on every node before agents start")] = True
    switches: Annotated[
        Word | None, Field(description="--switches: most leaf switches, and how long to wait for them, as in 1@30:00")
    ] = None
    segment: Annotated[
        Positive | None, Field(description="--segment: nodes that must lie in one block (SLURM ≥ 23.11)")
    ] = None
    interface: Annotated[Word | None, Field(description="NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME")] = None
    ib_hca: Annotated[Word | None, Field(description="NCCL_IB_HCA: InfiniBand adapters that NCCL uses")] = None
    env: Annotated[
        dict[str, Line],
        Field(description="more environment variables; their values stand in the run's files and the batch script"),
    ] = field(default_factory=dict)
    env_from: Annotated[
        list[Name],
        Field(description="variables of the submitting shell that the job gets; their values are written nowhere"),
    ] = field(default_factory=list)
    setup: Annotated[list[Line], Field(description="shell lines before all else, as in module load cuda")] = field(
        default_factory=list
    )
    container_image: Annotated[Word | None, Field(description="--container-image of the agents (pyxis)")] = None
    container_mounts: Annotated[list[Word], Field(description="--container-mounts (pyxis)")] = field(
        default_factory=list
    )
    container_workdir: Annotated[Word | None, Field(description="--container-workdir (pyxis)")] = None
