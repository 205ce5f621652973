"""Groups of sequences of (nearly) equal lengths: jagged work as dense batches.

Sequences of equal (queries, keys) form a group, whose tokens one gather makes a dense batch [batch, length, …] small
enough for the cache. A small group joins the next longer one only where the padding costs less than the dense call
that it saves: each joining adds at most `JOIN_SCORES` padded scores (pairs × heads). So large batches hardly pad, and
small ones do not fall apart into a call for each sequence.

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

    `padding` float32 [batch, 1, 1, len_k] is −inf where a sequence has no such key, else 0; None where all have all.
    """

    batch: int
    len_q: int
    len_k: int
    padding: Tensor | None


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

    def gather(self, rows: Tensor, zero_pads: bool = False) -> Tensor:
        """The group's rows of [N, …]: [places, …]."""
        gathered = rows.index_select(0, self.source)
        return gathered.index_fill_(0, self.pads, 0) if zero_pads and self.pads is not None else gathered

    def scatter(self, rows: Tensor, values: Tensor) -> None:
        """Writes [places, …] to the group's rows of [N, …], the padded ones nowhere."""
        rows.index_copy_(0, self.target, values if self.real is None else values.index_select(0, self.real))


@dataclass
class Side:
    """The queries or the keys of all groups."""

    starts: list[Ints]  # by group: its sequences' first tokens
    lengths: list[Ints]
    longest: int
    _parts: dict[int, list[Part]] = field(default_factory=dict)

    def parts(self, heads: int = 1) -> list[Part]:
        """Each group's rows among tokens [N, …] or, with `heads` > 1, among [N·heads, …] by head."""
        if heads not in self._parts:
            self._parts[heads] = [_part(*group, heads) for group in zip(self.starts, self.lengths, strict=True)]
        return self._parts[heads]


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
    exact = [Group(batch, len_q, len_k, None) for batch, (len_q, len_k) in zip(counts, pairs, strict=True)]
    groups = _joined(exact, join_pairs, positional)
    cuts = np.cumsum([group.batch for group in groups], dtype=np.int64)
    lengths_q, lengths_k = (np.split(side, cuts)[:-1] for side in lengths)
    starts_q, starts_k = (np.split(side[:-1][order], cuts)[:-1] for side in (q_offsets, k_offsets))
    padding = [_padding(keys, group.len_k) for keys, group in zip(lengths_k, groups, strict=True)]
    return Plan(
        [group._replace(padding=mask) for group, mask in zip(groups, padding, strict=True)],
        Side(starts_q, lengths_q, int(all_q.max(initial=0))),
        Side(starts_k, lengths_k, int(all_k.max(initial=0))),
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
    missing = np.arange(longest) >= lengths[:, None, None, None]
    return torch.from_numpy(np.where(missing, np.float32(-np.inf), np.float32(0)))


def _part(starts: Ints, lengths: Ints, heads: int) -> Part:
    step = np.arange(lengths.max())
    pad = np.broadcast_to((step >= lengths[:, None])[:, None], (len(starts), heads, len(step))).reshape(-1)
    token = starts[:, None] + np.where(step < lengths[:, None], step, 0)
    index = (token[:, None] * heads + np.arange(heads)[:, None]).reshape(-1)
    source = torch.from_numpy(index)
    if not pad.any():
        return Part(len(starts) * heads, len(step), source, source, None, None)
    places = index[~pad], np.flatnonzero(~pad), np.flatnonzero(pad)
    return Part(len(starts) * heads, len(step), source, *(torch.from_numpy(x) for x in places))
