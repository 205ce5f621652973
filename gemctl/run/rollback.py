"""Steps at which a run had to go back to a checkpoint, and so the batches that its next attempts pass over.

    attempts/<n>/rolled_back.json   {"step": 31, "what": "gradient", "ranks": [1]}

Order and values of the batches are functions of the seed, so what went wrong would come again at the same step.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from gemctl.run.attempt import Attempt
from gemctl.run.files import create_json, read_whole


@dataclass(frozen=True)
class RolledBack:
    """Why an attempt gave up its steps since its last checkpoint: at `step` (from 0) something was not finite.

    `what`: gradient (the batch is passed over from now on) or state (weights or tables hold it already, so the batch
    is not to blame). `ranks`: where it showed, if not on all.
    """

    step: int
    what: Literal["gradient", "state"]
    ranks: list[int]

    def text(self) -> str:
        """For people. Of one rank alone it begins with the rank, as a cause does."""
        rank = f"rank {self.ranks[0]}: " if len(self.ranks) == 1 else ""
        on = f" on ranks {', '.join(map(str, self.ranks))}" if len(self.ranks) > 1 else ""
        if self.what == "gradient":
            return (
                f"{rank}step {self.step}: a gradient is not finite{on} although the loss is; nothing was updated. "
                "The next attempt passes over this batch; if that does not help, resume with a lower optim.dense.lr"
            )
        return (
            f"{rank}step {self.step}: the state is not finite{on}, so every batch that meets it gives no finite loss; "
            "an older checkpoint may be whole"
        )


def record(attempt: Attempt, found: RolledBack) -> None:
    """Writes it, once an attempt; by rank 0, before the attempt fails."""
    create_json(attempt.rolled_back, {**asdict(found), "time": time.time()})


def rolled_back(attempt: Attempt) -> RolledBack | None:
    """Why the attempt gave up its steps; None if it did not."""
    line = read_whole(attempt.rolled_back)
    return None if line is None else RolledBack(line["step"], line["what"], line["ranks"])


def passed_over(attempts: Sequence[Attempt], step: int) -> list[int]:
    """Steps from `step` on whose batches a new attempt passes over, after these attempts."""
    found = (rolled_back(attempt) for attempt in attempts)
    return sorted({one.step for one in found if one and one.what == "gradient" and one.step >= step})


def distrusts(attempts: Sequence[Attempt]) -> str | None:
    """The checkpoint that no attempt should start from after the last of these: its state was not finite at its first
    step, or at a later one for the second time.
    """
    found = {attempt.number: rolled_back(attempt) for attempt in attempts}
    last = attempts[-1]
    one = found[last.number]
    if one is None or one.what != "state":
        return None
    if (base := last.started_from()) is None:
        return None
    states = [other for other in attempts if (it := found[other.number]) and it.what == "state"]
    again = [other for other in states if other.started_from() == base]
    return base.checkpoint if one.step == base.step or len(again) > 1 else None
