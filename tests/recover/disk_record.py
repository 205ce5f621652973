"""Records what real code does to the files of a run, in this process and all that it forks.

    with recording(root, tmp_path / "record") as record:
        ...                                              # trains, stops, resumes
        record.promise("requests/1.json")                # what has been said to be there from now on
    events = load(tmp_path / "record")

Names are followed at the calls of `os` that change them, and so is every fsync; contents by looking for files that have
changed before each of these calls, however they are written. `replay` of all events must give the folder as it is:
whatever the calls do not show comes out there.
"""

import fcntl
import hashlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

NAMES = ("link", "rename", "replace", "unlink", "remove", "mkdir", "rmdir")  # calls with one path, or two
BY_FD = ("fsync", "fdatasync", "write", "pwrite", "ftruncate")  # calls with a descriptor
Kind = Literal["create", "data", "link", "rename", "unlink", "mkdir", "rmdir", "fsync", "promise"]
ALIKE: dict[str, Kind] = {"replace": "rename", "remove": "unlink", "fdatasync": "fsync"}


@dataclass(frozen=True)
class Event:
    """One change of the folder. Paths are relative to it. `other`: the second path; `data`: all of a file's bytes."""

    kind: Kind
    path: str
    other: str = ""
    data: bytes = b""


class Record:
    """The events of one recording, in their order, as several processes have written them."""

    def __init__(self, root: Path, folder: Path) -> None:
        folder.mkdir()
        self._root, self._file, self._blobs = root, folder / "events", folder / "blobs"
        self._blobs.mkdir()
        self._fd = _os("open")(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._renew()
        os.register_at_fork(after_in_child=self._renew)
        self._seen: dict[str, tuple[int, int, int]] = {}  # path → inode, size and time that were recorded

    def _renew(self) -> None:
        self._thread = threading.RLock()
        self._locks = os.open(self._file, os.O_RDONLY)  # a lock is one of its open file description

    def promise(self, path: str) -> None:
        """Somebody has been told that the file or checkpoint is there."""
        with self._alone():
            self._add("promise", path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time, over all processes; what has changed before it is recorded first."""
        with self._thread:
            fcntl.flock(self._locks, fcntl.LOCK_EX)
            try:
                self._look(self._root)
                yield
            finally:
                fcntl.flock(self._locks, fcntl.LOCK_UN)

    def _add(self, kind: Kind, path: str, other: str = "", data: bytes | None = None) -> None:
        blob = ""
        if data:
            blob = hashlib.sha256(data).hexdigest()[:24]
            if not (self._blobs / blob).exists():
                (self._blobs / blob).write_bytes(data)
        _os("write")(self._fd, pickle.dumps((kind, path, other, blob)))

    def _look(self, folder: Path) -> None:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                self._look(Path(entry.path))
                continue
            path, found = entry.path[len(str(self._root)) + 1 :], entry.stat()
            state, before = (found.st_ino, found.st_size, found.st_mtime_ns), self._seen.get(path)
            if state == before:
                continue
            self._seen[path] = state
            if before is None or before[0] != found.st_ino:
                self._add("create", path)
            self._add("data", path, data=Path(entry.path).read_bytes())

    def name(self, real: Callable[..., Any], kind: Kind, *args: Any, **options: Any) -> Any:
        """A call with one path or two."""
        paths = [self._within(os.fspath(one), options.get("dir_fd")) for one in args[: 2 if kind in TWO else 1]]
        if None in paths:
            return real(*args, **options)
        with self._alone():
            result = real(*args, **options)
            first, second = [path for path in paths if path is not None] + [""] * (2 - len(paths))
            self._add(kind, first, second)
            if kind in TWO:
                self._seen |= {second: self._seen[first]} if first in self._seen else {}
            if kind in {"rename", "unlink"}:
                self._seen.pop(first, None)
            if kind == "rename":  # of a folder: what is in it goes along
                inside = [path for path in self._seen if path.startswith(f"{first}/")]
                self._seen |= {second + path[len(first) :]: self._seen.pop(path) for path in inside}
        return result

    def descriptor(self, real: Callable[..., Any], kind: str, fd: int, *args: Any) -> Any:
        """A call with a descriptor."""
        try:
            path = self._within(_of_descriptor(fd), None)
        except OSError:
            path = None
        if path is None or path.endswith(" (deleted)"):
            return real(fd, *args)
        with self._alone():
            result = real(fd, *args)
            if kind == "fsync":
                self._add("fsync", path)
            else:
                self._seen[path] = (self._seen[path][0] if path in self._seen else 0, -1, -1)
                self._look(self._root)
        return result

    def _within(self, path: str | bytes, dir_fd: int | None) -> str | None:
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = f"{_of_descriptor(dir_fd)}/{text}"
        text, root = os.path.abspath(text), str(self._root)  # noqa: PTH100 (links are not followed)
        return text[len(root) + 1 :] if text.startswith(f"{root}/") else "." if text == root else None


def _of_descriptor(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def load(folder: Path) -> list[Event]:
    """The events of the recording in `folder`."""
    found = []
    with (folder / "events").open("rb") as file:
        while file.peek(1):
            kind, path, other, blob = pickle.load(file)
            found.append(Event(kind, path, other, (folder / "blobs" / blob).read_bytes() if blob else b""))
    return found


TWO = {"link", "rename"}
_REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in (*NAMES, *BY_FD, "open")}


def _os(name: str) -> Callable[..., Any]:
    return _REAL[name]


@contextmanager
def recording(root: Path, folder: Path) -> Iterator[Record]:
    """Records what is done below `root`, which is there, until the block ends; forks go on recording."""
    record = Record(root, folder)

    def patched(name: str) -> Callable[..., Any]:
        kind: Any = ALIKE.get(name, name)
        call = record.name if name in NAMES else record.descriptor
        return lambda *args, **options: call(_REAL[name], kind, *args, **options)

    for name in (*NAMES, *BY_FD):
        setattr(os, name, patched(name))
    try:
        yield record
        with record._alone():
            pass
    finally:
        for name in (*NAMES, *BY_FD):
            setattr(os, name, _REAL[name])
