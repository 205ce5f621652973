"""Files and folders that are still there after a power loss, and reads that a file server may fail once.

create(path, text)            # whole, exclusive, on disk; FileExistsError where there is one already
make_folder(path)             # on disk; FileExistsError where there is one already
fd = open_log(path)           # to append to
sync_folder(path)             # the names in it are on disk
data = read(path)

A file is written under another name, fsynced, published by a hard link, and its folder fsynced: a reader sees all of it
or nothing, at any moment and after any crash. Where the file system has no hard links it is published by a rename while
a second file, made exclusively, keeps the others out; that assumes that all hosts see the file system in the same way.

A file server that sends a request again answers the second time that the name is taken, by us. A link is then known by
its inode. A folder has no owner: who may use it is decided by the first file that is created in it.
"""

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from gemctl.errors import InputError

T = TypeVar("T")
MOST_READ = 128 << 20  # bytes of a file that is read whole: a plan of 16,384 ranks has 5 MB
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
CLAIM_SECONDS = 2.0  # how long a rename that somebody else has begun may take
# What a file server, or the way to it, answers for a moment, and not when asked again.
PASSING = {
    errno.ESTALE, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOTCONN, errno.ECONNRESET,
    errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
}  # fmt: skip
PAUSES = (0.05, 0.2, 1.0)  # seconds before it is asked again


@contextmanager
def named(path: Path) -> Iterator[None]:
    """What the system refuses within it names `path`: a full disk alone does not say where."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def create(path: Path, data: str | bytes) -> None:
    """Makes the file `path` with `data`, on disk when this returns. FileExistsError if it is there already; of several
    writers one wins. OSError, which names `path`, if the system refuses."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # the same process number may write on another host
    try:
        with named(path):
            _write(draft, data.encode() if isinstance(data, str) else data)
            _publish(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def _write(draft: Path, data: bytes) -> None:
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        if not path.samefile(draft):
            raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _rename(draft, path)


def _rename(draft: Path, path: Path) -> None:
    """For file systems without hard links."""
    claim = path.with_name(f".{path.name}.claim")
    deadline = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            break
        except FileExistsError:
            if path.exists():
                raise
            if time.monotonic() > deadline:
                left = f"a process died while it made this file; delete {claim.name} beside it"
                raise OSError(errno.EBUSY, left) from None
            time.sleep(0.01)
    try:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        draft.rename(path)
    finally:
        claim.unlink()


def has_links(folder: Path) -> bool:
    """Whether the file system of `folder`, which is written to, has hard links."""
    first = folder / f".links.{secrets.token_hex(8)}"
    second = first.with_suffix(".2")
    try:
        _write(first, b"")
        os.link(first, second)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return False
    finally:
        second.unlink(missing_ok=True)
        first.unlink(missing_ok=True)
    return True


def make_folder(path: Path) -> None:
    """Makes the folder, on disk when this returns; its parent exists. FileExistsError if it is there already."""
    path.mkdir()
    sync_folder(path.parent)


def make_folders(path: Path) -> None:
    """Makes the folder and its parents, those that are not there, on disk when this returns."""
    if path.is_dir():
        return
    make_folders(path.parent)
    with suppress(FileExistsError):  # somebody else makes them too
        path.mkdir()
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts the folder's list of names on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with named(folder):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # it has no such call, and nothing that it could do
            raise
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Puts on disk what has been written to the file, by whomever."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with named(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def open_log(path: Path) -> int:
    """A descriptor to append to the file `path`, which is made if there is none, and to read it."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def read(path: Path, most: int = MOST_READ) -> bytes:
    """All of the file. InputError if it is none, or larger than `most` bytes."""

    def whole() -> bytes:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise InputError(f"{path}: {size} bytes, more than a file of this kind may have ({most})")
            return file.read()

    return steadily(whole)


def open_file(path: Path, *, follow: bool = True) -> BufferedReader:
    """The file, opened to be read. InputError if it is something else, which might block or never end.

    `follow`: a symbolic link may lead to it. OSError if the system refuses.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.ENODEV}:
            raise InputError(f"{path}: not a regular file ({os.strerror(error.errno)})") from None
        raise
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise InputError(f"{path}: not a regular file but {KINDS.get(kind, 'something else')}")
    return os.fdopen(fd, "rb")


def exists(path: Path) -> bool:
    """Whether there is such a file or folder."""
    return steadily(path.exists)


def steadily(reading: Callable[[], T]) -> T:
    """What `reading` returns, which may be done again: a file server's passing refusal is none."""
    for pause in PAUSES:
        try:
            return reading()
        except OSError as error:
            if error.errno not in PASSING:
                raise
        time.sleep(pause)
    return reading()
