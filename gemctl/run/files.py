"""JSON files of a run: every object carries `"format": 1`; a newer format is refused by name, older ones are read.

create_json(path, {"step": 3})          # fails where the file exists
read_json(path)                         # {"step": 3}
log = JsonLog(path); log.write({"step": 3}); log.sync()
read_log(path)                          # [{"step": 3}]
"""

import ctypes
import dataclasses
import errno
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gemctl.durable import create, named, open_file, open_log, read, retried, sync_folder
from gemctl.errors import FULL, InputError, Unreadable
from gemctl.run import shapes

Value = TypeVar("Value")

FORMAT = 1
ROOM = 16 << 10  # bytes kept for last lines: an exception's takes up to about 7 KB
MOST_LINE = 16 << 20  # bytes of a line of a log
CHUNK = 1 << 20  # bytes of a log that are read at once
FALLOC_FL_KEEP_SIZE = 1
PLAIN: dict[object, type | tuple[type, ...]] = {int: int, float: (int, float), str: str}  # field → JSON value


class Record(dict[str, Any]):
    """A JSON object from a file: a missing key is an InputError that names the file.

    The constructor is dict's, as dataclasses.asdict requires.
    """

    where = "a copy of a JSON object"

    @classmethod
    def found(cls, where: str, values: dict[str, Any]) -> "Record":
        record = cls(values)
        record.where = where
        return record

    def __missing__(self, key: str) -> Any:
        raise InputError(f"{self.where}: {key} is missing")

    def fields(self, kind: type) -> dict[str, Any]:
        """The object, checked against the dataclass `kind`. InputError if a key is missing, is not one of its fields,
        or has a value that is not the number or text that the field needs."""
        known = {one.name: one for one in dataclasses.fields(kind)}
        needed = (name for name, one in known.items() if one.default is one.default_factory is dataclasses.MISSING)
        problems = [f"{self.where}: {name} is missing" for name in needed if name not in self]
        problems += [f"{self.where}: {key} is unknown to this gemctl" for key in self if key not in known]
        for name in self.keys() & known.keys():
            wanted = PLAIN.get(known[name].type)
            if wanted is not None and not isinstance(self[name], wanted):
                problems.append(f"{self.where}: {name}={self[name]!r} has the wrong type")
        if problems:
            raise InputError(problems)
        return self


class CutFileError(InputError):
    """A file that is empty or truncated, as a power loss leaves it if it had not been synced."""


