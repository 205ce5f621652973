"""The whole configuration as plain dataclasses. Pydantic checks them strictly; unknown keys are errors.

gemctl train --cfg        # prints the composed configuration
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from gemctl.specs.limits import FORBID, NonNegative, Positive, PositiveFloat
from gemctl.specs.model import ModelConfig

Degree = Positive | Literal["auto"]
PER_COLUMN = "keeps one AdaGrad state per shard of columns, which changes the result and cannot be resharded"
TableSharding = Annotated[
    Literal["row_wise", "table_wise", "table_row_wise"],
    Field(
        json_schema_extra={
            "refused": {
                "column_wise": f"it {PER_COLUMN}; nearest: table_wise",
                "table_column_wise": f"it {PER_COLUMN}; nearest: table_wise",
                "grid_shard": f"it {PER_COLUMN}; nearest: table_row_wise",
                "data_parallel": "it has no fused optimizer; nearest: table_wise, and mp_replicate for replicas",
            }
        }
    ),
]
Word = Annotated[str, Field(pattern=r"^[^\s'\"]+$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Line = Annotated[str, Field(pattern=r"^[^\n]+$")]
TIME = r"^(\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2})$"
MOST_NODES, MOST_RANKS_PER_NODE = 16_384, 64  # a million ranks, which are planned in seconds


@dataclass
class RunConfig:
    """The run's name and directory."""

    __pydantic_config__ = FORBID
    name: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run's directory is root/name/id")
    ] = "gem"
    root: Annotated[str, Field(min_length=1, description="parent of all run directories")] = "runs"
    seed: Annotated[NonNegative, Field(description="seed of initial values and data order")] = 0
    access: Annotated[
        Literal["private", "group"],
        Field(description="who can read and write the run directory: only you, or its group, which can resume it"),
    ] = "private"


@dataclass
class TrainConfig:
    """How long to train, and what a step does."""

    __pydantic_config__ = FORBID
    global_batch: Annotated[Positive, Field(description="rows per step, over all ranks")] = 4096
    steps: Annotated[Positive, Field(description="steps of the whole run")] = 100
    eval_every: Annotated[NonNegative, Field(description="steps between evaluations; 0: only at the end")] = 0
    accumulate: Annotated[Positive, Field(description="micro-batches of the dense part per step")] = 1
    recompute: Annotated[
        Literal["none", "layers"], Field(description="layers: backward recomputes their activations")
    ] = "none"
    nan: Annotated[
        Literal["skip", "stop"],
        Field(description="non-finite loss or gradient: skip the batch (roll back for a gradient), or stop the run"),
    ] = "skip"
    spike: Annotated[
        float | None,
        Field(gt=1, allow_inf_nan=False, description="skip losses above this × the median of the last 100; null: none"),
    ] = None
    log_every: Annotated[Positive, Field(description="steps between lines of metrics.jsonl")] = 10


@dataclass
class BudgetsConfig:
    """How many failures of each kind are retried, over a whole submission."""

    __pydantic_config__ = FORBID
    preemption: Annotated[NonNegative, Field(description="hosts or the supervisor were preempted or lost")] = 100
    time_limit: Annotated[NonNegative, Field(description="the scheduler's time limit was reached")] = 1000
    crash: Annotated[NonNegative, Field(description="ranks died, raised or hung after the first step")] = 10
    startup: Annotated[NonNegative, Field(description="failures before the first step")] = 0
    no_progress: Annotated[
        NonNegative, Field(description="of crash and startup: consecutive failures without a newer checkpoint")
    ] = 2


@dataclass
class RecoverConfig:
    """When a run counts as dead or stuck, and how often it is retried."""

    __pydantic_config__ = FORBID
    heartbeat: Annotated[
        PositiveFloat,
        Field(
            le=3600,
            description="seconds between heartbeats; after ten missed (at least 5 s) an attempt is dead, a host lost",
        ),
    ] = 1.0
    watchdog: Annotated[
        PositiveFloat, Field(description="seconds without progress after which a stage counts as stuck")
    ] = 300.0
    budgets: BudgetsConfig = field(default_factory=BudgetsConfig)


@dataclass
class SyntheticConfig:
    """Size of the seeded synthetic click log, which is written to `data.train` and `data.eval` if absent."""

    __pydantic_config__ = FORBID
    users: Annotated[Positive, Field(description="users in the log")] = 5000
    items: Annotated[Positive, Field(description="items in the log, drawn by Zipf's law")] = 20000
    rows: Annotated[Positive, Field(description="rows of `data.train`")] = 1_000_000
    eval_rows: Annotated[Positive, Field(description="rows of `data.eval`, later in time")] = 100_000
    seed: Annotated[NonNegative, Field(description="seed of the log")] = 0


