"""Reads DCP's `.metadata`, a pickle, without executing it: its contents are parsed and checked before use.

    read_metadata(folder, manifest)

A pickle is a program for Python's unpickler. The unpickler here supports only the instructions that DCP's metadata
needs, turns them into inert values and calls nothing, so no file can reach a class or a function of this process. The
values must then agree with the manifest and the file sizes: names, shapes, dtypes, the boxes that make up each tensor,
and their places within the files, whose total size must fit.
"""

import gc
import io
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from gemctl.durable import read
from gemctl.errors import InputError
from gemctl.run.manifest import Manifest, StoredObject

METADATA = ".metadata"
MOST_OF_A_PIECE = 4 << 10  # bytes of metadata; DCP takes about 150
MOST_BESIDE = 1 << 20
MOST_DIMS = 64
OVERHEAD = 64 << 10  # bytes that torch.save may add to a piece's values; it takes about 1,200
# The parts of DCP's metadata. BytesStorageMetadata is left out: DCP unpickles such entries without restriction.
DCP = "torch.distributed.checkpoint"
ALLOWED = {
    f"{DCP}.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "builtins": {"getattr"},  # how some Python versions pickle members of an enum
}


def read_metadata(folder: Path, manifest: Manifest) -> Metadata:
    """The metadata of the checkpoint in `folder`. InputError if the file contains anything else, or does not agree with
    `manifest`."""
    path = folder / METADATA
    pieces = sum(stored.pieces for stored in manifest.objects.values())
    try:
        data = read(path, MOST_BESIDE + MOST_OF_A_PIECE * pieces)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    try:
        with _no_collector():
            return _Builder(manifest, len(data)).metadata(_Parser(io.BytesIO(data)).load())
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error})") from error


@contextmanager
def _no_collector() -> Iterator[None]:
    """Millions of small objects are created and none is garbage: collecting would double the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _Named:
    """A class or a function, represented by its name."""

    module: str
    name: str


class _Made:
    """An object that the pickle would create by calling `of`, and the state that it would set. Hashed by identity."""

    __slots__ = ("arguments", "of", "state")

    def __init__(self, of: _Named, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments = of, arguments
        self.state: Any = None


class _Parser(pickle._Unpickler):
    """`load()` returns numbers, strings, tuples, lists, dicts, _Named and _Made, and raises on anything else."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> _Named:
        if name not in ALLOWED.get(module, ()):
            raise InputError(f"refused: it wants to run {module}.{name}")
        return _Named(module, name)

    def make(self) -> None:
        """REDUCE and NEWOBJ: callable, arguments → a new object."""
        arguments, of = self.stack.pop(), self.stack.pop()
        if not (isinstance(of, _Named) and isinstance(arguments, tuple)):
            raise InputError("refused: it calls something that it has not imported by name")
        self.append(_Made(of, arguments))

    def build(self) -> None:
        """BUILD: object, state → object."""
        state, made = self.stack.pop(), self.stack[-1]
        if not (isinstance(made, _Made) and made.state is None and isinstance(state, (dict, tuple))):
            raise InputError("refused: it changes an object that it has not created")
        made.state = state

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        # Hashing nested tuples takes exponential time.
        if not (isinstance(target, dict) and all(isinstance(key, (str, _Made)) for key in keys)):
            raise InputError("refused: a key is neither a name nor an index")
        target.update(zip(keys, items[1::2], strict=True))

    # Left out: other calls, class attributes, extensions, references by position, and values that request an amount of
    # memory.
    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]]
        for code in (
            pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
            pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1,
            pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.STACK_GLOBAL, pickle.EMPTY_TUPLE, pickle.TUPLE,
            pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
            pickle.EMPTY_DICT,
        )
    } | {
        pickle.REDUCE[0]: make, pickle.NEWOBJ[0]: make, pickle.BUILD[0]: build,
        pickle.SETITEM[0]: set_item, pickle.SETITEMS[0]: set_items,
    }  # fmt: skip


