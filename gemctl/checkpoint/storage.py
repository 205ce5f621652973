"""Writes pieces to DCP's files and reads them back: DCP's planner, writer and reader, and the steps of a save.

The planner plans pieces instead of DTensors, so that plain memory is staged. The writer names file and errno when a
write fails (DCP reports "unexpected pos" and loses the errno between ranks). The reader trusts no pickle
(gemctl/checkpoint/metadata.py) and no compressed data.
"""

import errno
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from gemctl.checkpoint.metadata import METADATA, read_metadata
from gemctl.checkpoint.pieces import Piece, dtype_name, dtype_of
from gemctl.durable import named, sync_file
from gemctl.errors import InputError
from gemctl.run.manifest import Manifest, check_size, file_faults, read

Row = list[Any]  # JSON: a piece (key, offsets, shape, dtype, full shape, hint), or its place in a file


class PiecePlanner(DefaultSavePlanner):
    """Plans the writing of `{key: [Piece, …]}`; a piece that several ranks hold is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        state: dict[str, list[Piece]] = self.state_dict
        self.plan = SavePlan([_write_item(key, piece) for key, pieces in state.items() for piece in pieces])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.piece(index).tensor

    def piece(self, index: MetadataIndex) -> Piece:
        pieces: list[Piece] = self.state_dict[index.fqn]
        return next(piece for piece in pieces if piece.offsets == tuple(index.offset or ()))


def _write_item(key: str, piece: Piece) -> WriteItem:
    return _item([key, piece.offsets, piece.tensor.shape, dtype_name(piece.tensor.dtype), piece.full, None])


class PieceSave:
    """One rank's part of a save, with JSON as the arguments and results of every step: `dcp.save` takes the same steps,
    but has ranks send each other pickles.

        plan → on rank 0: divide → write → on rank 0: finish
    """

    def __init__(self, state: dict[str, list[Piece]], writer: "Writer", rank: int) -> None:
        self._state, self._writer, self._rank = state, writer, rank
        self._planner = PiecePlanner()
        self._plan = SavePlan([])

    def plan(self) -> list[Row]:
        """The pieces that this rank holds."""
        first = self._rank == 0
        self._planner.set_up_planner(self._state, self._writer.storage_meta(), first)
        self._writer.set_up_storage_writer(first)
        return _rows(self._writer.prepare_local_plan(self._planner.create_local_plan()))

    def divide(self, plans: list[list[Row]]) -> list[list[Row]]:
        """For each rank the pieces to write, so that every box is written once."""
        divided, self._metadata = self._planner.create_global_plan([SavePlan(list(map(_item, rows))) for rows in plans])
        return list(map(_rows, divided))

    def write(self, rows: list[Row]) -> list[Row]:
        """Writes this rank's pieces; returns the place of each."""
        plan = SavePlan(list(map(_item, rows)), storage_data=_StoragePrefix(f"__{self._rank}_"))
        self._plan = self._planner.finish_plan(plan)
        return [
            [one.index.fqn, one.index.offset, one.index.index, one.size_in_bytes, place.relative_path, place.offset,
             place.length]
            for one in self._writer.write_data(self._plan, self._planner).value()
            for place in [one.storage_data]
        ]  # fmt: skip

    def finish(self, written: list[list[Row]]) -> Metadata:
        """Writes DCP's metadata."""
        self._writer.finish(self._metadata, [list(map(_result, rows)) for rows in written])
        return self._metadata

    def written(self) -> Iterator[tuple[str, Piece]]:
        """Key and piece of everything that this rank wrote; over all ranks, every box once."""
        for item in self._plan.items:
            yield item.index.fqn, self._planner.piece(item.index)


def _rows(plan: SavePlan) -> list[Row]:
    rows = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None  # a piece is a tensor
        index, chunk = item.index, data.chunk
        rows.append([index.fqn, chunk.offsets, chunk.sizes, dtype_name(data.properties.dtype), data.size, index.index])
    return rows


def _item(row: Row) -> WriteItem:
    key, offsets, shape, dtype, full, hint = row
    box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
    data = TensorWriteData(box, TensorProperties(dtype=dtype_of(dtype)), torch.Size(full))
    return WriteItem(MetadataIndex(key, offsets, hint), WriteItemType.SHARD, tensor_data=data)


def _result(row: Row) -> WriteResult:
    key, offsets, hint, size, path, start, length = row
    return WriteResult(MetadataIndex(key, offsets, hint), size, _StorageInfo(path, start, length))


class Writer(FileSystemWriter):
    """Writes one file per rank and fsyncs it; a failure is an OSError with errno and file name."""

    def __init__(self, folder: Path, rank: int) -> None:
        # No copy ahead: pieces are on the host, and DCP would use GPU 0 from its thread on every rank. No sync_files:
        # DCP fsyncs a file while the end of it (all of a small one) is still in Python's buffer, so we do it later.
        super().__init__(folder, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0)
        self._file = folder / f"__{rank}_0.distcp"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            written = super().write_data(plan, planner)
            if self._file.exists():  # a rank may have nothing to write
                sync_file(self._file)
            return written
        except Exception as error:
            cause = _os_error(error)
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(self._file)) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with named(self._file.with_name(METADATA)):
            super().finish(metadata, results)
            sync_file(self._file.with_name(METADATA))


def _os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


class Reader(FileSystemReader):
    """Reads the checkpoint in `folder`, whose files have been checked. The metadata is read once and cached."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self.folder, self._manifest = folder, manifest
        self._metadata: Metadata | None = None

    # No **kwargs: DCP would then try each rank's own metadata file after this one was refused.
    def read_metadata(self) -> Metadata:
        """InputError if it does not agree with the manifest."""
        if self._metadata is None:
            self._metadata = read_metadata(self.folder, self._manifest)
        return self._metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """A piece as torch.load reads it. OSError if it is compressed and so could expand: DCP compresses nothing."""
        piece = super()._slice_file(file, sinfo)
        try:
            entries = zipfile.ZipFile(_Seekable(piece)).infolist()
        except zipfile.BadZipFile as error:
            raise OSError(errno.EINVAL, f"a piece is damaged ({error})", file.name) from None
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        if not stored or sum(entry.file_size for entry in entries) > sinfo.length:
            raise OSError(errno.EINVAL, "refused: a piece is compressed", file.name)
        piece.seek(0)
        return piece


class _Seekable:
    """A piece for zipfile: DCP's object expects offsets from the end with the opposite sign."""

    def __init__(self, piece: Any) -> None:
        self._piece, self.read, self.tell = piece, piece.read, piece.tell

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._piece.seek(-offset if whence == os.SEEK_END else offset, whence)
        return int(self.tell())

    def seekable(self) -> bool:
        return True


def open_checkpoint(folder: Path) -> tuple[Manifest, Reader]:
    """The checkpoint in `folder`, for reading single objects. InputError if sizes or metadata are wrong; the files'
    contents are not hashed."""
    manifest = read(folder)
    if faults := file_faults(folder, manifest, check_size):
        raise InputError(faults)
    reader = Reader(folder, manifest)
    reader.read_metadata()
    return manifest, reader


def rank_files(folder: Path, rank: int) -> list[str]:
    """Names of the files that hold this rank's pieces."""
    return sorted(name for name in os.listdir(folder) if name.startswith(f"__{rank}_"))  # noqa: PTH208 (names)
