"""Writes a checkpoint's full tensors as safetensors files, under the names of the unsharded model.

    export(Path("runs/…/checkpoints/step_100.a1"), Path("exported"), largest=5_000_000_000, optimizer=False)

`gemctl checkpoint export` calls this in a separate process (gemctl/torch_call.py). A file is 8 bytes
(little-endian length of the header), the header (JSON: name → dtype, shape, offsets), then all values back to back
(https://huggingface.co/docs/safetensors). Tensors are read straight into the mapped file, so they need not fit in
memory, and their content is compared with the manifest. DIR is created complete or not at all.
"""

import json
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gemctl.checkpoint.content import as_text, content_sum
from gemctl.checkpoint.load import read_object
from gemctl.checkpoint.pieces import Piece
from gemctl.checkpoint.storage import Reader, open_checkpoint
from gemctl.durable import create, make_folders, sync_folder
from gemctl.errors import GemctlError
from gemctl.run.checkpoints import Exported
from gemctl.run.manifest import Manifest, StoredObject

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
ALIGN = 8
INDEX = "model.safetensors.index.json"


def export(checkpoint: Path, target: Path, largest: int, optimizer: bool) -> Exported:
    """Writes `checkpoint` to the folder `target`, which must not exist, in files of at most `largest` bytes of values.

    A larger tensor has a file of its own. `optimizer`: include the optimizer state.
    """
    manifest, reader = open_checkpoint(checkpoint)
    objects = {key: stored for key, stored in manifest.objects.items() if optimizer or not key.startswith("optim.")}
    files = dict(_named(_split(objects, largest)))
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        make_folders(target.parent)
        draft.mkdir()
        for name, keys in files.items():
            _write(draft / name, {key: objects[key] for key in keys}, reader, manifest)
        total = sum(stored.bytes for stored in objects.values())
        if len(files) > 1:
            weight_map = {key: name for name, keys in files.items() for key in keys}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            create(draft / INDEX, json.dumps(index, indent=1) + "\n")
        sync_folder(draft)
        draft.rename(target)
    except OSError as error:
        raise GemctlError(f"{error.filename or target}: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(target.parent)
    return Exported(str(checkpoint), manifest.step, str(target), list(files), len(objects), total)


def _split(objects: dict[str, StoredObject], largest: int) -> Iterator[list[str]]:
    """The keys of each file: in order, as many as fit."""
    part: list[str] = []
    size = 0
    for key, stored in objects.items():
        if part and size + stored.bytes > largest:
            yield part
            part, size = [], 0
        part.append(key)
        size += stored.bytes
    yield part


def _named(parts: Iterator[list[str]]) -> Iterator[tuple[str, list[str]]]:
    every = list(parts)
    for number, part in enumerate(every, 1):
        yield ("model.safetensors" if len(every) == 1 else f"model-{number:05}-of-{len(every):05}.safetensors"), part


def _write(path: Path, objects: dict[str, StoredObject], reader: Reader, manifest: Manifest) -> None:
    # Widest dtypes first, so that each tensor is aligned to its element size without gaps.
    keys = sorted(objects, key=lambda key: -getattr(torch, objects[key].dtype).itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(manifest.step)}}
    places, end = {}, 0
    for key in keys:
        stored, start = objects[key], end
        end += stored.bytes
        places[key] = start
        header[key] = {"dtype": DTYPES[stored.dtype], "shape": stored.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGN)
    first = 8 + len(text)
    with path.open("w+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, first + end)  # a full disk is an error here instead of a SIGBUS later
        mapped = mmap.mmap(file.fileno(), first + end)  # unmapped together with the last tensor in it
        for key in keys:
            _fill(mapped, first + places[key], key, objects[key], reader)
        mapped.flush()
        os.fsync(file.fileno())


def _fill(mapped: mmap.mmap, start: int, key: str, stored: StoredObject, reader: Reader) -> None:
    values = _view(mapped, start, stored)
    read_object(reader, key, values)
    piece = Piece(values, (0,) * values.dim(), values.size())
    if stored.content is not None and as_text(content_sum(piece)) != stored.content:
        raise GemctlError(f"{key}: the exported values are not those that were saved")


def _view(mapped: mmap.mmap, start: int, stored: StoredObject) -> Tensor:
    """The tensor's memory in the mapped file."""
    dtype = getattr(torch, stored.dtype)
    if stored.bytes == 0:
        return torch.empty(stored.shape, dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=dtype, count=stored.bytes // dtype.itemsize, offset=start)
    return flat.view(stored.shape)
