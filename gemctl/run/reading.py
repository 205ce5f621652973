"""Reading what a run has saved, exact about what is gone or damaged and what only cannot be read now.

    data = or_unreadable(path, lambda: read(path))

A file that is gone for sure is a FileNotFoundError. Whatever cannot be read *now* (no permission, an I/O error, a disk
that is not mounted) is Unreadable: it may be whole, so nobody may take it for damaged, or delete it.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gemctl.durable import steadily
from gemctl.errors import Unreadable

Value = TypeVar("Value")


def or_unreadable(path: Path, read: Callable[[], Value]) -> Value:
    """What `read()`, which reads `path`, and again where the refusal may pass, returns.

    FileNotFoundError if there is no `path`: its folder can be listed and does not name it. IsADirectoryError as it
    comes. Unreadable for every other OSError.
    """
    try:
        return read()
    except IsADirectoryError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and _absent(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        raise Unreadable(f"{path}: {_text(path, error)}") from error


def listed(folder: Path) -> list[Path]:
    """What the folder holds; nothing if there is none. Unreadable if it cannot be listed, or is a link to nowhere."""
    try:
        return or_unreadable(folder, lambda: steadily(lambda: list(folder.iterdir())))
    except FileNotFoundError:
        return []


def _absent(path: Path) -> bool:
    """True if the folder of `path` can be listed and does not name it, or is absent itself."""
    try:
        return path.name not in os.listdir(path.parent)  # noqa: PTH208 (names are wanted)
    except (FileNotFoundError, NotADirectoryError):
        return _absent(path.parent) if path.parent != path else True
    except OSError:
        return False


def _text(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"a link to {os.readlink(path)}, which is not there (is its disk mounted?)"  # noqa: PTH115
    return error.strerror or str(error)
