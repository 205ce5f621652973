"""Which checkpoint folders are deleted, and when: only by the run's owner, and never before a newer one is complete.

`prune` runs after each publication; `remove_half_written` also when an attempt starts, so that a save that did not end
takes no room from the next one. What cannot be read now, is damaged, or was left alone by an attempt stays: only
`gemctl checkpoint prune` deletes that (docs/reliability.md has the whole table).
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
    """Deletes valid checkpoints but the newest `keep`, whole void ones of earlier attempts, and what is half written.

    Returns the deleted folders. Nothing is deleted before `attempt` has completed a checkpoint of its own, and once a
    higher attempt owns the run.
    """
    found = checkpoints(run)
    valid = [one for one in found if one.state == "valid" and _whole(one)]
    own = [one.step for one in valid if one.attempt == attempt.number]
    if not own:
        return []
    left_alone = {name for one in run.attempts() if (base := one.started_from()) for name in base.left_alone}
    void = [
        one
        for one in found
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
    """Deletes what saves of earlier attempts have left unpublished, if those attempts are surely dead, and the rest of
    deletions that were cut short; returns the former."""
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
    """True if no process of the attempt can write any more: it has said how it ended, which is written when all are
    dead, or all that it has named ran on this host and do no more. A beat that is missing proves nothing."""
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
    named = [claim.pid, *(line["pid"] for line in lines if line["event"] in {"agent", "rank"})]
    return not any(process.running(pid) for pid in named)


def _whole(checkpoint: Checkpoint) -> bool:
    return not verify(checkpoint.path, check_size)


def _unpublish(folder: Path, attempt: Attempt) -> Path | None:
    """Renames a checkpoint that is to be erased, so that a half-deleted one is not taken for a damaged one; its new
    path, or None if it is not this attempt's to delete."""
    if folder.is_symlink() or not attempt.owns_run():  # what a link leads to is not this run's
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
