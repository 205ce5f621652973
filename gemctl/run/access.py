"""Who may read and write a run: `run.access` gives its folder a mode, and all that is written to it later follows.

    create_folder(path, "group")        # 2770: the group's, and new files stay the group's
    with written_as(path):              # around everything that writes to the run in `path`
        ...

The umask of whoever writes does not count, so a colleague of the group goes on with a run by `gemctl resume`, and what
is private stays private. The mode is set once, on a new folder; no file of another user is ever touched by chmod.
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
    """Makes the folder, if this user has not, closed to others from the first moment on. FileExistsError if somebody
    else has."""
    with _umask(0o777 & ~MODES[access]):
        try:
            path.mkdir()
        except FileExistsError:  # this call has made it, too, where a file server was asked twice
            if path.lstat().st_uid != os.geteuid():
                raise
    if MODES[access] & stat.S_ISGID and path.stat().st_uid == os.geteuid():
        path.chmod(MODES[access])  # mkdir does not take the set-group-ID bit


def check_writable(run: Path) -> None:
    """InputError if this user cannot go on with the run in `run`."""
    for path in (run, run / "supervisor.jsonl", run / "submissions", run / "attempts", run / "checkpoints"):
        if path.exists() and not os.access(path, os.W_OK):
            raise InputError(
                f"{path}: cannot be written by you; its owner can open the run for its group, by run.access=group or "
                "chmod (docs/security.md)"
            )


@contextmanager
def written_as(run: Path) -> Iterator[None]:
    """Within it, files and folders that this process makes are as open as the folder of the run in `run`.

    It holds for all threads and for the processes that are started within it. Nothing is made writable by everyone.
    """
    with _umask(0o777 & ~run.stat().st_mode | OTHERS_WRITE):
        yield


@contextmanager
def written_by_umask() -> Iterator[None]:
    """Within it, the umask counts, but nothing is made writable by everyone."""
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
