"""Which checkpoint folders are deleted, and when: only by the run's owner, and never before a newer one is complete.

`prune` runs after each publication; `remove_strays` also when an attempt starts, so that a save that did not end
takes no room from the next one.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from gemctl.durable import sync_folder
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.inject import Point
from gemctl.run.manifest import FILE_NAME, checkpoints, valid_checkpoints


def _nowhere(point: Point) -> None:
    pass


def prune(run: RunDir, attempt: Attempt, keep: int, reach: Callable[[Point], None] = _nowhere) -> list[Path]:
    """Deletes all valid checkpoints but the newest `keep`, and what earlier attempts have left that does not count.

    Returns the deleted folders. Nothing is deleted once a higher attempt owns the run. `reach` is told where it is.
    """
    old = valid_checkpoints(run)[keep:]
    removed = [checkpoint.path for checkpoint in old if _remove(checkpoint.path, attempt, reach)]
    return removed + remove_strays(run, attempt)


def remove_strays(run: RunDir, attempt: Attempt) -> list[Path]:
    """Deletes what earlier attempts have left that does not count, unpublished or void; returns it."""
    strays = [
        checkpoint.path for checkpoint in checkpoints(run) if checkpoint.flaw and checkpoint.attempt < attempt.number
    ]
    return [path for path in strays if _remove(path, attempt)]


def _remove(folder: Path, attempt: Attempt, reach: Callable[[Point], None] = _nowhere) -> bool:
    """The manifest goes first, so that a half-deleted folder is no checkpoint."""
    if folder.is_symlink() or not attempt.owns_run():  # what a link leads to is not this run's
        return False
    (folder / FILE_NAME).unlink(missing_ok=True)
    sync_folder(folder)
    reach("prune")
    shutil.rmtree(folder, ignore_errors=True)
    return True
