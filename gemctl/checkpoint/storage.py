"""How pieces go into DCP's files and come back: the planner, the writer and the reader handed to dcp.save and load.

The planner writes pieces instead of DTensors, so that what is staged is plain memory. The writer names file and errno
when a write fails (DCP reports "unexpected pos" and loses the errno between ranks). The reader trusts no pickle:
`.metadata` is read by an allow-list, and what could make DCP unpickle freely or read other files is refused.
"""

import enum
import io
import os
import pickle
from collections.abc import Callable, Iterator
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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from gemctl.checkpoint.pieces import Piece
from gemctl.durable import named
from gemctl.errors import InputError
from gemctl.run.inject import Point

METADATA = ".metadata"
# The one entry of what is handed to async_save: it spends 0.1 ms on each, in the training thread.
PIECES = "pieces"
# What DCP's metadata is made of. BytesStorageMetadata is left out: DCP unpickles such entries without restriction.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class PiecePlanner(DefaultSavePlanner):
    """Plans the writing of `{PIECES: {key: [Piece, …]}}`; what several ranks have is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        state: dict[str, list[Piece]] = self.state_dict[PIECES]
        self.plan = SavePlan([_write_item(key, piece) for key, pieces in state.items() for piece in pieces])
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._final = super().finish_plan(new_plan)
        return self._final

    def written(self) -> Iterator[tuple[str, Piece]]:
        """Key and piece of all that this rank wrote, once a save has ended: over the ranks, every box once."""
        for item in self._final.items:
            offsets = tuple(item.index.offset or ())
            pieces: list[Piece] = self.state_dict[PIECES][item.index.fqn]
            yield item.index.fqn, next(piece for piece in pieces if piece.offsets == offsets)

    def lookup_object(self, index: MetadataIndex) -> Any:
        pieces: list[Piece] = self.state_dict[PIECES][index.fqn]
        return next(piece.tensor for piece in pieces if piece.offsets == tuple(index.offset or ()))


def _write_item(key: str, piece: Piece) -> WriteItem:
    box = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.size())
    data = TensorWriteData(box, TensorProperties(dtype=piece.tensor.dtype), piece.full)
    return WriteItem(MetadataIndex(key, piece.offsets), WriteItemType.SHARD, tensor_data=data)


class Writer(FileSystemWriter):
    """Writes one file a rank, put on disk before the save goes on; a failure is an OSError with errno and file.

    `reach` is told where it is.
    """

    def __init__(self, folder: Path, rank: int, reach: Callable[[Point], None]) -> None:
        # No copy ahead: pieces are on the host, and DCP would use GPU 0 from its thread on every rank.
        super().__init__(folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
        self._file, self._reach = folder / f"__{rank}_0.distcp", reach

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            self._reach("upload")
            return super().write_data(plan, planner)
        except Exception as error:
            cause = _os_error(error)
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(self._file)) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._reach("metadata")
        with named(self._file.with_name(METADATA)):
            super().finish(metadata, results)


def _os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


class Reader(FileSystemReader):
    """Reads a checkpoint whose files are `files` (names in its manifest). The metadata is read once and kept."""

    def __init__(self, folder: Path, files: set[str]) -> None:
        super().__init__(folder)
        self.folder, self._files = folder, files
        self._metadata: Metadata | None = None

    # No **kwargs, else DCP tries each rank's own metadata file where this one is refused.
    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = read_metadata(self.folder / METADATA, self._files)
        return self._metadata


def read_metadata(path: Path, files: set[str]) -> Metadata:
    """DCP's metadata, unpickled by the allow-list. InputError if it holds anything else or points out of `files`."""
    try:
        metadata = _AllowListed(io.BytesIO(path.read_bytes())).load()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:
        raise InputError(f"{path}: damaged ({error})") from error
    if not isinstance(metadata, Metadata):
        raise InputError(f"{path}: damaged, it holds a {type(metadata).__name__}")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise InputError(f"{path}: {key} is a {type(entry).__name__}, not a tensor")
    for index, place in metadata.storage_data.items():
        if place.relative_path not in files or place.transform_descriptors:
            raise InputError(f"{path}: {index.fqn} points to {place.relative_path}, which the manifest does not list")
    metadata.storage_meta = StorageMeta()
    return metadata


class _AllowListed(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how some Python versions pickle enum members
            return _enum_member
        raise InputError(f"refused: it wants to run {module}.{name}")


def _enum_member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise InputError(f"refused: it wants to run getattr({kind!r}, {name!r})")
    return kind[name]


def rank_files(folder: Path, rank: int) -> list[str]:
    """Names of the files that this rank wrote; rank 0 wrote the metadata too."""
    names = [name for name in os.listdir(folder) if name.startswith(f"__{rank}_")]  # noqa: PTH208 (names are wanted)
    return sorted([*names, METADATA] if rank == 0 else names)
