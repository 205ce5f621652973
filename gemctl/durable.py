"""Files and folders that survive a power loss, and reads that tolerate transient errors of a file server.

create(path, text)            # complete, exclusive, on disk; FileExistsError if it already exists
make_folder(path)             # on disk; FileExistsError if it already exists
fd = open_log(path)           # for appending
sync_folder(path)             # puts the names in it on disk
data = read(path)

A file is written under a temporary name, fsynced and published by a hard link, and its folder is fsynced: readers see
all of it or nothing, at any time and after any crash. Without hard links it is published by a rename, while a second
file, created exclusively, keeps other writers out; this assumes that all hosts have the same view of the file system.

When a file server repeats a request that has succeeded, the repetition fails because the name is already taken, by us.
Our link is then recognised by its inode. A folder has no such identity: the first file created in it decides who owns
it.
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
MOST_READ = 128 << 20  # largest file that is read whole; a plan for 16,384 ranks has 5 MB
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
CLAIM_SECONDS = 2.0  # how long another writer's rename may take
# Transient errors of a file server or the network.
TRANSIENT = {
    errno.ESTALE, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOTCONN, errno.ECONNRESET,
    errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
}  # fmt: skip
PAUSES = (0.05, 0.2, 1.0)  # seconds before each retry


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError raised inside names `path`: a full disk, for example, does not say where it happened."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def create(path: Path, data: str | bytes) -> None:
    """Creates the file `path` with `data`, on disk when this returns. FileExistsError if it exists; of several writers
    one wins. Any OSError names `path`."""
    draft = path.with_name(
        f".{path.name}.{secrets.token_hex(8)}"
    )  # a process with the same pid may write on another host
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
    """Publishes on file systems without hard links."""
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
                left = f"a process died while creating this file; delete {claim.name} beside it"
                raise OSError(errno.EBUSY, left) from None
            time.sleep(0.01)
    try:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        draft.rename(path)
    finally:
        claim.unlink()


def has_links(folder: Path) -> bool:
    """Whether the file system of `folder` has hard links; writes test files there."""
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
    """Creates the folder, on disk when this returns; its parent must exist. FileExistsError if it exists."""
    path.mkdir()
    sync_folder(path.parent)


def make_folders(path: Path) -> None:
    """Creates the folder and its missing parents, on disk when this returns."""
    if path.is_dir():
        return
    make_folders(path.parent)
    with suppress(FileExistsError):  # another process may create them too
        path.mkdir()
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts the names in the folder on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with named(folder):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # not supported by this file system, so not needed
            raise
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Puts everything written to the file on disk, by whichever process."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with named(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def open_log(path: Path) -> int:
    """A descriptor for appending to and reading the file `path`, which is created if missing."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def read(path: Path, most: int = MOST_READ) -> bytes:
    """The whole file. InputError if it is not a regular file, or larger than `most` bytes."""

    def whole() -> bytes:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise InputError(f"{path}: {size} bytes, more than a file of this kind may have ({most})")
            return file.read()

    return retried(whole)


def open_file(path: Path, *, follow: bool = True) -> BufferedReader:
    """Opens the file for reading. InputError if it is not a regular file, which might block or never end.

    `follow`: whether it may be a symbolic link.
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
    """Whether the file or folder exists."""
    return retried(path.exists)


def retried(reading: Callable[[], T]) -> T:
    """What `reading` returns, repeating it after transient errors of a file server."""
    for pause in PAUSES:
        try:
            return reading()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
        time.sleep(pause)
    return reading()
