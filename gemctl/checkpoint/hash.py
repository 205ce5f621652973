"""The full, unsharded state: its hash and its values on rank 0, whatever the world and the sharding.

    full_state_hash(state)    # the same text on every rank

Tensors are gathered one at a time, so rank 0 needs room for the largest one more (`gather_full`: for all).
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemctl.checkpoint.pieces import Piece, dtype_name, dtype_of, state_pieces
from gemctl.parallel.exchange import all_gather_json, broadcast_json


@dataclass(frozen=True)
class _Box:
    """A piece without its values, as other ranks know it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    full: tuple[int, ...]

    def row(self) -> list[Any]:
        """It as JSON has it."""
        return [self.offsets, self.shape, dtype_name(self.dtype), self.full]

    @classmethod
    def of(cls, row: list[Any]) -> "_Box":
        offsets, shape, dtype, full = row
        return cls(tuple(offsets), tuple(shape), dtype_of(dtype), tuple(full))


def full_state_hash(state: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> str:
    """SHA-256 over the keys in order, each with dtype, shape and bytes of its full tensor. Collective; CPU group."""
    digest = hashlib.sha256()
    for key, full in _full_tensors(state, group):
        digest.update(f"{key} {full.dtype} {list(full.shape)}\n".encode())
        digest.update(_bytes(full).numpy().data)
    agreed: str = broadcast_json(digest.hexdigest(), group)
    return agreed


def gather_full(state: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Every full tensor, on rank 0 (empty elsewhere). Collective; CPU group."""
    return dict(_full_tensors(state, group))


def owned_pieces(state: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, list[Piece]]:
    """This rank's pieces of each tensor that no lower rank holds too: over all ranks, every box once. Collective."""
    mine, boxes = _all_boxes(state, group)
    rank = dist.get_rank(group)
    found = {}
    for key, pieces in mine.items():
        owners = _owners([part.get(key, []) for part in boxes])
        found[key] = [piece for piece in pieces if owners[_box(piece)] == rank]
    return found


def _all_boxes(
    state: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> tuple[dict[str, list[Piece]], list[dict[str, list[_Box]]]]:
    """This rank's pieces, and every rank's boxes, by key."""
    mine = state_pieces(state)
    found = all_gather_json({key: [_box(piece).row() for piece in pieces] for key, pieces in mine.items()}, group)
    return mine, [{key: [_Box.of(row) for row in rows] for key, rows in part.items()} for part in found]


def _full_tensors(state: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> Iterator[tuple[str, Tensor]]:
    """Key and full tensor on the host, in the keys' order, on rank 0; on other ranks it sends and yields nothing."""
    rank = dist.get_rank(group)
    mine, boxes = _all_boxes(state, group)
    for key in sorted({key for part in boxes for key in part}):
        owners = _owners([part.get(key, []) for part in boxes])
        if rank == 0:
            yield key, _receive(owners, mine.get(key, []), group)
        else:
            _send([box for box, owner in owners.items() if owner == rank], mine.get(key, []), group)


def _box(piece: Piece) -> _Box:
    return _Box(piece.offsets, tuple(piece.tensor.shape), piece.tensor.dtype, tuple(piece.full))


def _owners(boxes: list[list[_Box]]) -> dict[_Box, int]:
    """Box → the lowest rank that holds it, of one tensor."""
    owners: dict[_Box, int] = {}
    for rank, part in enumerate(boxes):
        for box in part:
            owners.setdefault(box, rank)
    return owners


def _receive(owners: dict[_Box, int], mine: list[Piece], group: dist.ProcessGroup | None) -> Tensor:
    first = next(iter(owners))
    full = torch.empty(first.full, dtype=first.dtype)
    for box, owner in owners.items():
        if owner == 0:
            values = next(piece.tensor for piece in mine if _box(piece) == box).cpu()
        else:
            values = torch.empty(box.shape, dtype=box.dtype)
            if values.numel():
                dist.recv(_bytes(values), src=_global_rank(group, owner), group=group)
        full[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.shape, strict=True))] = values
    return full


def _send(boxes: list[_Box], mine: list[Piece], group: dist.ProcessGroup | None) -> None:
    for box in boxes:
        values = next(piece.tensor for piece in mine if _box(piece) == box)
        if values.numel():
            dist.send(_bytes(values.cpu().contiguous()), dst=_global_rank(group, 0), group=group)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 [bytes]; gloo sends this for every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
