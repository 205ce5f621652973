"""The endless order of a data set's rows, and each rank's slice of a global batch.

    RowOrder([20000, 20000, 137], seed=0, window=2).rows(0, 8)      # the first 8 row numbers

The order is a pure function of the seed and the sizes of the row groups. Global batch s is rows(s·G, (s+1)·G), so any
world size can continue at any step. Every epoch is shuffled with a seed of its own, and the end of one epoch and the
start of the next may share a batch, so no row is lost.

Reading a random row requires decoding its whole row group. `shuffled` therefore permutes the row groups, and then the
rows inside *windows* of a few row groups, so that a batch touches at most two windows. That requires windows
that are not small: one is filled until it holds as many rows as `window` average row groups, and what is left at the
end joins the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gemctl.data.hashing import permutation


def local_counts(global_batch: int, world: int) -> list[int]:
    """Rows per rank, equal ±1; rank r owns the slice of the batch that starts at sum(counts[:r])."""
    return [global_batch // world + (rank < global_batch % world) for rank in range(world)]


def local_slice(global_batch: int, rank: int, world: int) -> tuple[int, int]:
    """Start and stop of the rank's slice of a global batch."""
    start = rank * (global_batch // world) + min(rank, global_batch % world)
    return start, start + local_counts(global_batch, world)[rank]


@dataclass(frozen=True)
class _Epoch:
    groups: np.ndarray  # row groups in shuffled order
    window_groups: np.ndarray  # window w holds groups[window_groups[w]:window_groups[w+1]]
    window_rows: np.ndarray  # and starts at row window_rows[w] of the epoch


class RowOrder:
    """`group_rows`: rows of each row group; `window`: row groups that are shuffled together, None for file order."""

    def __init__(self, group_rows: Sequence[int], seed: int, window: int | None) -> None:
        self.group_rows = np.asarray(group_rows, np.int64)
        self.group_starts = np.concatenate([[0], np.cumsum(self.group_rows)])
        self.epoch_rows = int(self.group_starts[-1])
        self.seed, self.window = seed, window
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._window = lru_cache(maxsize=2)(self._make_window)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """int64 [stop−start]: row numbers at positions start … stop−1 of the endless order."""
        pieces = []
        while start < stop:
            epoch, offset = divmod(start, self.epoch_rows)
            count = min(stop - start, self.epoch_rows - offset)
            pieces += self._epoch_rows(epoch, offset, offset + count)
            start += count
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def windows(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The (epoch, window) pairs that positions start … stop−1 touch, in order; only for a shuffled order."""
        touched = []
        while start < stop:
            epoch, offset = divmod(start, self.epoch_rows)
            edges = self._epoch(epoch).window_rows
            window = int(np.searchsorted(edges, offset, side="right")) - 1
            touched.append((epoch, window))
            start += int(edges[window + 1]) - offset
        return touched

    def groups_of_window(self, position: int) -> int:
        """Number of row groups in the window at `position`: how many the reader should keep decoded."""
        if self.window is None:
            return 1
        epoch, window = self.windows(position, position + 1)[0]
        edges = self._epoch(epoch).window_groups
        return int(edges[window + 1] - edges[window])

    def _epoch_rows(self, epoch: int, start: int, stop: int) -> list[np.ndarray]:
        if self.window is None:
            return [np.arange(start, stop)]
        edges = self._epoch(epoch).window_rows
        first, last = np.searchsorted(edges, [start, stop - 1], side="right") - 1
        return [self._window(epoch, int(w))[max(start - edges[w], 0) : stop - edges[w]] for w in range(first, last + 1)]

    def _make_epoch(self, epoch: int) -> _Epoch:
        filled = np.flatnonzero(self.group_rows)
        groups = filled[permutation(filled.size, self.seed, epoch)]
        ends = np.cumsum(self.group_rows[groups])
        enough = -(-(self.window or 1) * self.epoch_rows // max(filled.size, 1))
        edges, begin = [0], 0
        while begin + enough <= self.epoch_rows:
            stop = int(np.searchsorted(ends, begin + enough, side="left")) + 1
            edges.append(stop)
            begin = int(ends[stop - 1])
        if begin < self.epoch_rows:  # the rest joins the last window
            edges = [*edges[: max(len(edges) - 1, 1)], groups.size]
        window_groups = np.array(edges)
        return _Epoch(groups, window_groups, np.concatenate([[0], ends])[window_groups])

    def _make_window(self, epoch: int, window: int) -> np.ndarray:
        plan = self._epoch(epoch)
        groups = plan.groups[plan.window_groups[window] : plan.window_groups[window + 1]]
        rows = np.concatenate([np.arange(self.group_starts[g], self.group_starts[g + 1]) for g in groups])
        return rows[permutation(rows.size, self.seed, epoch, window)]
