"""What `gemctl eval` found out: a checkpoint's quality on a data set, and the baseline's on the same rows."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Evaluation:
    """`tasks` and `baseline`: figures by task, as gemctl/train/metrics.py computes them; `baseline` is None where
    `baseline_reason` says why there is none. `out`: the Parquet file with the scores, if one was asked for."""

    run: str
    checkpoint: str
    step: int
    data: str
    rows: int
    seconds: float
    tasks: dict[str, dict[str, Any]]
    baseline: dict[str, dict[str, Any]] | None
    baseline_reason: str | None
    out: str | None
    notes: list[str]
