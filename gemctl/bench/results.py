"""What `gemctl bench kernels` found out, without torch, so that the command can show it."""

from dataclasses import dataclass, field

NOT_DONE = "does not do this case"


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
    """One contender on one case and direction: seconds by repeat, or why it was not measured.

    `rate` is of the median: FLOP/s for `unit` FLOP/s, else bytes/s; `share` is that of the matmul's or the copy's.
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
    """`matmul` FLOP/s and `copy` bytes/s by repeat; `host` seconds until a forward call returns, by op."""

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
