"""Who may read and write a run: `run.access` sets the mode of its folder, and everything written to it later follows.

    create_folder(path, "group")        # 2770: the group's, and new files stay the group's
    with written_as(path):              # around everything that writes to the run in `path`
        ...

The umask of the writing process is ignored, so a colleague in the group can `gemctl resume` a run, and private runs
stay private. The mode is set once, on a new folder; files of other users are never changed by chmod.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from gemctl.errors import InputError

Access = Literal["private", "group"]
MODES: dict[Access, int] = {"private": 0o700, "group": 0o2770}
OTHERS_WRITE = 0o002


def create_folder(path: Path, access: Access) -> None:
    """Creates the folder, unless this user has already, closed to others from the first moment on. FileExistsError if
    another user has created it."""
    with _umask(0o777 & ~MODES[access]):
        try:
            path.mkdir()
        except FileExistsError:  # possibly by this call, if a file server retried it
            if path.lstat().st_uid != os.geteuid():
                raise
    if MODES[access] & stat.S_ISGID and path.stat().st_uid == os.geteuid():
        path.chmod(MODES[access])  # mkdir ignores the set-group-ID bit


def check_writable(run: Path) -> None:
    """InputError if this user cannot resume the run in `run`."""
    for path in (run, run / "supervisor.jsonl", run / "submissions", run / "attempts", run / "checkpoints"):
        if path.exists() and not os.access(path, os.W_OK):
            raise InputError(
                f"{path}: you cannot write to it; the owner can open the run to its group by run.access=group or "
                "chmod (docs/security.md)"
            )


@contextmanager
def written_as(run: Path) -> Iterator[None]:
    """Inside the block, files and folders that this process creates are as open as the folder of the run in `run`.

    This applies to all threads and to processes started inside the block. Nothing becomes writable by everyone.
    """
    with _umask(0o777 & ~run.stat().st_mode | OTHERS_WRITE):
        yield


@contextmanager
def written_by_umask() -> Iterator[None]:
    """Inside the block the umask applies, but nothing becomes writable by everyone."""
    before = os.umask(0o777)
    try:
        os.umask(before | OTHERS_WRITE)
        yield
    finally:
        os.umask(before)


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
