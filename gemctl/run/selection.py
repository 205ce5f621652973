"""Which checkpoint an attempt starts from, and when none may be taken without a word of the user's.

    choice = newest_verified(run)       # Choice(checkpoint, passed_over, left_alone)

The newest valid checkpoint whose files are whole is taken. A damaged one is passed over for the one before; one that
cannot be read now is not, and a run that has checkpoints of which none can be used does not begin anew: both are an
InputError that says what each checkpoint's problem is, and what can be done.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from gemctl.errors import InputError, Unreadable
from gemctl.run.conclusion import reference
from gemctl.run.directory import RunDir
from gemctl.run.manifest import Check, Checkpoint, check_file, checkpoints, file_faults, read


@dataclass(frozen=True)
class Choice:
    """`passed_over`: why newer ones were not taken, one line each. `left_alone`: names of those that were published,
    and count no more from now on though they may be restored: nothing deletes them by itself."""

    checkpoint: Checkpoint | None = None
    passed_over: list[str] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)


def newest_verified(
    run: RunDir, check: Check = check_file, declined: Callable[[Checkpoint], str | None] = lambda found: None
) -> Choice:
    """The newest valid checkpoint in whose files `check` finds no fault; none if the run has never published one.

    `declined`: why one is not to be taken though it may be whole. InputError if a newer one cannot be read now, or if
    none of those that the run has published can be used.
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
    """No checkpoint: all that is there is left alone."""
    found = [one for one in checkpoints(run) if one.current and one.state != "missing"]
    reasons = [f"{one.path}: {one.flaw or 'left alone, as step 0 was asked for'}" for one in found]
    return Choice(None, reasons, [one.path.name for one in found])


def _faults(checkpoint: Checkpoint, check: Check) -> tuple[list[str], bool]:
    """What is wrong with it, and whether it cannot be read now."""
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
            f"to go on from step {following.step} without it, move {newest.path.name} out of {newest.path.parent}"
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
