"""Reads DCP's `.metadata`, a pickle, without running it: what it says is laid out and checked before anything is built.

    read_metadata(folder, manifest)

A pickle is a program for Python's unpickler. The one here knows only the instructions that DCP's metadata takes, makes
inert values of them and calls nothing, so no file can reach a class or a function of this process. All that is then
believed must agree with the manifest and with the sizes of the files: names, shapes, dtypes, boxes that make up each
tensor, and places within the files that do not overlap in size.
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
# What DCP's metadata is made of. BytesStorageMetadata is left out: DCP unpickles such entries without restriction.
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
    "builtins": {"getattr"},  # how some versions of Python write members of an enum
}


def read_metadata(folder: Path, manifest: Manifest) -> Metadata:
    """The metadata of the checkpoint in `folder`. InputError if it holds anything else than that, or does not agree
    with `manifest`."""
    path = folder / METADATA
    pieces = sum(stored.pieces for stored in manifest.objects.values())
    try:
        data = read(path, MOST_BESIDE + MOST_OF_A_PIECE * pieces)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    try:
        with _no_collector():
            return _Checked(manifest, len(data)).metadata(_Laid(io.BytesIO(data)).load())
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error})") from error


@contextmanager
def _no_collector() -> Iterator[None]:
    """Millions of small objects are made, and none of them is garbage: looking for it doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _Named:
    """A class or a function, by its name alone."""

    module: str
    name: str


class _Made:
    """What the pickle would make by calling `of`, and the state that it would give it. As a key, it is itself."""

    __slots__ = ("arguments", "of", "state")

    def __init__(self, of: _Named, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments = of, arguments
        self.state: Any = None


class _Laid(pickle._Unpickler):
    """`load()` gives numbers, strings, tuples, lists, dicts, _Named and _Made; it raises at anything else."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> _Named:
        if name not in ALLOWED.get(module, ()):
            raise InputError(f"refused: it wants to run {module}.{name}")
        return _Named(module, name)

    def make(self) -> None:
        """REDUCE and NEWOBJ: of, arguments → a new object."""
        arguments, of = self.stack.pop(), self.stack.pop()
        if not (isinstance(of, _Named) and isinstance(arguments, tuple)):
            raise InputError("refused: it calls something that it has not named")
        self.append(_Made(of, arguments))

    def build(self) -> None:
        """BUILD: object, state → object."""
        state, made = self.stack.pop(), self.stack[-1]
        if not (isinstance(made, _Made) and made.state is None and isinstance(state, (dict, tuple))):
            raise InputError("refused: it changes something that it has not made")
        made.state = state

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        # A nest of tuples is hashed in exponential time.
        if not (isinstance(target, dict) and all(isinstance(key, (str, _Made)) for key in keys)):
            raise InputError("refused: a key is neither a name nor an index")
        target.update(zip(keys, items[1::2], strict=True))

    # Calls, attributes of classes, extensions, references by position and numbers that say how much memory to take
    # are left out.
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


class _Checked:
    """Builds DCP's objects from what was laid out, as far as it agrees with the manifest. Raises InputError."""

    def __init__(self, manifest: Manifest, size: int) -> None:
        self._manifest = manifest
        self._room = size  # pieces that can still be in a pickle of this size: each takes more than a byte
        self._places: dict[tuple[str, tuple[int, ...]], int] = {}  # key and offsets of a piece → bytes of its values
        self._used = dict.fromkeys(manifest.files, 0)

    def metadata(self, laid: Any) -> Metadata:
        fields = _state(laid, "Metadata")
        tensors, storage = _field(fields, "state_dict_metadata", dict), _field(fields, "storage_data", dict)
        if different := sorted(map(str, tensors.keys() ^ self._manifest.objects.keys())):
            raise InputError(f"its tensors are not those of the manifest: {', '.join(different[:3])}")
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: self._tensor(key, entry, self._manifest.objects[key]) for key, entry in tensors.items()
        }
        places = dict(self._place(index, place) for index, place in storage.items())
        if self._places:
            raise InputError(f"it does not say where a piece of {next(iter(self._places))[0]} lies")
        return Metadata(entries, storage_data=places, storage_meta=StorageMeta())

    def _tensor(self, key: str, laid: Any, stored: StoredObject) -> TensorStorageMetadata:
        fields = _state(laid, "TensorStorageMetadata")
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
            raise InputError(f"the pieces of {key} do not make it up")
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)

    def _chunk(self, key: str, laid: Any, full: torch.Size, dtype: torch.dtype) -> ChunkStorageMetadata:
        fields = _state(laid, "ChunkStorageMetadata")
        offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
        if not len(offsets) == len(sizes) == len(full) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, full, strict=True)
        ):
            raise InputError(f"a piece of {key} lies outside of it: {list(sizes)} at {list(offsets)} of {list(full)}")
        if (key, tuple(offsets)) in self._places:
            raise InputError(f"two pieces of {key} lie at {list(offsets)}")
        self._places[key, tuple(offsets)] = sizes.numel() * dtype.itemsize
        return ChunkStorageMetadata(offsets, sizes)

    def _place(self, laid_index: Any, laid: Any) -> tuple[MetadataIndex, _StorageInfo]:
        index, fields = _state(laid_index, "MetadataIndex"), _state(laid, "_StorageInfo")
        key, offsets = _field(index, "fqn", str), _size(index.get("offset"))
        file, start, length = (_field(fields, name, kind) for name, kind in PLACE.items())
        if file not in self._manifest.files or fields.get("transform_descriptors"):
            raise InputError(f"{key} points to {file}, which the manifest does not list")
        values = self._places.pop((key, tuple(offsets)), None)
        if values is None:
            raise InputError(f"it says where a piece of {key} at {list(offsets)} lies, which does not exist")
        self._used[file] += length
        whole = self._manifest.files[file].bytes
        if not (0 <= start <= start + length <= whole and self._used[file] <= whole):
            raise InputError(f"a piece of {key} lies outside of {file}: {length} bytes at {start} of {whole}")
        if not values <= length <= values + OVERHEAD:
            raise InputError(f"a piece of {key} takes {length} bytes of {file} for {values} bytes of values")
        return MetadataIndex(key, offsets), _StorageInfo(file, start, length)


PLACE: dict[str, type] = {"relative_path": str, "offset": int, "length": int}


def _state(laid: Any, name: str) -> dict[str, Any]:
    """The fields of an object that must be one of class `name`."""
    if not (isinstance(laid, _Made) and laid.of.name == name and isinstance(laid.state, dict)):
        found = laid.of.name if isinstance(laid, _Made) else type(laid).__name__
        raise InputError(f"damaged: a {found} where a {name} belongs")
    return laid.state


def _field(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise InputError(f"damaged: {name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _size(laid: Any) -> torch.Size:
    numbers = laid.arguments[0] if isinstance(laid, _Made) and len(laid.arguments) == 1 else None
    if not isinstance(numbers, tuple) or len(numbers) > MOST_DIMS:
        raise InputError("damaged: a shape is none")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers) or math.prod(numbers) >= 1 << 63:
        raise InputError("damaged: no tensor has this shape")
    return torch.Size(numbers)


def _dtype(laid: Any) -> torch.dtype:
    state = laid.state if isinstance(laid, _Made) else None
    named = state[0] if isinstance(state, tuple) and state else None
    found = getattr(torch, named.name, None) if isinstance(named, _Named) and named.module == "torch" else None
    if not isinstance(found, torch.dtype):
        raise InputError("damaged: a tensor has no dtype")
    return found
