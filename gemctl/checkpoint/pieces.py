"""A state as boxes: which part of each full tensor this rank holds, and at which offsets.

A state maps keys to plain tensors (equal on every rank that has the key), FSDP2 DTensors, or TorchRec's tables
(DTensors over LocalShardsWrapper). Ranks may hold different keys: the optimizer state of a table-wise table exists on
its owner only. Where several replicas hold the same table shard, each has the pieces that it writes. The rest of this
package (save, sum, compare) works on pieces, so only this file knows the kinds of tensors.
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


# Boxes of FSDP2 tensors by mesh, placements and full shape: torch needs 0.1 ms for each, in the training thread.
_boxes: dict[tuple[Any, ...], list[ChunkStorageMetadata]] = {}


@torch.no_grad()
def state_pieces(state: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """This rank's boxes of each tensor; none of a tensor whose mesh or table does not include this rank."""
    return {key: _local_pieces(value) for key, value in state.items()}


def _local_pieces(value: Tensor) -> list[Piece]:
    if not isinstance(value, DTensor):
        return [Piece(value.detach(), (0,) * value.dim(), value.size())]
    if value.device_mesh.get_coordinate() is None:
        return []
    local: Any = value.to_local()
    # Both are DCP's protocol for sharded tensors. A rank without rows of a table has an empty box and no shard.
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
    """The rows that this replica writes of table shards that several replicas hold."""
    names = mesh.mesh_dim_names or ()
    if Axis.MP_REPLICATE.value not in names:
        return shards, boxes
    axis = names.index(Axis.MP_REPLICATE.value)
    parts: list[Tensor] = []
    places: list[ChunkStorageMetadata] = []
    for shard, box in zip(shards, boxes, strict=False):
        block = -(-shard.shape[0] // mesh.size(axis))
        first = block * mesh.get_local_rank(axis)
        part = shard[first : first + block]
        if part.numel():
            offsets = torch.Size((box.offsets[0] + first, *box.offsets[1:]))
            parts.append(part)
            places.append(ChunkStorageMetadata(offsets, part.shape))
    return parts, places


def layout(value: Tensor) -> str:
    """How a tensor is distributed, in words: `replicated`, or the placement along each mesh axis."""
    if not isinstance(value, DTensor):
        return "replicated"
    mesh = value.device_mesh
    names = mesh.mesh_dim_names or [f"axis{i}" for i in range(mesh.ndim)]
    parts = [f"{name}={mesh.size(i)}:{value.placements[i]}" for i, name in enumerate(names)]
    return " ".join(parts)


def dtype_name(dtype: torch.dtype) -> str:
    """For example `float32`: the name in manifests and in messages between ranks."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype with this name; GemctlError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise GemctlError(f"{name!r} is not a torch dtype")
    return dtype
