"""Rows in NumPy as the reader stores them: fixed-width columns, and jagged columns as values and offsets.

block.take(np.array([3, 1]))      # rows 3 and 1, in that order, without a loop per row
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class JaggedRows:
    """Aligned lists: `offsets` int64 [B+1]; row b owns [offsets[b]:offsets[b+1]] of every array in `values`."""

    offsets: np.ndarray
    values: dict[str, np.ndarray]

    def lengths(self) -> np.ndarray:
        """int64 [B]."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> "JaggedRows":
        """The rows with these positions (int64 [N]), in this order."""
        return self.cut(self.offsets[rows], self.lengths()[rows])

    def last(self, count: int) -> "JaggedRows":
        """At most the last `count` values of each row."""
        lengths = self.lengths()
        if lengths.max(initial=0) <= count:
            return self
        kept = np.minimum(lengths, count)
        return self.cut(self.offsets[1:] - kept, kept)

    def cut(self, starts: np.ndarray, lengths: np.ndarray) -> "JaggedRows":
        """One row per start and length (int64 [N]): the values [start:start+length]."""
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return JaggedRows(offsets, {name: values[index] for name, values in self.values.items()})


@dataclass
class RowBlock:
    """B rows: `fixed` arrays [B, …], and `jagged` columns or groups of aligned columns, by name."""

    fixed: dict[str, np.ndarray]
    jagged: dict[str, JaggedRows]

    def take(self, rows: np.ndarray) -> "RowBlock":
        """The rows with these positions in the block (int64 [N]), in this order."""
        return RowBlock(
            {name: values[rows] for name, values in self.fixed.items()},
            {name: jagged.take(rows) for name, jagged in self.jagged.items()},
        )


def concatenate(blocks: Sequence[RowBlock]) -> RowBlock:
    """The rows of all blocks, which have the same columns, in order."""
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    return RowBlock(
        {name: np.concatenate([block.fixed[name] for block in blocks]) for name in first.fixed},
        {name: _concatenate_jagged([block.jagged[name] for block in blocks]) for name in first.jagged},
    )


def _concatenate_jagged(parts: Sequence[JaggedRows]) -> JaggedRows:
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([part.lengths() for part in parts]))])
    return JaggedRows(offsets, {name: np.concatenate([p.values[name] for p in parts]) for name in parts[0].values})
