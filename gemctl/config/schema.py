"""The whole configuration as plain dataclasses; pydantic checks them strictly, unknown keys are errors.

gemctl train --cfg        # prints the composed configuration
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from gemctl.config.slurm import SlurmConfig
from gemctl.specs.limits import FORBID, NonNegative, Positive, PositiveFloat
from gemctl.specs.model import ModelConfig

Degree = Positive | Literal["auto"]
PER_COLUMN = "keeps one AdaGrad state per shard of columns, which changes the result and cannot be loaded elsewhere"
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
MOST_NODES, MOST_RANKS_PER_NODE = 16_384, 64  # a million ranks: more than any machine, and planned in seconds


@dataclass
class RunConfig:
    """Names the run and where its directory lies."""

    __pydantic_config__ = FORBID
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="folder below root")] = "gem"
    root: Annotated[str, Field(min_length=1, description="where run directories lie")] = "runs"
    seed: Annotated[NonNegative, Field(description="seed of init and data order")] = 0
    access: Annotated[
        Literal["private", "group"],
        Field(description="who may read and write the run's directory: you alone, or its group, which may resume it"),
    ] = "private"


@dataclass
class TrainConfig:
    """How much is trained, and what a step does."""

    __pydantic_config__ = FORBID
    global_batch: Annotated[Positive, Field(description="rows per step, over all ranks")] = 4096
    steps: Annotated[Positive, Field(description="steps of the whole run")] = 100
    eval_every: Annotated[NonNegative, Field(description="steps between evaluations; 0: at the end only")] = 0
    accumulate: Annotated[Positive, Field(description="micro-batches of the dense part in a step")] = 1
    recompute: Annotated[
        Literal["none", "layers"], Field(description="layers: backward computes their activations anew")
    ] = "none"
    nan: Annotated[
        Literal["skip", "stop"],
        Field(description="skip: without a batch of non-finite loss, back to a checkpoint for a gradient; stop: end"),
    ] = "skip"
    spike: Annotated[
        float | None,
        Field(gt=1, allow_inf_nan=False, description="skip a loss above this × the median of the last 100; null: none"),
    ] = None
    log_every: Annotated[Positive, Field(description="steps between lines in metrics.jsonl")] = 10


@dataclass
class BudgetsConfig:
    """How many ends of a kind are answered with another attempt, in all of one submission."""

    __pydantic_config__ = FORBID
    preemption: Annotated[NonNegative, Field(description="hosts or the supervisor taken away, or lost")] = 100
    time_limit: Annotated[NonNegative, Field(description="the scheduler's time limit came")] = 1000
    crash: Annotated[NonNegative, Field(description="ranks that died, raised or hung after the first step")] = 10
    startup: Annotated[NonNegative, Field(description="failures before the first step")] = 0
    no_progress: Annotated[
        NonNegative, Field(description="of crash and startup: failures in a row that left no newer checkpoint")
    ] = 2


@dataclass
class RecoverConfig:
    """When a run counts as dead or stuck, and how often it is brought back."""

    __pydantic_config__ = FORBID
    heartbeat: Annotated[
        PositiveFloat,
        Field(le=3600, description="seconds between beats; ten missed (5 s at least): a dead attempt or a lost host"),
    ] = 1.0
    watchdog: Annotated[PositiveFloat, Field(description="seconds that a stage may take without progress")] = 300.0
    budgets: BudgetsConfig = field(default_factory=BudgetsConfig)


@dataclass
class SyntheticConfig:
    """Size of the seeded synthetic click log; it is written to `data.train` and `data.eval` when absent."""

    __pydantic_config__ = FORBID
    users: Annotated[Positive, Field(description="users in the log")] = 5000
    items: Annotated[Positive, Field(description="items in the log, chosen by Zipf's law")] = 20000
    rows: Annotated[Positive, Field(description="rows of `data.train`")] = 1_000_000
    eval_rows: Annotated[Positive, Field(description="rows of `data.eval`, later in time")] = 100_000
    seed: Annotated[NonNegative, Field(description="seed of the log; another seed is another log")] = 0


Path = Annotated[str, Field(min_length=1)]
DataPath = Path | Annotated[list[Path], Field(min_length=1)]


@dataclass
class DataConfig:
    """Which rows, what their columns mean, and in which order they come."""

    __pydantic_config__ = FORBID
    spec: Annotated[str, Field(min_length=1, description="feature spec (YAML)")]
    train: Annotated[
        DataPath, Field(description="Parquet file, folder (with those below it) or glob, any fsspec URL; or a list")
    ]
    eval: Annotated[DataPath | None, Field(description="as data.train; null: no evaluation")] = None
    order: Annotated[
        Literal["time", "shuffled"], Field(description="as in the file, or anew each epoch from run.seed")
    ] = "shuffled"
    window: Annotated[Positive, Field(description="row groups that are shuffled together")] = 4
    prefetch: Annotated[NonNegative, Field(description="batches read ahead; 0: read in the loop")] = 2
    histories: Annotated[Literal["keep", "empty"], Field(description="empty: every event history has no events")] = (
        "keep"
    )
    synthetic: Annotated[
        SyntheticConfig | None, Field(description="the log that is made when the files do not exist; null: never")
    ] = None


@dataclass
class PrecisionConfig:
    """Formats of the dense part."""

    __pydantic_config__ = FORBID
    dense: Annotated[Literal["fp32", "bf16"], Field(description="compute format; weights and sums stay fp32")] = "fp32"


@dataclass
class DenseOptimConfig:
    """AdamW over all dense parameters, one global gradient norm."""

    __pydantic_config__ = FORBID
    lr: Annotated[PositiveFloat, Field(description="learning rate after warm-up")] = 2e-3
    betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]],
        Field(min_length=2, max_length=2, description="decay of the first and the second moment"),
    ] = field(default_factory=lambda: [0.9, 0.999])
    eps: Annotated[PositiveFloat, Field(description="added to the root of the second moment")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False, description="decoupled weight decay")] = 0.0
    warmup: Annotated[NonNegative, Field(description="steps of linear warm-up, tables too")] = 0
    clip_norm: Annotated[PositiveFloat | None, Field(description="bound of the dense gradients' norm; null: none")] = (
        1.0
    )


@dataclass
class TablesOptimConfig:
    """The tables' optimizer, fused into their backward."""

    __pydantic_config__ = FORBID
    kind: Annotated[
        Literal["rowwise_adagrad", "sgd"], Field(description="sgd is exact to the global batch for any mp_replicate")
    ] = "rowwise_adagrad"
    lr: Annotated[PositiveFloat, Field(description="learning rate after warm-up")] = 0.1
    eps: Annotated[
        PositiveFloat, Field(description="row-wise AdaGrad: added to the root of the row's sum of squares")
    ] = 1e-8
    sync_every: Annotated[Positive, Field(description="steps between averages of the tables' replicas")] = 1