def create_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` to a file that must not exist yet (FileExistsError), synced when this returns. Readers never see a
    part of it, and of several writers one wins."""
    create(path, json.dumps({"format": FORMAT, **value}, indent=1) + "\n")


def or_unreadable(path: Path, read: Callable[[], Value]) -> Value:
    """The result of `read()`, which reads `path`.

    FileNotFoundError if `path` surely does not exist: its folder can be listed and does not contain it. Unreadable for
    any other OSError except IsADirectoryError (no permission, an I/O error, a disk that is not mounted): the file may
    be intact, so it must not be taken for damaged, or deleted.
    """
    try:
        return read()
    except IsADirectoryError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and _absent(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        raise Unreadable(f"{path}: {_text(path, error)}") from error


def entries(folder: Path) -> list[Path]:
    """The folder's entries; none if it does not exist. Unreadable if it cannot be listed, or is a dangling link."""
    try:
        return or_unreadable(folder, lambda: retried(lambda: list(folder.iterdir())))
    except FileNotFoundError:
        return []


def _absent(path: Path) -> bool:
    """True if the folder of `path` can be listed and does not contain it, or does not exist either."""
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


def numbered(folder: Path) -> list[int]:
    """The entries of the folder whose names are numbers, sorted; none if it does not exist. InputError for a symbolic
    link, whose target is not the run's."""
    found = [path for path in entries(folder) if path.name.isascii() and path.name.isdecimal()]
    if linked := [path for path in found if path.is_symlink()]:
        raise InputError(f"{linked[0]}: a symbolic link, where a folder of the run belongs")
    return sorted(int(path.name) for path in found)


def read_text(path: Path) -> str:
    """The text in `path`. InputError if it does not exist, cannot be read or is not UTF-8."""
    try:
        return read(path).decode()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error})") from error


def read_json(path: Path) -> Record:
    """The object in `path` without its `format`. InputError if the format is newer than this gemctl, or the file is not
    a JSON object; CutFileError if a power loss may be the reason."""
    return parse_line(read(path), str(path), path)


def read_whole(path: Path) -> Record | None:
    """As `read_json`; None if the file does not exist, or is empty or truncated."""
    try:
        return read_json(path)
    except (FileNotFoundError, CutFileError):
        return None


def is_whole(path: Path) -> bool:
    """Whether the text file exists, is not empty, and has no zero bytes, which a power loss leaves in place of text."""
    try:
        data = read(path)
    except FileNotFoundError:
        return False
    return bool(data) and b"\0" not in data


def parse_line(text: bytes, where: str, path: Path) -> Record:
    """The JSON object in `text`, at `where` in the file `path`, without its `format`. InputError as `read_json`, and
    for values of the wrong type (gemctl/run/shapes.py)."""
    if not text.strip(b"\0 \n"):
        raise CutFileError(f"{where}: empty")
    try:
        value = json.loads(text, object_hook=lambda values: Record.found(where, values))
    except ValueError as error:
        raise CutFileError(f"{where}: not JSON ({error})") from error
    except RecursionError as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, Record):
        raise InputError(f"{where}: a JSON object was expected")
    written = value.pop("format", FORMAT)
    if not isinstance(written, int) or isinstance(written, bool):
        raise InputError(f"{where}: format: {str(written)[:40]} is not a number")
    if written > FORMAT:
        raise Unreadable(
            f"{where}: format {str(written)[:20]} is newer than this gemctl reads (up to {FORMAT}); upgrade gemctl"
        )
    if wrong := shapes.problems(where, path, value):
        raise InputError(wrong)
    return value


class JsonLog:
    """Appends JSON objects, one per line, each in a single write, so that lines of several writers do not mix.

    A truncated last line of a dead host, or zeros left by a power loss, are removed: they were never read, and the next
    line would be lost with them.

    Disk space for the last lines, which say how the process ended, is reserved, so that a full disk can be reported.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = 0  # bytes allocated on disk, beyond the file's size
        self._named = False  # its directory entry has been synced
        self._fd = open_log(path)
        _drop_cut_line(self._fd)

    def write(self, record: dict[str, Any], *, last: bool = False) -> None:
        """Appends a line, all of it or nothing (OSError, which names the file). A `last` one may use the reserved
        space, and is synced with everything before it when this returns."""
        line = (json.dumps({"format": FORMAT, **record}) + "\n").encode()
        size = os.fstat(self._fd).st_size
        with named(self._path):
            if not last and size + len(line) + ROOM > self._kept:
                _keep(self._fd, wanted := size + len(line) + 2 * ROOM)
                self._kept = wanted
            if os.write(self._fd, line) < len(line):
                os.ftruncate(self._fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if last:
            self.sync()

    def sync(self) -> None:
        """Syncs what has been written: only for what others are about to rely on, not for every line."""
        with named(self._path):
            os.fsync(self._fd)
        if not self._named:
            sync_folder(self._path.parent)
            self._named = True

    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)


def _drop_cut_line(fd: int) -> None:
    end = size = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - ROOM)
        if (newline := os.pread(fd, end - start, start).rfind(b"\n")) >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)


def _keep(fd: int, size: int) -> None:
    """Allocates the file's first `size` bytes without extending it, if the file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        if number in FULL:
            raise OSError(number, os.strerror(number))


class LogTail:
    """Reads a JSON-lines file that may still grow, or not exist yet: `new()` returns the lines since the last call.

    A last line without its newline is left for the next call. Zeros, which a power loss leaves in place of lines that
    were not synced, are skipped, and so is a line that they cut. InputError names file and line of anything else that
    is not an object. Reading starts at byte `offset`, where a line begins.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._lines = 0 if offset == 0 else None  # read so far; None if not from the start

    def new(self) -> list[Record]:
        return list(self.lines())

    def lines(self, end: int | None = None, with_text: bytes = b"") -> Iterator[Record]:
        """As `new`, as an iterator, so that any file fits in memory: lines up to byte `end` that contain
        `with_text`."""
        size = CHUNK
        while True:
            try:
                data = retried(functools.partial(self._next, size, end))
            except FileNotFoundError:
                return
            whole = data[: data.rfind(b"\n") + 1]
            if not whole and len(data) == MOST_LINE:
                raise InputError(f"{self._place(0)}: a line of more than {MOST_LINE} bytes")
            for at, line in enumerate(whole.split(b"\n")[:-1], start=1):
                if with_text in line and (record := _logged(line, self._place(at), self.path)) is not None:
                    yield record
            self._offset += len(whole)
            if self._lines is not None:
                self._lines += whole.count(b"\n")
            if len(data) < size:
                return
            size = CHUNK if whole else min(2 * size, MOST_LINE)

    def _next(self, size: int, end: int | None) -> bytes:
        with open_file(self.path) as file:
            there = os.fstat(file.fileno()).st_size
            left = (there if end is None else min(end, there)) - file.seek(self._offset)
            return file.read(min(max(0, left), size))

    def _place(self, line: int) -> str:
        if self._lines is not None:
            return f"{self.path}:{self._lines + max(1, line)}"
        return f"{self.path}, line {max(1, line)} after byte {self._offset}"


def _logged(line: bytes, where: str, path: Path) -> Record | None:
    """The object in a line of a log; None if zeros have replaced it, or its beginning."""
    torn = b"\0" in line
    try:
        return parse_line(line.rpartition(b"\0")[2], where, path)
    except CutFileError:
        if not torn:
            raise
        return None


def read_log(path: Path) -> list[Record]:
    """All complete lines of a JSON-lines file; empty if it does not exist."""
    return LogTail(path).new()


def last_line(path: Path) -> Record | None:
    """The last complete line of a JSON-lines file of any size; None if there is none."""
    try:
        lines = retried(lambda: _last_lines(path))
    except FileNotFoundError:
        return None
    found = (_logged(line, f"{path}: last line", path) for line in reversed(lines))
    return next((line for line in found if line is not None), None)


def _last_lines(path: Path) -> list[bytes]:
    """The lines in the last bytes of the file, the first perhaps truncated; of more bytes if those are zeros."""
    with open_file(path) as file:
        size, span = file.seek(0, os.SEEK_END), 2 * ROOM
        while True:
            file.seek(max(0, size - span))
            data = file.read()
            if size <= span or len(data.rstrip(b"\0")) > ROOM or span >= MOST_LINE:
                return data.split(b"\n")[:-1]
            span *= 2


def last_lines_at(path: Path, count: int, counts: Callable[[bytes], bool] = lambda line: True) -> int:
    """The offset of the last `count` lines of those that `counts`; 0 if there are fewer, or no file."""
    try:
        file = open_file(path)
    except FileNotFoundError:
        return 0
    with file:
        at, rest = file.seek(0, os.SEEK_END), b""  # rest: the end of a line that begins before `at`
        while at > 0 and count > 0:
            size = min(at, CHUNK)
            at -= size
            file.seek(at)
            first, *lines = (file.read(size) + rest).split(b"\n")
            start = at + len(first) + 1
            rest = first
            for offset, line in reversed(list(_placed(lines, start))):
                count -= bool(line) and counts(line)
                if count <= 0:
                    return offset
    return 0


def _placed(lines: list[bytes], start: int) -> Iterator[tuple[int, bytes]]:
    for line in lines:
        yield start, line
        start += len(line) + 1
