"""The settings and results of `gemctl bench kernels` and `gemctl bench model`, without torch."""

from dataclasses import dataclass, field
from statistics import median

NOT_DONE = "does not support this case"


@dataclass
class KernelSettings:
    """What to measure. `op`, `case`: all if empty; `peer`: NAME=module:function; `batch`: rows."""

    op: list[str] = field(default_factory=list)
    case: list[str] = field(default_factory=list)
    peer: list[str] = field(default_factory=list)
    batch: int = 1152
    heads: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"
    repeats: int = 5
    small: bool = False


@dataclass
class Timing:
    """One contender on one case and direction: seconds by repeat, or `why_not` if it was not measured.

    `rate`: that of the median, in `unit`; `share`: of the rate of the matmul (FLOP/s) or the copy (B/s).
    """

    op: str
    case: str
    direction: str  # forward or backward
    contender: str
    seconds: list[float]
    median: float | None
    rate: float | None
    unit: str
    share: float | None
    why_not: str | None


@dataclass
class KernelBench:
    """`matmul` (FLOP/s) and `copy` (bytes/s) before each case; `host`: seconds until a forward call returns, by op;
    `schedule`: seconds to compute a tile schedule."""

    device: str
    versions: dict[str, str]
    date: str
    command: list[str]
    settings: dict[str, str]
    matmul: list[float]
    copy: list[float]
    host: dict[str, float]
    schedule: float
    timings: list[Timing]


@dataclass(frozen=True)
class Race:
    """Settings of `gemctl bench model`: global batches of `rows` rows, with histories of up to `longest` events and
    `fill` · longest on average; `threads` per rank; `repeats` turns."""

    rows: int
    longest: int
    fill: float
    threads: int
    repeats: int


@dataclass(frozen=True)
class ModelBench:
    """The jagged and the padded model, compared. `events`, `flops`: of a global batch; `peak`: FLOP/s of all ranks;
    `seconds`: of each turn of `batches` steps, by contender; `parts`: seconds of all turns by part of the ledger, by
    contender; `apart`: largest relative difference of their results."""

    race: Race
    model: str
    device: str
    ranks: int
    events: float
    flops: float
    peak: float
    batches: int
    seconds: dict[str, list[float]]
    parts: dict[str, dict[str, float]]
    apart: float

    def examples_per_s(self, contender: str) -> float:
        """Median over the turns."""
        return self.batches * self.race.rows / median(self.seconds[contender])

    def mfu(self, contender: str) -> float:
        """Useful FLOP/s (of real events) over the ranks' peaks."""
        return self.flops * self.batches / (self.peak * median(self.seconds[contender]))

    @property
    def ratio(self) -> float:
        """Examples/s of the jagged model over those of the padded one: the median of the turns' ratios."""
        return median(b / a for a, b in zip(self.seconds["jagged"], self.seconds["padded"], strict=True))
