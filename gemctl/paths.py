"""Paths that a user typed or will type: whether something is there (a path that cannot be is not), and writing to them.

from gemctl import paths
paths.is_file("x" * 300)      # False, where pathlib raises
with paths.writing("-o out.yaml"): ...
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemctl.errors import InputError


def exists(path: str | Path) -> bool:
    """Whether anything is at `path`; False where the system refuses to look."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def is_file(path: str | Path) -> bool:
    """Whether a file is at `path`; False where the system refuses to look."""
    return exists(path) and Path(path).is_file()


def is_dir(path: str | Path) -> bool:
    """Whether a folder is at `path`; False where the system refuses to look."""
    return exists(path) and Path(path).is_dir()


def word(path: str | Path) -> str:
    """The path as one word of a command line that can be pasted into a shell; never an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Around the writing of an output that the user named: what the system refuses becomes an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what}: cannot be written: {error.strerror or error}") from error


def refuse_there(option: str, path: str | Path, replaceable: bytes | None = None) -> None:
    """InputError where a file with something in it is at `path`, unless it begins with `replaceable`."""
    with writing(f"{option} {path}"):
        begin = b""
        if Path(path).is_file():
            with Path(path).open("rb") as file:
                begin = file.read(64)
    if begin and (replaceable is None or not begin.startswith(replaceable)):
        raise InputError(f"{path}: exists already; give another name with {option}, or delete it")
