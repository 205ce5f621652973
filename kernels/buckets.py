"""Groups of sequences of (nearly) equal lengths: jagged work as dense batches.

Sequences of equal (queries, keys) form a group, whose tokens one gather makes a dense batch [batch, length, …] small
enough for the cache. A small group joins the next longer one only where the padding costs less than the dense call
that it saves: each joining adds at most `JOIN_SCORES` padded scores (pairs × heads). So large batches hardly pad, and
small ones do not fall apart into a call for each sequence.

A plan depends on the offsets alone and is kept for the other ops and the backward of the same step (by content:
nobody has to promise that a tensor was not changed).

    python -c "import torch, gemctl.kernels.buckets as b; x = torch.tensor([0, 2, 5, 7]); print(b.plan(x, x, 9, False))"
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gemctl.kernels.visibility import CALL_SCORES

Ints = NDArray[np.int64]

GROUP_TOKENS = 4096  # of queries or keys, so that a group's tensors stay in the cache
JOIN_SCORES = CALL_SCORES // 6  # padding at a sixth of what the saved call costs, so that it stays rare


class Group(NamedTuple):
    """`batch` sequences of at most `len_q` queries and `len_k` keys; either may be 0, then for all of them.

    `shortest_k`: the fewest keys of one. `padding`: None where all have len_k keys, else float32 [batch, 1, 1, len_k]
    to add to the scores, −inf where a sequence has no such key.
    """

    batch: int
    len_q: int
    len_k: int
    shortest_k: int
    padding: Tensor | None = None


class Part(NamedTuple):
    """One group's rows of a jagged tensor, [batch, length] or, by head, [batch, heads, length] in row-major order.

    `source` is each place's row; a padded place has the first row of its sequence. `real` and `pads` are the places
    that are not and that are padded, None where none is; `target` is the rows of the real ones.
    """

    batch: int  # by head: sequences · heads
    length: int
    source: Tensor
    target: Tensor
    real: Tensor | None
    pads: Tensor | None

    def gather(self, rows: Tensor, fill: float | None = None) -> Tensor:
        """The group's rows of [N, …]: [places, …], with `fill` in the padded ones unless it is None."""
        gathered = rows.index_select(0, self.source)
        return gathered if fill is None or self.pads is None else gathered.index_fill_(0, self.pads, fill)

    def scatter(self, rows: Tensor, values: Tensor) -> None:
        """Writes [places, …] to the group's rows of [N, …], the padded ones nowhere."""
        rows.index_copy_(0, self.target, values if self.real is None else values.index_select(0, self.real))


@dataclass
class Side:
    """The queries or the keys of all groups."""

    starts: Ints  # of the sequences in the groups' order: their first tokens
    lengths: Ints
    shapes: list[tuple[int, int]]  # (batch, padded length) of each group
    _parts: dict[int, list[Part]] = field(default_factory=dict)

    def parts(self, heads: int = 1) -> list[Part]:
        """Each group's rows among tokens [N, …] or, with `heads` > 1, among [N·heads, …] by head."""
        if heads not in self._parts:
            self._parts[heads] = _parts(self, heads)
        return self._parts[heads]

    def longest(self) -> int:
        """Tokens of the longest sequence, 0 without one."""
        return max((length for _, length in self.shapes), default=0)


@dataclass(frozen=True)
class Plan:
    """The groups, shorter ones first, and their rows on both sides."""

    groups: list[Group]
    q: Side
    k: Side


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
    all_q, all_k = np.diff(q_offsets), np.diff(k_offsets)
    order = np.lexsort((all_k, all_q, all_k - all_q) if positional else (all_k, all_q))
    lengths = np.stack((all_q[order], all_k[order]))
    first = np.flatnonzero(np.diff(lengths, axis=1, prepend=-1).any(axis=0))
    counts, pairs = np.diff(first, append=len(order)).tolist(), lengths[:, first].T.tolist()
    exact = [part for batch, pair in zip(counts, pairs, strict=True) for part in _split(batch, *pair)]
    groups = _joined(exact, join_pairs, positional)
    stops = np.cumsum([group.batch for group in groups], dtype=np.int64).tolist()
    for i, (group, stop) in enumerate(zip(groups, stops, strict=True)):
        if group.shortest_k < group.len_k:
            groups[i] = group._replace(padding=_padding(lengths[1, stop - group.batch : stop], group.len_k))
    q = Side(q_offsets[:-1][order], lengths[0], [(group.batch, group.len_q) for group in groups])
    if q_bytes == k_bytes:
        return Plan(groups, q, q)
    return Plan(groups, q, Side(k_offsets[:-1][order], lengths[1], [(group.batch, group.len_k) for group in groups]))


def _split(batch: int, len_q: int, len_k: int) -> list[Group]:
    """Groups of at most `GROUP_TOKENS` tokens for `batch` sequences of equal lengths."""
    step = max(1, GROUP_TOKENS // max(1, len_q, len_k))
    return [Group(min(step, batch - first), len_q, len_k, len_k) for first in range(0, batch, step)]


def _joined(exact: list[Group], join_pairs: int, positional: bool) -> list[Group]:
    """Neighbours joined where that adds at most `join_pairs` padded pairs; never empty with non-empty ones."""
    joined: list[Group] = []
    for group in exact:
        last = joined[-1] if joined else group
        batch, len_q, len_k = last.batch + group.batch, max(last.len_q, group.len_q), max(last.len_k, group.len_k)
        added = batch * len_q * len_k - sum(part.batch * part.len_q * part.len_k for part in (last, group))
        alike = bool(last.len_q) == bool(group.len_q) and bool(last.len_k) == bool(group.len_k)
        aligned = not positional or last.len_k - last.len_q == group.len_k - group.len_q
        small = batch * max(len_q, len_k) <= GROUP_TOKENS
        if joined and alike and aligned and small and added <= join_pairs:
            joined[-1] = Group(batch, len_q, len_k, min(last.shortest_k, group.shortest_k))
        else:
            joined.append(group)
    return joined


def _padding(lengths: Ints, longest: int) -> Tensor:
    missing = np.arange(longest) >= lengths[:, None, None, None]
    return torch.from_numpy(np.where(missing, np.float32(-np.inf), np.float32(0)))


def _parts(side: Side, heads: int) -> list[Part]:
    batches, longest = np.array(side.shapes, np.int64).reshape(-1, 2).T
    runs = np.repeat(np.repeat(longest, batches), heads)  # places of each (sequence, head)
    step = np.arange(runs.sum()) - np.repeat(np.cumsum(runs) - runs, runs)
    pad = step >= np.repeat(np.repeat(side.lengths, heads), runs)
    first = np.repeat(side.starts, heads) * heads + np.tile(np.arange(heads), len(side.starts))
    source = np.repeat(first, runs) + np.where(pad, 0, step) * heads
    places = batches * longest * heads
    place = np.arange(len(source)) - np.repeat(np.cumsum(places) - places, places)
    tokens = np.diff(np.concatenate(([0], np.cumsum(side.lengths)))[np.cumsum(batches)], prepend=0) * heads
    columns = (
        _pieces(source, places),
        _pieces(source[~pad], tokens),
        _pieces(place[~pad], tokens),
        _pieces(place[pad], places - tokens),
    )
    return [
        Part(batch * heads, length, *(row if len(row[3]) else (row[0], row[0], None, None)))
        for (batch, length), *row in zip(side.shapes, *columns, strict=True)
    ]


def _pieces(values: Ints, sizes: Ints) -> tuple[Tensor, ...]:
    return torch.from_numpy(values).split(sizes.tolist())
