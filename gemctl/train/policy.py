"""Which steps are not taken: a loss that is not finite, a spike where `train.spike` says what one is, a gradient that
is not finite.

A loss is judged between forward and backward, where a step can still be dropped whole. A gradient is judged before it
updates anything, but the step has been computed, so the run goes back: the attempt ends by RollBack, the next one
starts from the last checkpoint and passes over the step's batch, which would come again.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median

from gemctl.errors import GemctlError
from gemctl.run.base import RolledBack

WINDOW = 100  # losses whose median a spike is measured by
LEAST = 20  # of them that must be there
MAX_SKIPPED = 10  # steps in a row


class RollBack(GemctlError):
    """The run has to go on from its last checkpoint; `found` says why and what it passes over."""

    def __init__(self, found: RolledBack) -> None:
        self.found = found
        super().__init__(found.text())


class NanStop(GemctlError):
    """Something is not finite and `train.nan=stop`: the run is not to be tried again."""


class TooManySkipped(GemctlError):
    """Steps are skipped one after the other."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"step {step}: the loss was not finite, or a spike, in {MAX_SKIPPED} steps in a row: skipping does not "
            "help. Resume from an older checkpoint with a lower optim.dense.lr, or look at the rows of these batches"
        )


class NothingLearned(GemctlError):
    """No step was taken, or no row counted in any: another attempt would see the same rows."""


def nothing_counted(tasks: Iterable[str], seen: str) -> NothingLearned:
    """No row of those `seen` (in words) counts for any task."""
    return NothingLearned(
        f"no row of {seen} counts for any task ({', '.join(tasks)}): the labels are null or masked, or the weights are "
        "0; nothing was learned. Look at these columns of data.train, and at labels and weight in data.spec"
    )


class Spikes:
    """Tells a spike: a global loss above `factor` times the median of the last WINDOW ones that were taken.

    Every rank adds the same losses, so all ranks judge alike. With `factor` None nothing is a spike and nothing kept.
    """

    def __init__(self, factor: float | None) -> None:
        self.factor = factor
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def is_spike(self, loss: float) -> bool:
        return self.factor is not None and len(self._losses) >= LEAST and loss > self.factor * median(self._losses)

    def add(self, loss: float) -> None:
        """A loss that was taken."""
        if self.factor is not None:
            self._losses.append(loss)

    def position(self) -> dict[str, list[float]]:
        """What a checkpoint keeps, so that a resumed run judges as an undisturbed one."""
        return {} if self.factor is None else {"losses": list(self._losses)}

    def restore(self, losses: Iterable[float]) -> None:
        self._losses.clear()
        for loss in losses:
            self.add(loss)
