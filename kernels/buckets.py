"""Groups of sequences of (nearly) equal lengths: jagged work as dense batches.

Sequences are sorted by length; those of equal (queries, keys) form a group, whose tokens lie together after one
gather, so that a group is a dense batch [batch, length, …]. A small group joins its neighbour only where the padding
costs less than the dense call that it saves: each joining adds at most `JOIN_SCORES` padded scores (pairs × heads).
So large batches hardly pad, and small ones do not fall apart into a call for each sequence. Padded rows are zero.

A plan depends on the offsets alone and is kept for the other ops and the backward of the same step (by content:
nobody has to promise that a tensor was not changed).

    python -c "
    import torch; from gemctl.kernels.buckets import plan
    print(plan(torch.tensor([0, 2, 5, 7]), torch.tensor([0, 2, 5, 7]), 100, False).groups)"
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

JOIN_SCORES = 2048  # forward and backward of so many scores take some 30 µs on one core, a saved call saves 60 to 100


class Group(NamedTuple):
    """`batch` sequences of at most `len_q` queries and `len_k` keys; either may be 0, then for all of them.

    `padding` bool [batch, 1, 1, len_k] is True where a sequence has no such key; None where all have all.
    """

    batch: int
    len_q: int
    len_k: int
    padding: Tensor | None


@dataclass
class Side:
    """The sorted order of one side's tokens (queries or keys), group after group, and zero rows where a group pads.

    Rows are tokens, or, `by_head`, (sequence, head, token) in that order, so that a group is a batch of matrices.
    """

    starts: Ints  # first token of each sorted sequence in the jagged tensor
    lengths: Ints
    shapes: list[tuple[int, int]]  # (batch, padded length) of each group
    _orders: dict[int, "_Order | None"] = field(default_factory=dict)

    def sort(self, jagged: Tensor, by_head: bool = False) -> Tensor:
        """Rows of jagged [N, H, …] in sorted order: [rows, H, …], or [rows·H, …] `by_head`. May be a view."""
        rows = jagged.flatten(0, 1) if by_head else jagged
        order = self._order(jagged.shape[1] if by_head else 1)
        if order is None:
            return rows
        gathered = rows.index_select(0, order.index)
        return gathered if order.pads is None else gathered.index_fill_(0, order.pads, 0)

    def unsort(self, rows: Tensor, heads: int = 1) -> Tensor:
        """The tokens' rows back in jagged order, [N·heads, …]; `heads` > 1 for rows sorted by head."""
        order = self._order(heads)
        return rows if order is None else rows.index_select(0, order.inverse)

    def split(self, rows: Tensor, heads: int = 1) -> list[Tensor]:
        """Sorted rows as one view a group: [count·heads, length, …]; `heads` > 1 for rows sorted by head."""
        parts = rows.split([count * length * heads for count, length in self.shapes])
        rest = rows.shape[1:]
        return [
            part.view(count * heads, length, *rest) for part, (count, length) in zip(parts, self.shapes, strict=True)
        ]

    def _order(self, heads: int) -> "_Order | None":
        if heads not in self._orders:
            counts, padded = np.array(self.shapes, np.int64).reshape(-1, 2).T
            self._orders[heads] = _row_order(self.starts, self.lengths, np.repeat(padded, counts), heads)
        return self._orders[heads]


@dataclass(frozen=True)
class Plan:
    """The groups in sorted order, and the order of both sides' tokens."""

    groups: list[Group]
    q: Side
    k: Side


class _Order(NamedTuple):
    index: Tensor  # sorted row → jagged row
    inverse: Tensor  # jagged row → sorted row
    pads: Tensor | None  # sorted rows that are padding


def plan(q_offsets: Tensor, k_offsets: Tensor, join_pairs: int, positional: bool) -> Plan:
    """The groups of a batch with these int64 offsets [B+1] on CPU.

    join_pairs: how many padded pairs two groups may add by joining, usually `JOIN_SCORES // heads`. positional: what
    a query sees depends on its position (causal, window), so that all sequences of a group must have the same number
    of keys more than queries.
    """
    return _plan(q_offsets.numpy().tobytes(), k_offsets.numpy().tobytes(), join_pairs, positional)


@lru_cache(maxsize=16)
def _plan(q_bytes: bytes, k_bytes: bytes, join_pairs: int, positional: bool) -> Plan:
    q_offsets, k_offsets = np.frombuffer(q_bytes, np.int64), np.frombuffer(k_bytes, np.int64)
    len_q, len_k = np.diff(q_offsets), np.diff(k_offsets)
    order = np.lexsort((len_k, len_q, len_k - len_q) if positional else (len_k, len_q))
    lengths = np.stack((len_q[order], len_k[order]))
    first = np.flatnonzero(np.diff(lengths, axis=1, prepend=-1).any(axis=0))
    counts = np.diff(first, append=len(order))
    exact = [
        Group(n, pair[0], pair[1], None) for n, pair in zip(counts.tolist(), lengths[:, first].T.tolist(), strict=True)
    ]
    groups, stop = [], 0
    for group in _joined(exact, join_pairs, positional):
        start, stop = stop, stop + group.batch
        groups.append(group._replace(padding=_padding(lengths[1, start:stop], group.len_k)))
    return Plan(
        groups,
        Side(q_offsets[:-1][order], lengths[0], [(group.batch, group.len_q) for group in groups]),
        Side(k_offsets[:-1][order], lengths[1], [(group.batch, group.len_k) for group in groups]),
    )


def _joined(exact: list[Group], join_pairs: int, positional: bool) -> list[Group]:
    """Neighbours joined where that adds at most `join_pairs` padded pairs; never empty with non-empty ones."""
    joined: list[Group] = []
    for group in exact:
        last = joined[-1] if joined else group
        batch, len_q, len_k = last.batch + group.batch, max(last.len_q, group.len_q), max(last.len_k, group.len_k)
        added = batch * len_q * len_k - sum(part.batch * part.len_q * part.len_k for part in (last, group))
        alike = bool(last.len_q) == bool(group.len_q) and bool(last.len_k) == bool(group.len_k)
        aligned = not positional or last.len_k - last.len_q == group.len_k - group.len_q
        if joined and alike and aligned and added <= join_pairs:
            joined[-1] = Group(batch, len_q, len_k, None)
        else:
            joined.append(group)
    return joined


def _padding(lengths: Ints, longest: int) -> Tensor | None:
    if (lengths == longest).all():
        return None
    return torch.from_numpy(np.arange(longest) >= lengths[:, None])[:, None, None]


def _row_order(starts: Ints, lengths: Ints, padded: Ints, heads: int) -> _Order | None:
    """Where each sorted row comes from, and back; None where the rows are in order already."""
    sizes = np.repeat(padded, heads)  # one run of rows per (sequence, head)
    step = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    pad = step >= np.repeat(np.repeat(lengths, heads), sizes)
    base = np.repeat(starts, heads) * heads + np.tile(np.arange(heads), len(lengths))
    index = np.repeat(base, sizes) + np.where(pad, 0, step) * heads
    rows = np.flatnonzero(~pad)
    if len(rows) == len(index) and np.array_equal(index, rows):
        return None
    inverse = np.empty_like(rows)
    inverse[index[rows]] = rows
    pads = torch.from_numpy(np.flatnonzero(pad)) if pad.any() else None
    return _Order(torch.from_numpy(index), torch.from_numpy(inverse), pads)