Path = Annotated[str, Field(min_length=1)]
DataPath = Path | Annotated[list[Path], Field(min_length=1)]


@dataclass
class DataConfig:
    """The rows, the meaning of their columns, and their order."""

    __pydantic_config__ = FORBID
    spec: Annotated[str, Field(min_length=1, description="feature spec (YAML)")]
    train: Annotated[
        DataPath, Field(description="Parquet file, folder (recursive) or glob, any fsspec URL; or a list of them")
    ]
    eval: Annotated[DataPath | None, Field(description="as data.train; null: no evaluation")] = None
    order: Annotated[
        Literal["time", "shuffled"], Field(description="time: as in the files; shuffled: anew each epoch, by run.seed")
    ] = "shuffled"
    window: Annotated[Positive, Field(description="row groups shuffled together")] = 4
    prefetch: Annotated[NonNegative, Field(description="batches read ahead; 0: read in the training loop")] = 2
    histories: Annotated[Literal["keep", "empty"], Field(description="empty: without the events of all histories")] = (
        "keep"
    )
    synthetic: Annotated[
        SyntheticConfig | None, Field(description="the log to write if the files do not exist; null: none")
    ] = None


@dataclass
class PrecisionConfig:
    """Number formats of the dense part."""

    __pydantic_config__ = FORBID
    dense: Annotated[Literal["fp32", "bf16"], Field(description="compute format; weights and reductions stay fp32")] = (
        "fp32"
    )


@dataclass
class DenseOptimConfig:
    """AdamW over all dense parameters, with one global gradient norm."""

    __pydantic_config__ = FORBID
    lr: Annotated[PositiveFloat, Field(description="learning rate after warm-up")] = 2e-3
    betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]],
        Field(min_length=2, max_length=2, description="decay rates of the first and the second moment"),
    ] = field(default_factory=lambda: [0.9, 0.999])
    eps: Annotated[PositiveFloat, Field(description="added to the square root of the second moment")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False, description="decoupled weight decay")] = 0.0
    warmup: Annotated[NonNegative, Field(description="steps of linear warm-up, also of the tables")] = 0
    clip_norm: Annotated[PositiveFloat | None, Field(description="maximum norm of the dense gradients; null: none")] = (
        1.0
    )


@dataclass
class TablesOptimConfig:
    """Optimizer of the tables, fused into their backward."""

    __pydantic_config__ = FORBID
    kind: Annotated[
        Literal["rowwise_adagrad", "sgd"],
        Field(description="sgd gives the global batch's exact update for any mp_replicate"),
    ] = "rowwise_adagrad"
    lr: Annotated[PositiveFloat, Field(description="learning rate after warm-up")] = 0.1
    eps: Annotated[
        PositiveFloat, Field(description="row-wise AdaGrad: added to the square root of a row's sum of squares")
    ] = 1e-8
    sync_every: Annotated[Positive, Field(description="steps between averages of the table replicas")] = 1


@dataclass
class OptimConfig:
    """Optimizers of the dense part and of the tables."""

    __pydantic_config__ = FORBID
    dense: DenseOptimConfig = field(default_factory=DenseOptimConfig)
    tables: TablesOptimConfig = field(default_factory=TablesOptimConfig)


@dataclass
class TopologyConfig:
    """Degrees of the 5D mesh: world = dp_replicate·dp_shard = mp_replicate·mp_shard."""

    __pydantic_config__ = FORBID
    world_size: Annotated[Degree, Field(description="ranks; auto: launcher.nodes × launcher.ranks_per_node")] = "auto"
    dp_replicate: Annotated[Degree, Field(description="replicas of the dense part")] = 1
    dp_shard: Annotated[Degree, Field(description="ranks that a dense replica is sharded over")] = "auto"
    ep: Annotated[Degree, Field(description="ranks that the experts are sharded over, within dp_shard")] = 1
    mp_replicate: Annotated[Degree, Field(description="replicas of the tables")] = 1
    mp_shard: Annotated[Degree, Field(description="ranks that a replica of the tables is sharded over")] = "auto"
    table_sharding: Annotated[
        TableSharding, Field(description="sharding of the tables that are not named in `tables`")
    ] = "row_wise"
    tables: Annotated[dict[str, TableSharding], Field(description="sharding of single tables, by name")] = field(
        default_factory=dict
    )


@dataclass
class ClusterConfig:
    """The hardware of a rank."""

    __pydantic_config__ = FORBID
    device: Annotated[Literal["cpu", "cuda"], Field(description="device of a rank")] = "cpu"
    memory_gb: Annotated[PositiveFloat | None, Field(description="memory of one host; null: this machine's")] = None
    gpu: Annotated[
        Literal["H100", "H200", "B200", "GB200"] | None, Field(description="GPU model; null: this machine's")
    ] = None


