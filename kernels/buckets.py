"""Groups of sequences of exactly equal lengths: jagged work as dense batches without a padded element.

Sequences are sorted by (queries, keys); those of one pair of lengths form a group, whose tokens lie together after
one gather, so that a group is a dense batch [count, length, …]. On CPU a dense call costs some 10 µs, so many small
groups are cheaper than padding is. A plan depends on the offsets alone and is kept for the other ops and the
backward of the same step (by content: nobody has to promise that a tensor was not changed).

    python -c "
    import torch; from gemctl.kernels.buckets import plan
    print(plan(torch.tensor([0, 2, 5, 7]), torch.tensor([0, 2, 5, 7])).groups)"
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """`count` sequences of `len_q` queries and `len_k` keys each; either may be 0."""

    count: int
    len_q: int
    len_k: int


@dataclass
class Side:
    """The sorted order of one side's tokens (queries or keys): every token once, group after group.

    Rows are tokens, or, `by_head`, (sequence, head, token) in that order, so that a group is a batch of matrices.
    """

    starts: Ints  # first token of each sorted sequence in the jagged tensor
    lengths: Ints
    shapes: list[tuple[int, int]]  # (count, length) of each group
    _indices: dict[int, tuple[Tensor, Tensor] | None] = field(default_factory=dict)

    def sort(self, jagged: Tensor, by_head: bool = False) -> Tensor:
        """Rows of jagged [N, H, …] in sorted order: [N, H, …], or [N·H, …] `by_head`. No copy where it is sorted."""
        rows = jagged.flatten(0, 1) if by_head else jagged
        index = self._index(jagged.shape[1] if by_head else 1)
        return rows if index is None else rows.index_select(0, index[0])

    def unsort(self, rows: Tensor, heads: int = 1) -> Tensor:
        """The inverse of `sort`, still as [N·heads, …]; `heads` > 1 for rows sorted by head."""
        index = self._index(heads)
        return rows if index is None else rows.index_select(0, index[1])

    def split(self, rows: Tensor, heads: int = 1) -> list[Tensor]:
        """Sorted rows as one view a group: [count·heads, length, …]; `heads` > 1 for rows sorted by head."""
        parts = rows.split([count * length * heads for count, length in self.shapes])
        rest = rows.shape[1:]
        return [
            part.view(count * heads, length, *rest) for part, (count, length) in zip(parts, self.shapes, strict=True)
        ]

    def _index(self, heads: int) -> tuple[Tensor, Tensor] | None:
        if heads not in self._indices:
            self._indices[heads] = _row_index(self.starts, self.lengths, heads)
        return self._indices[heads]


@dataclass(frozen=True)
class Plan:
    """The groups in sorted order, and the order of both sides' tokens."""

    groups: tuple[Group, ...]
    q: Side
    k: Side


def plan(q_offsets: Tensor, k_offsets: Tensor) -> Plan:
    """The groups of a batch with these int64 offsets [B+1] on CPU."""
    return _plan(q_offsets.numpy().tobytes(), k_offsets.numpy().tobytes())


@lru_cache(maxsize=16)
def _plan(q_bytes: bytes, k_bytes: bytes) -> Plan:
    q_offsets, k_offsets = np.frombuffer(q_bytes, np.int64), np.frombuffer(k_bytes, np.int64)
    len_q, len_k = np.diff(q_offsets), np.diff(k_offsets)
    order = np.lexsort((len_k, len_q))
    len_q, len_k = len_q[order], len_k[order]
    pairs = np.stack((len_q, len_k))
    first = np.flatnonzero(np.diff(pairs, axis=1, prepend=-1).any(axis=0))
    counts = np.diff(first, append=len(order)).tolist()
    groups = tuple(Group(n, *pairs[:, i].tolist()) for n, i in zip(counts, first, strict=True))
    return Plan(
        groups,
        Side(q_offsets[:-1][order], len_q, [(group.count, group.len_q) for group in groups]),
        Side(k_offsets[:-1][order], len_k, [(group.count, group.len_k) for group in groups]),
    )


def _row_index(starts: Ints, lengths: Ints, heads: int) -> tuple[Tensor, Tensor] | None:
    """(index, inverse) of the rows in sorted order; None where that is the order already."""
    sizes = np.repeat(lengths, heads)  # one run of rows per (sequence, head)
    base = np.repeat(starts, heads) * heads + np.tile(np.arange(heads), len(lengths))
    total = int(sizes.sum())
    step = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    index = np.repeat(base, sizes) + step * heads
    if np.array_equal(index, np.arange(total)):
        return None
    inverse = np.empty_like(index)
    inverse[index] = np.arange(total)
    return torch.from_numpy(index), torch.from_numpy(inverse)
