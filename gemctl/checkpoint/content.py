"""A checksum of a full tensor that does not depend on its sharding, to compare what 3 ranks loaded with what 4 saved.

    content_sum(piece)                     # of one box; the sums of a tensor's boxes add up to the tensor's sum
    content_sums(state, group)             # of every full tensor, the same on every rank

Element i of the full tensor, with its bits taken as the integer w, contributes w · (2i + 1), modulo 2⁶⁴. One changed
element always changes the sum (2i + 1 has an inverse), and so do two swapped 32-bit elements; a tensor of zeros has sum
0. The sum shows whether every value came back to its place; whether files are intact is checked with SHA-256.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemctl.checkpoint.pieces import Piece, dtype_name, dtype_of, state_pieces
from gemctl.parallel.exchange import all_gather_json

MODULUS = 1 << 64
BLOCK = 1 << 17  # elements at a time: 1 MB of int64, which stays in the cache
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content_sums(state: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """Content sum of each full tensor by key; replicas count once. Collective; CPU group."""
    mine = {
        key: sum(content_sum(piece) for piece in pieces) % MODULUS for key, pieces in owned_pieces(state, group).items()
    }
    return add_up(all_gather_json(mine, group))


def add_up(parts: list[dict[str, int]]) -> dict[str, int]:
    """The sums of full tensors from those of their pieces."""
    total: dict[str, int] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = (total.get(key, 0) + value) % MODULUS
    return total


def as_text(content: int) -> str:
    """16 hexadecimal digits, as in a manifest."""
    return f"{content:016x}"


@torch.no_grad()
def content_sum(piece: Piece) -> int:
    """A box's contribution to its tensor's sum, 0 ≤ … < 2⁶⁴. Its values may be on any device."""
    values = piece.tensor.detach()
    if values.numel() == 0:
        return 0
    words = values.contiguous().view(-1).view(WORDS[values.element_size()])
    firsts = _first_indices(piece, values.device)
    words = words.view(firsts.numel(), -1)
    odd = torch.arange(min(BLOCK, words.shape[1]), dtype=torch.int64, device=values.device).mul_(2).add_(1)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for block, first in _blocks(words, firsts):
        wide = block.to(torch.int64)
        total += (wide * odd[: wide.shape[1]]).sum() + 2 * (wide.sum(1) * first).sum()
    return int(total) % MODULUS


def _blocks(words: Tensor, firsts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`words` [runs, length] in blocks of at most BLOCK elements, each with the full index of every row's first."""
    rows = max(1, BLOCK // words.shape[1])
    for part, first in zip(words.split(rows), firsts.split(rows), strict=True):
        for at, block in enumerate(part.split(BLOCK, dim=1)):
            yield block, first + at * BLOCK


def _first_indices(piece: Piece, device: torch.device) -> Tensor:
    """int64 [runs]: the index in the full tensor at which each contiguous run of the box begins."""
    shape, full = piece.tensor.shape, piece.full
    dim = len(shape)
    while dim > 0 and all(shape[at] == full[at] for at in range(dim, len(shape))):
        dim -= 1  # all dims after `dim` are whole, so they form one run with it
    strides = [full[at + 1 :].numel() for at in range(len(full))]
    first = torch.zeros(1, dtype=torch.int64, device=device)
    for at in range(len(shape)):
        count = shape[at] if at < dim else 1
        steps = torch.arange(count, dtype=torch.int64, device=device) + piece.offsets[at]
        first = (first[:, None] + steps * strides[at]).flatten()
    return first


def owned_pieces(state: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, list[Piece]]:
    """This rank's pieces of each tensor that no lower rank also holds: over all ranks, every box once. Collective."""
    mine, boxes = _all_boxes(state, group)
    rank = dist.get_rank(group)
    owned = {}
    for key, pieces in mine.items():
        owners = _owners([part.get(key, []) for part in boxes])
        owned[key] = [piece for piece in pieces if owners[_box(piece)] == rank]
    return owned


@dataclass(frozen=True)
class _Box:
    """A piece without its values, as ranks send it to each other."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    full: tuple[int, ...]

    def row(self) -> list[Any]:
        """As JSON."""
        return [self.offsets, self.shape, dtype_name(self.dtype), self.full]

    @classmethod
    def of(cls, row: list[Any]) -> "_Box":
        offsets, shape, dtype, full = row
        return cls(tuple(offsets), tuple(shape), dtype_of(dtype), tuple(full))


def _all_boxes(
    state: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> tuple[dict[str, list[Piece]], list[dict[str, list[_Box]]]]:
    """This rank's pieces, and every rank's boxes, by key."""
    mine = state_pieces(state)
    every = all_gather_json({key: [_box(piece).row() for piece in pieces] for key, pieces in mine.items()}, group)
    return mine, [{key: [_Box.of(row) for row in rows] for key, rows in part.items()} for part in every]


def _box(piece: Piece) -> _Box:
    return _Box(piece.offsets, tuple(piece.tensor.shape), piece.tensor.dtype, tuple(piece.full))


def _owners(boxes: list[list[_Box]]) -> dict[_Box, int]:
    """The lowest rank that holds each box of one tensor."""
    owners: dict[_Box, int] = {}
    for rank, part in enumerate(boxes):
        for box in part:
            owners.setdefault(box, rank)
    return owners
