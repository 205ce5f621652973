"""Which Parquet files a data path means, for everything that reads rows or footers: `data.train`, `eval --data`, …

    find_files("logs/clicks")                        # a folder, including all folders below it
    find_files("logs/dt=2026-03-*/*.parquet")        # a glob; ** matches any number of folders
    find_files(["base.parquet", "s3://logs/new"])    # several of these, in this order

A path that exists is taken literally; any other path is a glob. In folders and globs, names that begin with `.` or `_`
are skipped, as in Spark, and only files with one of SUFFIXES count. The `key=value` folders of a Hive layout are
ordinary folders: their keys are not columns. Files are ordered by path, folder by folder, so `dt=2026-03-09` precedes
`dt=2026-03-10`.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from gemctl.errors import InputError

SUFFIXES = (".parquet", ".pq", ".parq")  # in upper or lower case
DataPath = str | Sequence[str]


@dataclass(frozen=True)
class DataFile:
    """One file on an fsspec file system."""

    filesystem: Any
    path: str

    def partition_keys(self) -> list[str]:
        """For `…/dt=2026-03-01/country=de/part-0.parquet`: `dt` and `country`."""
        return [name.partition("=")[0] for name in self.path.split("/")[:-1] if "=" in name]

    @property
    def local(self) -> bool:
        """Whether the operating system opens `path` itself."""
        return isinstance(self.filesystem, LocalFileSystem)


@dataclass(frozen=True)
class DataFiles:
    """The files in row order, and `ignored`: other files in the same folders."""

    files: list[DataFile]
    ignored: list[str]

    def notes(self, what: str) -> list[str]:
        """A line that names the ignored files, if any; `what` names the data path."""
        if not self.ignored:
            return []
        count = f"{len(self.ignored)} files are" if len(self.ignored) > 1 else "1 file is"
        return [f"{what}: {count} not read, as their names do not end in {', '.join(SUFFIXES)}: {_some(self.ignored)}"]


def find_files(url: DataPath) -> DataFiles:
    """The Parquet files that `url` means. InputError, with all problems, if there is none."""
    found, ignored, problems = [], [], []
    for one in urls(url):
        try:
            files, others = _find(one)
        except InputError as error:
            problems += error.problems
        else:
            found += files
            ignored += others
    problems += _repeated(found)
    if problems:
        raise InputError(problems)
    return DataFiles(found, ignored)


def _repeated(files: list[DataFile]) -> list[str]:
    """A line for every file that is listed more than once, also through links or different spellings of its path."""
    names: dict[str, list[str]] = {}
    for real, file in _real(files):
        names.setdefault(real, []).append(file.path)
    return [
        f"{first}: is listed {1 + len(more)} times{_by_other_names(first, more)}: "
        f"its rows would be read {1 + len(more)} times"
        for first, *more in names.values()
        if more
    ]


def in_both(first: DataFiles, second: DataFiles) -> str:
    """Files of `second` that are also in `first`, in a few words; empty if there are none."""
    known = {real for real, _ in _real(first.files)}
    return _some([file.path for real, file in _real(second.files) if real in known])


def _real(files: list[DataFile]) -> Iterator[tuple[str, DataFile]]:
    """Each file with its path after resolving links."""
    folder = cache(os.path.realpath)  # once per folder, not once per file
    for file in files:
        parent, name = os.path.split(file.path)
        linked = file.local and os.path.islink(file.path)  # noqa: PTH114 (a Path per file costs more than the check)
        yield os.path.realpath(file.path) if linked else f"{folder(parent)}/{name}" if file.local else file.path, file


def _by_other_names(first: str, more: list[str]) -> str:
    others = [name for name in dict.fromkeys(more) if name != first]
    return f" (also as {_some(others)})" if others else ""


def urls(url: DataPath) -> list[str]:
    """The single paths and URLs of a data path."""
    return [url] if isinstance(url, str) else list(url)


def shown(url: DataPath) -> str:
    """A data path as one line of text."""
    return ", ".join(urls(url))


def expanded(path: str) -> str:
    """A local path with `~` expanded, if it refers to a home."""
    return os.path.expanduser(path)  # noqa: PTH111 (pathlib raises there)


def _find(url: str) -> tuple[list[DataFile], list[str]]:
    try:
        local = "://" not in url
        filesystem, path = (LocalFileSystem(), expanded(url)) if local else fsspec.core.url_to_fs(url)
        if filesystem.isfile(path):
            return [DataFile(filesystem, path)], []
        is_folder = filesystem.isdir(path)
        if not is_folder and not glob.has_magic(path):
            raise InputError(f"{url}: no such file or folder")
        found = set(_below(filesystem, path) if is_folder else _matches(filesystem, path))
    except InputError:
        raise
    except Exception as error:  # every fsspec file system has exceptions of its own
        raise InputError(f"{url}: can't be read: {error or type(error).__name__}") from error
    names = sorted(found, key=lambda name: name.split("/"))
    files = [DataFile(filesystem, name) for name in names if name.lower().endswith(SUFFIXES)]
    others = [name for name in names if not name.lower().endswith(SUFFIXES)]
    if not files:
        where = "in this folder or below it" if is_folder else "matches this glob"
        reason = f"; not read: {_some(others)}" if others else ""
        raise InputError(f"{url}: no Parquet file ({', '.join(SUFFIXES)}) {where}{reason}")
    return files, others


def _below(filesystem: Any, folder: str) -> Iterator[str]:
    """Every file in the folder and below it, except hidden ones."""
    if isinstance(filesystem, LocalFileSystem):
        for parent, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
            folders[:] = [name for name in folders if not _hidden(name) and not _loops(Path(parent, name))]
            yield from (f"{parent.rstrip('/')}/{name}" for name in names if not _hidden(name))
        return
    root = folder.rstrip("/").count("/") + 1
    for name in filesystem.find(folder):
        if not any(map(_hidden, name.split("/")[root:])):
            yield name


def _matches(filesystem: Any, pattern: str) -> Iterator[str]:
    """Every file that the glob matches, and all files below folders that it matches; hidden ones only if the glob
    itself names them."""
    local = isinstance(filesystem, LocalFileSystem)
    parts = pattern.split("/")
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    asked_for = any(map(_hidden, parts[fixed:]))
    if local:
        matches = {name.rstrip("/"): Path(name).is_dir() for name in glob.glob(pattern, recursive=True)}  # noqa: PTH207
    else:
        matches = {name: info["type"] == "directory" for name, info in filesystem.glob(pattern, detail=True).items()}
    for name, is_folder in matches.items():
        hidden = not asked_for and any(map(_hidden, name.split("/")[fixed:]))
        if hidden or (local and _loops(Path(name))):
            continue
        if is_folder:
            yield from _below(filesystem, name)
        else:
            yield name


def _hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _loops(path: Path) -> bool:
    """Whether a symbolic link in the path leads back to one of its parents."""
    if not path.is_symlink() and not any(parent.is_symlink() for parent in path.parents):
        return False
    real = [os.path.realpath(parent) for parent in [path, *path.parents]]
    return len(set(real)) < len(real)


def _raise(error: OSError) -> None:
    raise error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
