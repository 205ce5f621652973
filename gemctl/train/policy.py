"""Which steps are not applied: those with a non-finite loss, a spike (where `train.spike` is set) or a non-finite
gradient.

A loss is judged between forward and backward, where the whole step can still be skipped. A gradient is judged before it
updates anything, but skipping would give the same batch again later, so the run goes back: the attempt ends with
RollBack, and the next one starts from the last checkpoint and passes over this step's batch.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median

from gemctl.errors import GemctlError
from gemctl.run.base import RolledBack

WINDOW = 100  # latest losses, with whose median a loss is compared
LEAST = 20  # losses that the median needs
MAX_SKIPPED = 10  # steps in a row


class RollBack(GemctlError):
    """The run has to restart from its last checkpoint; `cause` says why and which step to pass over."""

    def __init__(self, cause: RolledBack) -> None:
        self.cause = cause
        super().__init__(cause.text())


class NanStop(GemctlError):
    """Something is not finite and `train.nan=stop`: the run must not be retried."""


class TooManySkipped(GemctlError):
    """Too many steps in a row were skipped."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"step {step}: the loss was not finite, or a spike, in {MAX_SKIPPED} steps in a row: skipping does not "
            "help. Resume from an older checkpoint with a lower optim.dense.lr, or check the rows of these batches"
        )


class NothingLearned(GemctlError):
    """No step was applied, or no row counted in any: another attempt would see the same rows."""


def nothing_counted(tasks: Iterable[str], seen: str) -> NothingLearned:
    """The error for when no row of `seen` (in words) counts for any task."""
    return NothingLearned(
        f"no row of {seen} counts for any task ({', '.join(tasks)}): the labels are null or masked, or the weights are "
        "0; nothing was learned. Check these columns of data.train, and labels and weight in data.spec"
    )


class Spikes:
    """Detects spikes: a global loss above `factor` times the median of the last WINDOW losses of applied steps.

    Every rank adds the same losses, so all ranks agree. With `factor` None nothing is a spike and nothing is kept.
    """

    def __init__(self, factor: float | None) -> None:
        self.factor = factor
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def is_spike(self, loss: float) -> bool:
        return self.factor is not None and len(self._losses) >= LEAST and loss > self.factor * median(self._losses)

    def add(self, loss: float) -> None:
        """Adds the loss of an applied step."""
        if self.factor is not None:
            self._losses.append(loss)

    def position(self) -> dict[str, list[float]]:
        """For the checkpoint, so that a resumed run judges like an uninterrupted one."""
        return {} if self.factor is None else {"losses": list(self._losses)}

    def restore(self, losses: Iterable[float]) -> None:
        self._losses.clear()
        for loss in losses:
            self.add(loss)
