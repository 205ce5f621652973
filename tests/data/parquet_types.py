"""Arrow types by what a column of them says, and random values for a column of any type."""

import math
import random
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa

INTEGERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.decimal32(9, 0), pa.decimal64(18, 0), pa.decimal128(20, 0), pa.decimal128(38, 0), pa.decimal256(60, 0)),
    pa.dictionary(pa.int32(), pa.int64()),
]
FLOATS = [
    *(pa.float16(), pa.float32(), pa.float64()),
    *(pa.decimal32(9, 2), pa.decimal64(18, 3), pa.decimal128(25, 5), pa.decimal256(50, 10)),
]
STRINGS = [
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string())),
]
BOOLEANS = [pa.bool_()]
UNITS = ["s", "ms", "us", "ns"]
LOCAL_TIMES = [pa.timestamp(unit) for unit in UNITS]
INSTANTS = [pa.timestamp(unit, zone) for unit in UNITS for zone in ("UTC", "Europe/Paris", "+05:30")]
DATES = [pa.date32(), pa.date64()]
NO_ROLE = [
    *(pa.binary(), pa.binary(4), pa.time32("ms"), pa.time64("us"), pa.duration("s")),
    *(pa.struct([("a", pa.int64())]), pa.list_(pa.list_(pa.int64())), pa.map_(pa.string(), pa.int64())),
]
NUMBERS = INTEGERS + FLOATS + BOOLEANS
FAMILIES = [INTEGERS, FLOATS, BOOLEANS, STRINGS, LOCAL_TIMES, INSTANTS, DATES]
EVERYTHING = [kind for family in FAMILIES for kind in family] + [pa.null()]
CLOCKS = [INTEGERS + FLOATS, LOCAL_TIMES, INSTANTS, DATES]
LISTS: list[Callable[[Any], pa.DataType]] = [pa.list_, pa.list_, pa.large_list, pa.list_view, pa.large_list_view]
WORDS = ["", "a", "7", "-1", "wörd", "user_12345", "x" * 8, "y" * 9, "日本語", "null", "0" * 40]
WIDE = Context(prec=80)


class Clock:
    """Times of rows and events before them, in steps that the types of all columns concerned can hold.

    Nanoseconds of timestamps, days of dates, else numbers.
    """

    def __init__(self, rng: random.Random, kinds: list[pa.DataType]) -> None:
        self._random, numbers = rng, [kind for kind in kinds if _is_number(kind)]
        self._halves = any(kind in FLOATS for kind in numbers)
        if numbers:
            self._high = min([2**53 if self._halves else 2**63 - 1, *map(_largest, numbers)])
            self._low = 0 if any("uint" in str(kind) for kind in numbers) else -self._high
        elif any(pa.types.is_date(kind) for kind in kinds):
            self._low, self._high = -700_000, 2_900_000
        else:
            nanos = any("[ns" in str(kind) for kind in kinds)
            self._low, self._high = (-9 * 10**18, 9 * 10**18) if nanos else (-62 * 10**18, 253 * 10**18)
        self._step = _step(kinds[0])

    def row(self) -> int:
        """As the type of the rows' column can hold it, and later than the earliest time."""
        time = self._random.choice([self._high, self._random.randint(self._low + 1, self._high)])
        return max(time // self._step * self._step, self._low + self._step)

    def event(self, row: int) -> float:
        """Earlier than `row`."""
        ago = self._random.choice([1, 1000, self._random.randint(1, 10**6), row - self._low])
        time = max(row - ago, self._low)
        return time + 0.5 if self._halves and abs(time) < 1000 and time + 0.5 < row else time

    def as_type(self, time: float, kind: pa.DataType) -> Any:
        """The time in a column's own unit, rounded down."""
        if pa.types.is_date(kind):
            day = int(time) % 1_000_000  # of a clock in other units, where files disagree
            return (int(time) if abs(time) < 10**7 else day) * (86_400_000 if pa.types.is_date64(kind) else 1)
        if pa.types.is_timestamp(kind):
            return int(time) // _step(kind) if abs(time) < 2**63 * _step(kind) else 0
        if pa.types.is_integer(kind):
            time = math.floor(time)
        return fitted(kind, time, self._random)


def _step(kind: pa.DataType) -> int:
    """Nanoseconds of a timestamp's unit, 1 of others."""
    return {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[kind.unit] if pa.types.is_timestamp(kind) else 1


def _is_number(kind: pa.DataType) -> bool:
    return kind in INTEGERS or kind in FLOATS


def _largest(kind: pa.DataType) -> int:
    """The largest number up to which a type holds all integers."""
    if pa.types.is_decimal(kind):
        return int(10 ** (kind.precision - kind.scale)) - 1
    if pa.types.is_floating(kind):
        return {"halffloat": 2000, "float": 2**24, "double": 2**53}[str(kind)]
    value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
    return int(np.iinfo(value_type.to_pandas_dtype()).max)


def fitted(kind: pa.DataType, value: Any, rng: random.Random) -> Any:
    """A Python value that `pa.array` takes for `kind`, `value` where the type can hold it; what else, where not."""
    types = pa.types
    if types.is_null(kind):
        return None
    if types.is_dictionary(kind):
        return fitted(kind.value_type, value, rng)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return WORDS[rng.randrange(len(WORDS))]
    if types.is_boolean(kind):
        return bool(value) and not math.isnan(value)
    if types.is_floating(kind):
        with np.errstate(over="ignore"):
            number = float(kind.to_pandas_dtype()(value))
        return number if math.isfinite(number) or not math.isfinite(value) else 1.0
    if types.is_decimal(kind):
        if not math.isfinite(value) or abs(value) >= 10 ** (kind.precision - kind.scale):
            return Decimal(1)
        step = Decimal(1).scaleb(-kind.scale)
        return Decimal(value).quantize(step, context=WIDE) if kind.scale else Decimal(int(value))
    if types.is_integer(kind):
        bounds = np.iinfo(kind.to_pandas_dtype())
        number = int(value) if math.isfinite(value) else 1
        return number if bounds.min <= number <= bounds.max else rng.choice([0, 1, int(bounds.min), int(bounds.max)])
    if types.is_timestamp(kind) or types.is_date(kind):
        return 86_400_000 if kind == pa.date64() else 1
    samples: dict[str, Any] = {"binary": b"abcd", "fixed_": b"abcd", "struct": {"a": 1}, "list<i": [[1]], "map<st": []}
    return samples.get(str(kind)[:6], 1)
