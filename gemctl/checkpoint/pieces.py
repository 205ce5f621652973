"""A state as boxes: which part of each full tensor this rank holds, and where it lies in it.

A state maps keys to plain tensors (the same on every rank that has the key), FSDP2 DTensors, or TorchRec's tables
(DTensors over LocalShardsWrapper). Ranks may hold different keys: a table-wise table's optimizer state exists on its
owner alone. Several replicas may hold one table shard: the pieces of each are the part of it that it writes. Everything
else here (save, hash, compare) works on pieces, so only this file knows these kinds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gemctl.errors import GemctlError
from gemctl.mesh.topology import Axis


@dataclass(frozen=True)
class Piece:
    """`tensor` is the box at `offsets` of a full tensor of shape `full`. It shares memory with the state."""

    tensor: Tensor
    offsets: tuple[int, ...]
    full: torch.Size


# Boxes of FSDP2 tensors by mesh, placements and full shape: torch takes 0.1 ms for each, in the training thread.
_boxes: dict[tuple[Any, ...], list[ChunkStorageMetadata]] = {}


@torch.no_grad()
def state_pieces(state: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """This rank's boxes of each tensor; none of a tensor whose mesh or table leaves this rank out."""
    return {key: _local_pieces(value) for key, value in state.items()}


def _local_pieces(value: Tensor) -> list[Piece]:
    if not isinstance(value, DTensor):
        return [Piece(value.detach(), (0,) * value.dim(), value.size())]
    if value.device_mesh.get_coordinate() is None:
        return []
    local: Any = value.to_local()
    # Both are DCP's protocol for sharded tensors. A table's rank without rows has a box of no size and no shard.
    if hasattr(local, "local_shards"):
        shards, boxes = _own_rows(local.local_shards(), local.__create_chunk_list__(), value.device_mesh)
    else:
        place = (value.device_mesh, value.placements, value.shape)
        if place not in _boxes:
            _boxes[place] = value.__create_chunk_list__()
        shards, boxes = [local], _boxes[place]
    return [Piece(shard.detach(), tuple(box.offsets), value.size()) for shard, box in zip(shards, boxes, strict=False)]


def _own_rows(
    shards: list[Tensor], boxes: list[ChunkStorageMetadata], mesh: DeviceMesh
) -> tuple[list[Tensor], list[ChunkStorageMetadata]]:
    """Of table shards that several replicas hold, the rows that this one writes: each writes its part."""
    names = mesh.mesh_dim_names or ()
    if Axis.MP_REPLICATE.value not in names:
        return shards, boxes
    axis = names.index(Axis.MP_REPLICATE.value)
    found: tuple[list[Tensor], list[ChunkStorageMetadata]] = ([], [])
    for shard, box in zip(shards, boxes, strict=False):
        block = -(-shard.shape[0] // mesh.size(axis))
        first = block * mesh.get_local_rank(axis)
        part = shard[first : first + block]
        if part.numel():
            offsets = torch.Size((box.offsets[0] + first, *box.offsets[1:]))
            found[0].append(part)
            found[1].append(ChunkStorageMetadata(offsets, part.shape))
    return found


def layout(value: Tensor) -> str:
    """How a tensor lies over the ranks, for people: `replicated`, or the placement along each mesh axis."""
    if not isinstance(value, DTensor):
        return "replicated"
    mesh = value.device_mesh
    names = mesh.mesh_dim_names or [f"axis{i}" for i in range(mesh.ndim)]
    parts = [f"{name}={mesh.size(i)}:{value.placements[i]}" for i, name in enumerate(names)]
    return " ".join(parts)


def dtype_name(dtype: torch.dtype) -> str:
    """float32, say: as manifests, and ranks among each other, name it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name; GemctlError if there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise GemctlError(f"{name!r} is no dtype of torch's")
    return found
