"""What an attempt starts from (its base.json): which checkpoint, and which batches it passes over.

    choice = newest_verified(run)               # Choice(checkpoint, passed_over, left_alone)
    passed_over(run.attempts(), step)           # [31]: steps whose batches an earlier attempt rolled back from

The newest valid checkpoint whose files are intact is used. A damaged one is passed over for the one before. One that
cannot be read now is not passed over, and a run none of whose checkpoints can be used does not start from step 0 unless
told to: both raise an InputError that names the problem of each checkpoint and what can be done.

    attempts/<n>/rolled_back.json   {"step": 31, "what": "gradient", "ranks": [1]}

An attempt that met something that is not finite rolls back to its last checkpoint. Order and values of the batches are
functions of the seed, so it would happen again at the same step: the next attempts pass over that batch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from gemctl.errors import InputError, Unreadable
from gemctl.run.attempt import Attempt
from gemctl.run.conclusion import reference
from gemctl.run.directory import RunDir
from gemctl.run.files import create_json, read_whole
from gemctl.run.manifest import Check, Checkpoint, check_file, checkpoints, file_faults, read


@dataclass(frozen=True)
class Choice:
    """`passed_over`: why newer ones were not used, one line each. `left_alone`: names of published ones that no longer
    count, though they might be restored: gemctl never deletes them on its own."""

    checkpoint: Checkpoint | None = None
    passed_over: list[str] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)


def newest_verified(
    run: RunDir, check: Check = check_file, declined: Callable[[Checkpoint], str | None] = lambda found: None
) -> Choice:
    """The newest valid checkpoint in whose files `check` finds no fault; none if the run has never published one.

    `declined`: why a checkpoint is not to be used though it may be intact. InputError if a newer one cannot be read
    now, or if none of those that the run has published can be used.
    """
    choice, refused, unreadable = Choice(), False, False
    found = checkpoints(run)
    for at, checkpoint in enumerate(found):
        if not checkpoint.current:
            choice.passed_over.append(checkpoint.reason)
            continue
        if why := declined(checkpoint):
            choice.passed_over.append(f"{checkpoint.path}: {why}")
            refused = True
            continue
        faults, unreadable = _faults(checkpoint, check)
        if not faults:
            return Choice(checkpoint, choice.passed_over, choice.left_alone)
        choice.passed_over.extend(faults)
        if unreadable:
            raise InputError(_cannot_be_read(run, checkpoint, choice.passed_over, found[at + 1 :]))
        choice.left_alone.append(checkpoint.path.name)
    if refused or choice.left_alone:
        raise InputError(_none_left(run, choice.passed_over))
    return choice


def from_scratch(run: RunDir) -> Choice:
    """No checkpoint: all that exist are left alone."""
    found = [one for one in checkpoints(run) if one.current and one.state != "missing"]
    reasons = [f"{one.path}: {one.flaw or 'left alone, as step 0 was asked for'}" for one in found]
    return Choice(None, reasons, [one.path.name for one in found])


def _faults(checkpoint: Checkpoint, check: Check) -> tuple[list[str], bool]:
    """What is wrong with the checkpoint, and whether it is unreadable."""
    if checkpoint.state != "valid":
        return [checkpoint.reason], checkpoint.state == "unreadable"
    try:
        return file_faults(checkpoint.path, read(checkpoint.path), check), False
    except InputError as error:
        return error.problems, isinstance(error, Unreadable)


def _cannot_be_read(run: RunDir, newest: Checkpoint, reasons: list[str], older: list[Checkpoint]) -> str:
    following = next((one for one in older if one.state == "valid"), None)
    advice = ["make it readable (the disk, its permissions, the gemctl that wrote it) and resume again"]
    if following is not None:
        advice.append(
            f"to resume from step {following.step} without it, move {newest.path.name} out of {newest.path.parent}"
        )
    head = f"run {run.run_id}: {newest.path.name} cannot be read now, so it is not known to be lost"
    return _message(head, reasons, [*advice, _anew(run)])


def _none_left(run: RunDir, reasons: list[str]) -> str:
    head = f"run {run.run_id} has published checkpoints, and none of them can be used"
    return _message(head, reasons, ["restore what is missing or damaged and resume again", _anew(run)])


def _anew(run: RunDir) -> str:
    return f"to start again from step 0, leaving them where they are: gemctl resume {reference(run)} --from-scratch"


def _message(head: str, reasons: list[str], advice: list[str]) -> str:
    return "\n".join([f"{head}:", *(f"  {reason}" for reason in reasons), *advice])


@dataclass(frozen=True)
class RolledBack:
    """Why an attempt dropped its steps since its last checkpoint: at `step` (from 0) something was not finite.

    `what`: gradient (the batch is passed over from now on) or state (weights or tables were already not finite, so the
    batch is not to blame). `ranks`: the ranks where it was seen, if not all.
    """

    step: int
    what: Literal["gradient", "state"]
    ranks: list[int]

    def text(self) -> str:
        """The message; if one rank alone saw it, it begins with the rank."""
        rank = f"rank {self.ranks[0]}: " if len(self.ranks) == 1 else ""
        on = f" on ranks {', '.join(map(str, self.ranks))}" if len(self.ranks) > 1 else ""
        if self.what == "gradient":
            return (
                f"{rank}step {self.step}: a gradient is not finite{on} although the loss is; nothing was updated. "
                "The next attempt passes over this batch; if that does not help, resume with a lower optim.dense.lr"
            )
        return (
            f"{rank}step {self.step}: the state is not finite{on}, so every batch that meets it gives no finite loss; "
            "an older checkpoint may still be finite"
        )


def record_rollback(attempt: Attempt, found: RolledBack) -> None:
    """Writes rolled_back.json; once per attempt, by rank 0, before the attempt fails."""
    create_json(attempt.rolled_back, {**asdict(found), "time": time.time()})


def rolled_back(attempt: Attempt) -> RolledBack | None:
    """Why the attempt dropped its steps; None if it did not."""
    line = read_whole(attempt.rolled_back)
    return None if line is None else RolledBack(line["step"], line["what"], line["ranks"])


def passed_over(attempts: Sequence[Attempt], step: int) -> list[int]:
    """Steps from `step` on whose batches an attempt after these passes over."""
    found = (rolled_back(attempt) for attempt in attempts)
    return sorted({one.step for one in found if one and one.what == "gradient" and one.step >= step})


def distrusts(attempts: Sequence[Attempt]) -> str | None:
    """The checkpoint that no attempt after these should start from: the state was not finite at the last attempt's
    first step, or at a later one for the second time from that checkpoint.
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
