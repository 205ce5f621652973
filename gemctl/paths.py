"""Paths that a user typed or will type: whether they exist (an impossible path does not), and writing to them.

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
    """Whether `path` exists; False if the system refuses to look."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def is_file(path: str | Path) -> bool:
    """Whether `path` is a file; False if the system refuses to look."""
    return exists(path) and Path(path).is_file()


def is_dir(path: str | Path) -> bool:
    """Whether `path` is a folder; False if the system refuses to look."""
    return exists(path) and Path(path).is_dir()


def word(path: str | Path) -> str:
    """The path as one word that can be pasted into a shell command line; never an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """For writing an output that the user named: turns an OSError into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what}: cannot be written: {error.strerror or error}") from error


def refuse_there(option: str, path: str | Path, replaceable: bytes | None = None) -> None:
    """InputError if `path` is a non-empty file, unless it begins with `replaceable`."""
    with writing(f"{option} {path}"):
        begin = b""
        if Path(path).is_file():
            with Path(path).open("rb") as file:
                begin = file.read(64)
    if begin and (replaceable is None or not begin.startswith(replaceable)):
        raise InputError(f"{path}: exists already; give another name with {option}, or delete it")
