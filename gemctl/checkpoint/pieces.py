"""A state as boxes: which part of each full tensor this rank holds, and where it lies in it.

A state maps keys to plain tensors (the same on every rank that has the key), FSDP2 DTensors, or TorchRec's tables
(DTensors over LocalShardsWrapper). Ranks may hold different keys: a table-wise table's optimizer state exists on its
owner alone. Everything else here (save, hash, compare) works on pieces, so only this file knows these kinds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Piece:
    """`tensor` is the box at `offsets` of a full tensor of shape `full`. It shares memory with the state."""

    tensor: Tensor
    offsets: tuple[int, ...]
    full: torch.Size


@torch.no_grad()
def local_pieces(value: Tensor) -> list[Piece]:
    """This rank's boxes of one tensor; none where its mesh or its table leaves this rank out."""
    if not isinstance(value, DTensor):
        return [Piece(value.detach(), (0,) * value.dim(), value.size())]
    if value.device_mesh.get_coordinate() is None:
        return []
    local = value.to_local()
    shards = local.local_shards() if hasattr(local, "local_shards") else [local]
    # DCP's protocol for sharded tensors. A table's rank without rows has a box of no size and no shard.
    boxes = value.__create_chunk_list__()
    return [Piece(shard.detach(), tuple(box.offsets), value.size()) for shard, box in zip(shards, boxes, strict=False)]


def state_pieces(state: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """`local_pieces` of each key."""
    return {key: local_pieces(value) for key, value in state.items()}


def layout(value: Tensor) -> str:
    """How a tensor lies over the ranks, for people: `replicated`, or the placement along each mesh axis."""
    if not isinstance(value, DTensor):
        return "replicated"
    mesh = value.device_mesh
    names = mesh.mesh_dim_names or [f"axis{i}" for i in range(mesh.ndim)]
    parts = [f"{name}={mesh.size(i)}:{value.placements[i]}" for i, name in enumerate(names)]
    return " ".join(parts)
