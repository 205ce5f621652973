"""The secret of an attempt: what its agents and ranks know and nobody else does.

    create(attempt.secret)      # by whoever makes the attempt; one that is there stays
    read(attempt.secret)        # on every host

Agents of several hosts know each other by it (gemctl/ranks/store.py). Only the user may read it, also in a run that a
group shares: a colleague who resumes makes an attempt with a secret of its own.
"""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from gemctl.errors import GemctlError

BYTES = 32
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def create(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, secrets.token_bytes(BYTES).hex().encode())
        finally:
            os.close(fd)


def read(path: Path) -> bytes:
    """32 bytes. GemctlError if it cannot be read, or others can."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mode, text = os.fstat(fd).st_mode, os.read(fd, 2 * BYTES + 1)
        finally:
            os.close(fd)
        secret = bytes.fromhex(text.decode("ascii"))
    except (OSError, ValueError) as error:
        raise GemctlError(f"{path}: the attempt's secret cannot be read: {error}") from None
    if len(secret) != BYTES:
        raise GemctlError(f"{path}: the attempt's secret is cut")
    if mode & OTHERS:
        raise GemctlError(
            f"{path}: mode {stat.S_IMODE(mode):04o} lets others read the attempt's secret, with which they could join "
            "the run: run.root must lie on a file system that keeps the modes of files"
        )
    return secret