class _Builder:
    """Builds DCP's objects from parsed values. InputError where they do not agree with the manifest."""

    def __init__(self, manifest: Manifest, size: int) -> None:
        self._manifest = manifest
        self._room = size  # how many more pieces a pickle of this size can describe: each takes more than a byte
        self._places: dict[tuple[str, tuple[int, ...]], int] = {}  # key and offsets of a piece → bytes of its values
        self._used = dict.fromkeys(manifest.files, 0)

    def metadata(self, parsed: Any) -> Metadata:
        fields = _state(parsed, "Metadata")
        tensors, storage = _field(fields, "state_dict_metadata", dict), _field(fields, "storage_data", dict)
        if different := sorted(map(str, tensors.keys() ^ self._manifest.objects.keys())):
            raise InputError(f"its tensors are not those of the manifest: {', '.join(different[:3])}")
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: self._tensor(key, entry, self._manifest.objects[key]) for key, entry in tensors.items()
        }
        places = dict(self._place(index, place) for index, place in storage.items())
        if self._places:
            raise InputError(f"the place of a piece of {next(iter(self._places))[0]} is missing")
        return Metadata(entries, storage_data=places, storage_meta=StorageMeta())

    def _tensor(self, key: str, parsed: Any, stored: StoredObject) -> TensorStorageMetadata:
        fields = _state(parsed, "TensorStorageMetadata")
        size, dtype = _size(fields.get("size")), _dtype(fields.get("properties"))
        if list(size) != stored.shape or str(dtype) != f"torch.{stored.dtype}":
            raise InputError(f"{key} is {dtype} {list(size)}, the manifest says {stored.dtype} {stored.shape}")
        if size.numel() * dtype.itemsize != stored.bytes:
            raise InputError(f"{key} has {size.numel() * dtype.itemsize} bytes, the manifest says {stored.bytes}")
        boxes = _field(fields, "chunks", list)
        self._room -= len(boxes)
        if len(boxes) != stored.pieces or self._room < 0:
            raise InputError(f"{key} has {len(boxes)} pieces, the manifest says {stored.pieces}")
        chunks = [self._chunk(key, box, size, dtype) for box in boxes]
        if sum(chunk.sizes.numel() for chunk in chunks) != size.numel():
            raise InputError(f"the pieces of {key} do not add up to it")
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)

    def _chunk(self, key: str, parsed: Any, full: torch.Size, dtype: torch.dtype) -> ChunkStorageMetadata:
        fields = _state(parsed, "ChunkStorageMetadata")
        offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
        if not len(offsets) == len(sizes) == len(full) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, full, strict=True)
        ):
            raise InputError(f"a piece of {key} is out of bounds: {list(sizes)} at {list(offsets)} of {list(full)}")
        if (key, tuple(offsets)) in self._places:
            raise InputError(f"two pieces of {key} are at {list(offsets)}")
        self._places[key, tuple(offsets)] = sizes.numel() * dtype.itemsize
        return ChunkStorageMetadata(offsets, sizes)

    def _place(self, parsed_index: Any, parsed: Any) -> tuple[MetadataIndex, _StorageInfo]:
        index, fields = _state(parsed_index, "MetadataIndex"), _state(parsed, "_StorageInfo")
        key, offsets = _field(index, "fqn", str), _size(index.get("offset"))
        file, start, length = (_field(fields, name, kind) for name, kind in PLACE.items())
        if file not in self._manifest.files or fields.get("transform_descriptors"):
            raise InputError(f"{key} points to {file}, which the manifest does not list")
        values = self._places.pop((key, tuple(offsets)), None)
        if values is None:
            raise InputError(f"it gives a place for a piece of {key} at {list(offsets)}, which does not exist")
        self._used[file] += length
        whole = self._manifest.files[file].bytes
        if not (0 <= start <= start + length <= whole and self._used[file] <= whole):
            raise InputError(f"a piece of {key} is outside of {file}: {length} bytes at {start} of {whole}")
        if not values <= length <= values + OVERHEAD:
            raise InputError(f"a piece of {key} takes {length} bytes of {file} for {values} bytes of values")
        return MetadataIndex(key, offsets), _StorageInfo(file, start, length)


PLACE: dict[str, type] = {"relative_path": str, "offset": int, "length": int}


def _state(parsed: Any, name: str) -> dict[str, Any]:
    """The fields of an object that must be of class `name`."""
    if not (isinstance(parsed, _Made) and parsed.of.name == name and isinstance(parsed.state, dict)):
        actual = parsed.of.name if isinstance(parsed, _Made) else type(parsed).__name__
        raise InputError(f"damaged: expected a {name}, got a {actual}")
    return parsed.state


def _field(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise InputError(f"damaged: {name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _size(parsed: Any) -> torch.Size:
    numbers = parsed.arguments[0] if isinstance(parsed, _Made) and len(parsed.arguments) == 1 else None
    if not isinstance(numbers, tuple) or len(numbers) > MOST_DIMS:
        raise InputError("damaged: a shape is not a tuple of numbers")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) or math.prod(numbers) >= 1 << 63:
        raise InputError("damaged: a shape that no tensor can have")
    return torch.Size(numbers)


def _dtype(parsed: Any) -> torch.dtype:
    state = parsed.state if isinstance(parsed, _Made) else None
    named = state[0] if isinstance(state, tuple) and state else None
    dtype = getattr(torch, named.name, None) if isinstance(named, _Named) and named.module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise InputError("damaged: a tensor has no dtype")
    return dtype
