"""Which checkpoint folders are deleted, and when: only by the run's owner, and only once a newer one is complete.

`prune` runs after each publication. `remove_half_written` also runs when an attempt starts, so that an unfinished save
takes no space from the next one. Checkpoints that can't be read now, are damaged, or were passed over by an attempt
stay: only `gemctl checkpoint prune` deletes those (docs/reliability.md has the whole table).
"""

import shutil
import socket
from pathlib import Path

from gemctl import process
from gemctl.durable import sync_folder
from gemctl.errors import InputError
from gemctl.failpoints import failpoint
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import entries, read_log
from gemctl.run.manifest import DELETED, FOLDER, Checkpoint, check_size, checkpoints, verify


def prune(run: RunDir, attempt: Attempt, keep: int) -> list[Path]:
    """Deletes valid checkpoints except the newest `keep`, whole void ones of earlier attempts, and half-written ones.

    Returns the deleted folders. Nothing is deleted before `attempt` has completed a checkpoint of its own, or after a
    later attempt has taken over the run.
    """
    every = checkpoints(run)
    valid = [one for one in every if one.state == "valid" and _whole(one)]
    own = [one.step for one in valid if one.attempt == attempt.number]
    if not own:
        return []
    left_alone = {name for one in run.attempts() if (base := one.started_from()) for name in base.left_alone}
    void = [
        one
        for one in every
        if one.state == "void" and one.attempt < attempt.number and one.path.name not in left_alone and _whole(one)
    ]
    removed = []
    for one in [*valid[keep:], *void]:
        if doomed := _unpublish(one.path, attempt):
            failpoint("save.prune", max(own))
            _erase(doomed)
            removed.append(one.path)
    return removed + remove_half_written(run, attempt)


def remove_half_written(run: RunDir, attempt: Attempt) -> list[Path]:
    """Deletes unpublished checkpoints of earlier attempts that are certainly dead, and finishes interrupted deletions;
    returns the folders of the former."""
    if attempt.owns_run():
        for path in entries(run.checkpoints):
            if FOLDER.fullmatch(path.name.removesuffix(DELETED)) and path.name.endswith(DELETED):
                _erase(path)
    halves = [one for one in checkpoints(run) if one.state == "unfinished" and one.attempt < attempt.number]
    removed = []
    for one in halves:
        if surely_dead(run.attempt(one.attempt)) and (doomed := _unpublish(one.path, attempt)):
            _erase(doomed)
            removed.append(one.path)
    return removed


def surely_dead(attempt: Attempt) -> bool:
    """True if no process of the attempt can write any more: either its end was recorded, which happens once all its
    processes are dead, or all processes that it recorded ran on this host and are gone. A missing heartbeat proves
    nothing."""
    try:
        if attempt.end() is not None:
            return True
        if not attempt.claimed:
            return False
        claim, lines = attempt.claim(), read_log(attempt.agent_log(0))
    except (InputError, OSError):
        return False
    if claim.nodes > 1 or claim.host != socket.gethostname():
        return False
    recorded = [claim.pid, *(line["pid"] for line in lines if line["event"] in {"agent", "rank"})]
    return not any(process.running(pid) for pid in recorded)


def _whole(checkpoint: Checkpoint) -> bool:
    return not verify(checkpoint.path, check_size)


def _unpublish(folder: Path, attempt: Attempt) -> Path | None:
    """Renames a checkpoint before it is erased, so that a half-deleted one is not taken for a damaged one. Returns the
    new path, or None if this attempt must not delete it."""
    if folder.is_symlink() or not attempt.owns_run():  # the target of a link is not this run's
        return None
    doomed = folder.with_name(folder.name + DELETED)
    folder.rename(doomed)
    sync_folder(folder.parent)
    return doomed


def _erase(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)  # the next deletion tries again