@dataclass
class OptimConfig:
    """How parameters are updated: the dense part and the tables."""

    __pydantic_config__ = FORBID
    dense: DenseOptimConfig = field(default_factory=DenseOptimConfig)
    tables: TablesOptimConfig = field(default_factory=TablesOptimConfig)


@dataclass
class TopologyConfig:
    """Degrees of the 5D mesh: world = dp_replicate·dp_shard = mp_replicate·mp_shard."""

    __pydantic_config__ = FORBID
    world_size: Annotated[Degree, Field(description="ranks; auto: launcher.nodes × launcher.ranks_per_node")] = "auto"
    dp_replicate: Annotated[Degree, Field(description="replicas of the dense part")] = 1
    dp_shard: Annotated[Degree, Field(description="ranks that one dense replica is sharded over")] = "auto"
    ep: Annotated[Degree, Field(description="ranks that the experts are spread over, within dp_shard")] = 1
    mp_replicate: Annotated[Degree, Field(description="replicas of the tables")] = 1
    mp_shard: Annotated[Degree, Field(description="ranks that one replica of the tables is sharded over")] = "auto"
    table_sharding: Annotated[TableSharding, Field(description="of every table not named in `tables`")] = "row_wise"
    tables: Annotated[dict[str, TableSharding], Field(description="sharding of single tables, by name")] = field(
        default_factory=dict
    )


@dataclass
class ClusterConfig:
    """What a rank runs on."""

    __pydantic_config__ = FORBID
    device: Annotated[Literal["cpu", "cuda"], Field(description="a rank's device")] = "cpu"
    memory_gb: Annotated[PositiveFloat | None, Field(description="memory of one host; null: this machine's")] = None
    gpu: Annotated[
        Literal["H100", "H200", "B200", "GB200"] | None, Field(description="model of the GPUs; null: this machine's")
    ] = None


@dataclass
class WarmStartConfig:
    """What a run takes over from another run's checkpoint when it starts, by name, where the shapes agree."""

    __pydantic_config__ = FORBID
    source: Annotated[str, Field(min_length=1, description="path of a checkpoint, RUN (its newest) or RUN:step")]
    include: Annotated[
        list[str], Field(description="patterns of the names of tensors that are taken (* matches all)")
    ] = field(default_factory=lambda: ["dense.*", "tables.*"])
    exclude: Annotated[list[str], Field(description="patterns of those that are not")] = field(default_factory=list)


@dataclass
class CheckpointConfig:
    """When the state is saved and how many checkpoints are kept."""

    __pydantic_config__ = FORBID
    every: Annotated[NonNegative, Field(description="steps between saves; 0: at the end only")] = 0
    keep: Annotated[Positive, Field(description="published checkpoints kept, newest first")] = 3
    retries: Annotated[NonNegative, Field(description="times that a save is tried again which the storage refused")] = 1
    tolerate: Annotated[
        NonNegative, Field(description="failed saves in a row that training goes on without; never the last one")
    ] = 1
    warm_start: Annotated[
        WarmStartConfig | None, Field(description="another run's checkpoint to begin with; null: initial values")
    ] = None


@dataclass
class LauncherConfig:
    """Where the agents are started."""

    __pydantic_config__ = FORBID
    kind: Annotated[
        Literal["local", "slurm"], Field(description="local: processes on this machine; slurm: a SLURM job")
    ] = "local"
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES, description="hosts")] = 1
    ranks_per_node: Annotated[int, Field(ge=1, le=MOST_RANKS_PER_NODE, description="ranks on each host")] = 1
    slurm: Annotated[SlurmConfig | None, Field(description="what a SLURM job asks for; null: SLURM's defaults")] = None


@dataclass
class Config:
    """Everything that can be set. Groups lie in `configs/`."""

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