@dataclass
class WarmStartConfig:
    """Tensors that a new run loads from another run's checkpoint, by name, where the shapes match."""

    __pydantic_config__ = FORBID
    source: Annotated[str, Field(min_length=1, description="path of a checkpoint, RUN (its newest) or RUN:step")]
    include: Annotated[list[str], Field(description="patterns of the tensor names to load (* matches all)")] = field(
        default_factory=lambda: ["dense.*", "tables.*"]
    )
    exclude: Annotated[list[str], Field(description="patterns of the tensor names not to load")] = field(
        default_factory=list
    )


@dataclass
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    __pydantic_config__ = FORBID
    every: Annotated[NonNegative, Field(description="steps between saves; 0: only at the end")] = 0
    keep: Annotated[Positive, Field(description="newest published checkpoints to keep")] = 3
    retries: Annotated[NonNegative, Field(description="retries of a save that failed in the storage")] = 1
    tolerate: Annotated[
        NonNegative,
        Field(description="consecutive failed saves that do not end the attempt; the final save must succeed"),
    ] = 1
    warm_start: Annotated[
        WarmStartConfig | None, Field(description="another run's checkpoint to start from; null: initial values")
    ] = None


@dataclass
class SlurmConfig:
    """Options of a job of `launcher.nodes` nodes and spare ones; docs/slurm.md has an example of each."""

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
        Positive, Field(description="seconds before the time limit when the run saves and is requeued")
    ] = 120
    requeue: Annotated[bool, Field(description="requeue the job after its time limit, a preemption or a lost node")] = (
        True
    )
    dependency: Annotated[Word | None, Field(description="--dependency, such as afterok:1234")] = None
    array_at_once: Annotated[Positive | None, Field(description="concurrent runs of a sweep (-m); null: all")] = None
    gres: Annotated[
        Word | None, Field(description="--gres, such as gpu:h100:8; null: one GPU per rank if cluster.device=cuda")
    ] = None
    cpus_per_rank: Annotated[Positive | None, Field(description="cores per rank; null: SLURM's default")] = None
    memory_gb: Annotated[PositiveFloat | None, Field(description="--mem, GiB per node; null: SLURM's default")] = None
    cpu_bind: Annotated[Word | None, Field(description="--cpu-bind of the agents; null: all cores of the job")] = None
    mem_bind: Annotated[Word | None, Field(description="--mem-bind of the agents (NUMA), such as local")] = None
    exclusive: Annotated[bool, Field(description="--exclusive: no other job on its nodes")] = False
    exclude: Annotated[list[Word], Field(description="--exclude: nodes not to use")] = field(default_factory=list)
    spare_nodes: Annotated[
        NonNegative, Field(description="nodes beyond launcher.nodes that replace lost or bad ones")
    ] = 0
    check_nodes: Annotated[
        bool, Field(description="run gemctl doctor --node on every node before the agents start")
    ] = True
    switches: Annotated[
        Word | None,
        Field(description="--switches: maximum of leaf switches, and how long to wait for them, such as 1@30:00"),
    ] = None
    segment: Annotated[
        Positive | None, Field(description="--segment: nodes that must be in one block (SLURM ≥ 23.11)")
    ] = None
    interface: Annotated[Word | None, Field(description="NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME")] = None
    ib_hca: Annotated[Word | None, Field(description="NCCL_IB_HCA: InfiniBand adapters for NCCL")] = None
    env: Annotated[
        dict[str, Line],
        Field(description="environment variables; their values are stored in the run directory and the batch script"),
    ] = field(default_factory=dict)
    env_from: Annotated[
        list[Name],
        Field(description="environment variables passed on from the submitting shell; their values are not stored"),
    ] = field(default_factory=list)
    setup: Annotated[list[Line], Field(description="shell lines to run first, such as module load cuda")] = field(
        default_factory=list
    )
    container_image: Annotated[Word | None, Field(description="--container-image of the agents (pyxis)")] = None
    container_mounts: Annotated[list[Word], Field(description="--container-mounts (pyxis)")] = field(
        default_factory=list
    )
    container_workdir: Annotated[Word | None, Field(description="--container-workdir (pyxis)")] = None


@dataclass
class LauncherConfig:
    """Where the run is launched."""

    __pydantic_config__ = FORBID
    kind: Annotated[
        Literal["local", "slurm"], Field(description="local: processes on this machine; slurm: a SLURM job")
    ] = "local"
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES, description="hosts")] = 1
    ranks_per_node: Annotated[int, Field(ge=1, le=MOST_RANKS_PER_NODE, description="ranks per host")] = 1
    slurm: Annotated[SlurmConfig | None, Field(description="options of the SLURM job; null: SLURM's defaults")] = None


@dataclass
class Config:
    """The whole configuration. The files of the groups are in `configs/`."""

    __pydantic_config__ = FORBID
    data: DataConfig
    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
