"""Converts Arrow arrays to NumPy without changing a value, whatever their width, sign, encoding or unit.

    bits, present, exact = integers(flat(table.column("user")))
    offsets, values = lists(table.column("seen_item"))

Values that NumPy or Arrow would wrap, truncate or reject are flagged here, so that the caller can report them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as pt

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY = 86_400


def flat(column: Any) -> Any:
    """A chunked array as one array; dictionaries are decoded, and strings become large_string (for 2 GiB and more)."""
    if pt.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pt.is_string(column.type) or pt.is_string_view(column.type):
        column = column.cast(pa.large_string())
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def lists(column: Any) -> tuple[np.ndarray, Any]:
    """Offsets int64 [B+1] and flat values of a chunked column of any list type; a null list is empty."""
    if pt.is_null(column.type):
        return np.zeros(len(column) + 1, np.int64), pa.nulls(0)
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    values = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), flat(values)


class Integers(NamedTuple):
    """`bits` int64 [N]: the values modulo 2⁶⁴, 0 where missing. `present` bool [N]: not null. `exact` bool [N]: present
    and equal to `bits`, as values within int64's range are (uint64 and long decimals may exceed it)."""

    bits: np.ndarray
    present: np.ndarray
    exact: np.ndarray


def integers(values: Any) -> Integers:
    """From an array of integers of any width and sign, decimals without a fraction, or only nulls."""
    present = values.is_valid().to_numpy(zero_copy_only=False)
    bits = values.cast(pa.int64(), safe=False).fill_null(0).to_numpy(zero_copy_only=False)
    exact = present
    if pt.is_uint64(values.type) or pt.is_decimal(values.type):
        exact = present & (np.abs(floats(values) - bits) < 2.0**63)  # a wrapped value is off by at least 2⁶⁴
    return Integers(bits, present, exact)


def floats(values: Any) -> np.ndarray:
    """float64 [N] from an array of numbers or booleans, rounded to the nearest; null → NaN."""
    if pt.is_decimal(values.type):
        values = values.cast(pa.string())  # Arrow's own conversion is off by an ulp, which would change a time
    return values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


@dataclass(frozen=True)
class Times:
    """Points in time [N]. Timestamps and dates of any unit and year: `whole` int64 seconds, plus `nanos` int64, 0 …
    10⁹−1. Other numbers are kept as int64 or float64, with `nanos` None.

    `known` bool [N]: not null, finite, and within int64's range if an integer.
    """

    whole: np.ndarray
    nanos: np.ndarray | None
    known: np.ndarray

    def take(self, index: "np.ndarray | slice") -> "Times":
        """The times at `index`."""
        nanos = None if self.nanos is None else self.nanos[index]
        return Times(self.whole[index], nanos, self.known[index])

    def before(self, other: "Times") -> np.ndarray:
        """bool [N]: whether each time is earlier than that of `other`."""
        earlier = self.whole < other.whole
        if self.nanos is not None and other.nanos is not None:
            earlier |= (self.whole == other.whole) & (self.nanos < other.nanos)
        return earlier

    def since(self, other: "Times") -> np.ndarray:
        """float64 [N]: the time since `other`, in seconds or the numbers' own unit; ≥ 0 if not earlier."""
        if self.whole.dtype == other.whole.dtype == np.int64:
            # the difference of two int64s may need 64 unsigned bits
            units = (self.whole.view(np.uint64) - other.whole.view(np.uint64)).astype(np.float64)
        else:
            units = self.whole - other.whole.astype(np.float64)
        if self.nanos is not None and other.nanos is not None:
            units += (self.nanos - other.nanos) * 1e-9
        return units


def times(values: Any) -> Times:
    """From an array of timestamps, dates, integers, floats, or only nulls."""
    kind = values.type
    if pt.is_floating(kind) or (pt.is_decimal(kind) and kind.scale > 0):
        numbers = floats(values)
        known = np.isfinite(numbers)
        return Times(np.where(known, numbers, 0), None, known)
    if pt.is_date32(kind):
        days, known, _ = integers(values.cast(pa.int32()))
        return Times(days * _DAY, np.zeros_like(days), known)
    if pt.is_timestamp(kind) or pt.is_date64(kind):
        per_second = _PER_SECOND[kind.unit if pt.is_timestamp(kind) else "ms"]
        ticks, known, _ = integers(values.cast(pa.int64()))
        seconds = ticks // per_second
        return Times(seconds, (ticks - seconds * per_second) * (10**9 // per_second), known)
    bits, _, known = integers(values)
    return Times(bits, None, known)
