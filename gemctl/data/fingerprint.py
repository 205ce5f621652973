"""Fingerprints of a data set's files, from one read of each file's footer; rows are not read.

sources = fingerprint("logs/clicks")              # gemctl.run.inputs.Source
changed("data.train", sources)                    # later, or on another host: what has changed
"""

import glob
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gemctl import paths
from gemctl.data.files import DataFile, DataPath, find_files, urls
from gemctl.errors import InputError
from gemctl.run.inputs import FileMark, Source, Sources, difference

TAIL = 64 << 10  # bytes at a file's end that are read at once; longer footers need a second read
AT_ONCE = 16  # files that are read concurrently
MAGIC = b"PAR1"


def fingerprint(url: DataPath) -> Sources:
    """The files that a data path means, as they are now. InputError if there is none, or one is not a Parquet file."""
    return [_source(one) for one in urls(url)]


def changed(key: str, sources: Sources) -> list[str]:
    """A line for each of these files that has changed or is gone; `key` names the data set. Other files are ignored."""

    def problem(path: str, before: FileMark) -> str | None:
        try:
            what = difference(before, mark(find_files(path).files[0], before.name))
        except InputError as error:
            return f"{key}: {error}"
        return f"{key}: {path}: changed since the run was submitted: {what}" if what else None

    files = [(source.path_of(file), file) for source in sources for file in source.files]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [found for found in pool.map(problem, *zip(*files, strict=True)) if found is not None]


def _source(url: str) -> Source:
    found = find_files(url).files
    base, pattern = _split(url)
    root = found[0].filesystem._strip_protocol(base).rstrip("/") if "://" in base else base
    names = ["" if file.path == root else os.path.relpath(file.path, root) for file in found]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Source(base, pattern, list(pool.map(mark, found, names)))


def _split(url: str) -> tuple[str, str]:
    """A data path split into the file or folder that it names or in which its glob begins, and the glob."""
    url = url.rstrip("/")
    if not glob.has_magic(url) or ("://" not in url and paths.exists(url)):
        return url, ""
    parts = url.split("/")
    first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:first]), "/".join(parts[first:])


def mark(file: DataFile, name: str) -> FileMark:
    """The file's fingerprint. InputError if it is gone or not a Parquet file."""
    try:
        size = file.filesystem.size(file.path)
        with file.filesystem.open(file.path, "rb") as opened:
            tail = _end(opened, size, TAIL)
            length = int.from_bytes(tail[-8:-4], "little")
            if len(tail) < min(size, length + 8):
                tail = _end(opened, size, length + 8)
        footer = tail[-8 - length :]
        metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
    except FileNotFoundError:
        raise InputError(f"{file.path}: no such file") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{file.path}: not a readable Parquet file: {error}") from error
    columns = metadata.schema.to_arrow_schema().remove_metadata()
    return FileMark(name, size, metadata.num_rows, metadata.num_row_groups, _hash(str(columns).encode()), _hash(footer))


def _end(opened: Any, size: int, count: int) -> bytes:
    opened.seek(max(0, size - count))
    return bytes(opened.read())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
