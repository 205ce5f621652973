"""The full (unsharded) state of a world, for comparisons in tests."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gemctl.parallel.tables import local_slices


def gather_full(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors by name, on every rank. Collective; keys may differ between ranks (table-wise optimizer state)."""
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, sorted(state))
    return {name: _full(state.get(name)) for name in sorted({name for some in names for name in some})}


def _full(value: Tensor | None) -> Tensor:
    parts: list[list[tuple[int, Tensor]]] = [[] for _ in range(dist.get_world_size())]
    if isinstance(value, DTensor) and hasattr(value.to_local(), "local_shards"):
        own = [(part.first_row, part.tensor.clone()) for part in local_slices(value)]
        dist.all_gather_object(parts, own)
        return torch.cat([tensor for _, tensor in sorted((p for some in parts for p in some), key=lambda p: p[0])])
    if isinstance(value, DTensor):
        dist.all_gather_object(parts, [])
        return value.full_tensor()
    dist.all_gather_object(parts, [] if value is None else [(0, value)])
    return next(tensor for some in parts for _, tensor in some)
