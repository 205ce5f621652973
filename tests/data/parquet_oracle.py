"""What a batch must hold, row by row in plain Python, as docs/reference.md says it ("What a column may be").

Nothing here looks at how gemctl reads: values come from Arrow's `to_pylist`, kinds from the names of the types. A data
set is `Files`; its oracle is the rows that must come, or the places and reasons for which it must be refused.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from gemctl.specs.data import DenseSpec, EventIdSpec, FeatureSpec, LabelSpec, SequenceSpec, TableSpec

MASK64 = 2**64 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)
NUMBERS = {"integers", "floats", "booleans"}
TIMES = {"integers", "floats", "instants", "local times", "dates"}
IDS = {"vocab": {"integers"}, "hash": {"integers", "strings"}}
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass
class File:
    """A file as it was written: `table`, its rows in groups of `group_rows`; INT96 forgets time zones."""

    path: str
    table: pa.Table
    group_rows: int
    int96: bool = False

    def groups(self) -> Iterator[pa.Table]:
        for start in range(0, self.table.num_rows, self.group_rows):
            yield self.table.slice(start, self.group_rows)


@dataclass(frozen=True)
class Use:
    """A column in a role: what kinds it takes, and whether as lists."""

    column: str
    kinds: set[str]
    many: bool = False
    agrees: str | None = None  # columns that share this must be of one kind


@dataclass
class Refusal:
    """Why files do not suit the spec: `lone` problems of a (file, column), `groups` of columns that disagree."""

    lone: set[tuple[str, str]] = field(default_factory=set)
    groups: list[dict[str, set[tuple[str, str]]]] = field(default_factory=list)  # by kind


@dataclass
class Violation:
    """A value that must be refused, in its row group: `row` is the first one like it."""

    column: str
    reason: str
    row: int
    sequence: str | None = None


def plain_mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def plain_hash(value: int | str) -> int:
    if isinstance(value, int):
        return plain_mix(value & MASK64)
    data = value.encode()
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, max(len(data), 1), 8)]
    return plain_mix((sum(plain_mix((w + plain_mix(i)) & MASK64) for i, w in enumerate(words)) + len(data)) & MASK64)


def plain_row(value: Any, rows: int, hashed: bool) -> int:
    """The table row of an id: an integer (perhaps as Decimal), a string or None."""
    if value is None:
        return rows - 1
    value = value if isinstance(value, str) else int(value)
    if hashed:
        return plain_hash(value) % (rows - 1)
    return int(value) if 0 <= value < rows - 1 else rows - 1


def plain_float(value: Any, log: bool) -> float:
    """A dense value before it is rounded to float32."""
    number = 0.0 if value is None else float(value)
    if math.isnan(number):
        return 0.0
    return math.copysign(math.log1p(abs(number)), number) if log else number


def kind_of(name: str, int96: bool = False) -> str | None:
    """The kind of a type by its name; None for what has no role."""
    if inner := re.fullmatch(r"dictionary<values=(.*), indices=\w+, ordered=\d>", name):
        return kind_of(inner[1])
    if scale := re.fullmatch(r"decimal\d+\(\d+, (-?\d+)\)", name):
        return "floats" if int(scale[1]) > 0 else "integers"
    if name.startswith("timestamp["):
        return "instants" if "tz=" in name and not int96 else "local times"
    families = {
        "null": r"null",
        "integers": r"u?int\d+",
        "floats": r"halffloat|float|double",
        "booleans": r"bool",
        "strings": r"string|large_string|string_view",
        "dates": r"date(32\[day\]|64\[ms\])",
    }
    return next((kind for kind, pattern in families.items() if re.fullmatch(pattern, name)), None)


def list_item(type_: pa.DataType) -> pa.DataType | None:
    """The type of a list's values; None where it is no list."""
    return type_.value_type if re.match(r"(large_)?list(_view)?<|fixed_size_list<", str(type_)) else None


def uses(spec: FeatureSpec, histories: bool) -> list[Use]:
    """Every column in every role."""
    tables = {table.name: table for table in spec.tables}

    def ids(column: str, table: str, many: bool) -> Use:
        hashed = tables[table].ids == "hash"
        return Use(column, IDS[tables[table].ids], many, f"table {table}" if hashed else None)

    found = [ids(f.column or f.name, f.table, f.multi) for f in spec.categorical]
    found += [Use(d.column or d.name, NUMBERS) for d in spec.dense]
    if histories and spec.sequences:
        found.append(Use(spec.timestamp or "", TIMES, agrees="clock"))
        for sequence in spec.sequences:
            found.append(Use(sequence.timestamps, TIMES, many=True, agrees="clock"))
            found += [ids(e.column or e.name, e.table, True) for e in sequence.ids]
            found += [Use(d.column or d.name, NUMBERS, many=True) for d in sequence.floats]
    found += [
        Use(column, NUMBERS) for label in spec.labels for column in (label.column or label.name, label.mask) if column
    ]
    found += [Use(spec.domain.column, {"integers"})] if spec.domain else []
    return found + [Use(column, NUMBERS) for column in (spec.weight, spec.true_probability) if column]


def refusal(spec: FeatureSpec, files: list[File], histories: bool) -> Refusal | None:
    """What is wrong with the files' columns; None where nothing is."""
    found = Refusal()
    groups: dict[str, dict[str, set[tuple[str, str]]]] = {}
    for file in files:
        names = file.table.schema.names
        needed = uses(spec, histories)
        twice = {(file.path, use.column) for use in needed if names.count(use.column) > 1}
        found.lone |= twice
        for use in needed if not twice else []:
            if use.column not in names:
                found.lone.add((file.path, use.column))
                continue
            type_ = file.table.schema.field(use.column).type
            item = list_item(type_) if use.many else type_
            kind = kind_of(str(type_ if item is None else item), file.int96)
            if kind != "null" and (item is None or kind not in use.kinds):
                found.lone.add((file.path, use.column))
            elif use.agrees and kind and kind != "null":
                sort = "numbers" if use.agrees == "clock" and kind in NUMBERS else kind
                groups.setdefault(use.agrees, {}).setdefault(sort, set()).add((file.path, use.column))
    found.groups = [sorts for sorts in groups.values() if len(sorts) > 1]
    return found if found.lone or found.groups else None


def rows_of(table: pa.Table, spec: FeatureSpec, histories: bool) -> tuple[list[dict[str, Any]], list[Violation]]:
    """What the rows of a row group must become, and the first row of every violation in it."""
    reader = _Group(table, spec, histories)
    return [reader.row(number) for number in range(table.num_rows)], reader.violations


class _Group:
    def __init__(self, table: pa.Table, spec: FeatureSpec, histories: bool) -> None:
        self.spec, self.histories, self.violations = spec, histories, list[Violation]()
        self.tables = {t.name: t for t in spec.tables}
        self.values = {name: _pylist(table.column(name)) for use in uses(spec, histories) for name in [use.column]}
        self.units = {
            use.column: _unit(str(list_item(kind) or kind))
            for use in uses(spec, histories)
            if use.agrees == "clock"
            for kind in [table.schema.field(use.column).type]
        }
        self.number = 0

    def row(self, number: int) -> dict[str, Any]:
        self.number = number
        get = {name: values[number] for name, values in self.values.items()}
        found: dict[str, Any] = {}
        for f in self.spec.categorical:
            ids = get[f.column or f.name]
            found[f.name] = self._ids((ids or []) if f.multi else [ids], self.tables[f.table])
        found["dense"] = [self._dense(get[d.column or d.name], d) for d in self.spec.dense]
        found["labels"] = [self._label(get, label) for label in self.spec.labels]
        found["weight"] = self._weight(get[self.spec.weight]) if self.spec.weight else 1.0
        found["domain"] = self._domain(get[self.spec.domain.column]) if self.spec.domain else 0
        p = self.spec.true_probability
        found["true_probability"] = self._probability(get[p]) if p else math.nan
        found["sequences"] = {s.name: self._sequence(get, s) for s in self.spec.sequences}
        return found

    def _refuse(self, column: str, reason: str, sequence: str | None = None) -> None:
        if not any((v.column, v.reason, v.sequence) == (column, reason, sequence) for v in self.violations):
            self.violations.append(Violation(column, reason, self.number, sequence))

    def _ids(self, ids: list[Any], table: TableSpec) -> list[int]:
        return [plain_row(value, table.rows, table.ids == "hash") for value in ids]

    def _dense(self, value: Any, spec: DenseSpec, sequence: str | None = None) -> float:
        number = plain_float(value, spec.log)
        if abs(number) > MAX_FLOAT32:
            self._refuse(spec.column or spec.name, "not a finite number", sequence)
        return number

    def _label(self, get: dict[str, Any], label: LabelSpec) -> tuple[float, float]:
        """The label and whether it counts."""
        column = label.column or label.name
        value = get[column]
        known = not _missing(value)
        if known and value not in (0, 1):
            self._refuse(column, "a label is 0 or 1")
        masked = label.mask is not None and (_missing(get[label.mask]) or get[label.mask] == 0)
        return (float(value) if known else 0.0), float(known and not masked)

    def _weight(self, value: Any) -> float:
        if _missing(value) or not 0 <= value <= MAX_FLOAT32:
            self._refuse(self.spec.weight or "", "a weight is a number")
            return 0.0
        return float(value)

    def _domain(self, value: Any) -> int:
        assert self.spec.domain
        if value is None or not 0 <= value < self.spec.domain.count:
            self._refuse(self.spec.domain.column, "a domain is 0")
            return 0
        return int(value)

    def _probability(self, value: Any) -> float:
        if _missing(value):
            return math.nan
        if not 0 <= value <= 1:
            self._refuse(self.spec.true_probability or "", "a probability is 0")
        return float(value)

    def _sequence(self, get: dict[str, Any], s: SequenceSpec) -> dict[str, list[Any]]:
        features: list[EventIdSpec | DenseSpec] = [*s.ids, *s.floats]
        if not self.histories:
            return {"ages": [], **{feature.name: [] for feature in s.ids}, **{f"float {d.name}": [] for d in s.floats}}
        events = get[s.timestamps] or []
        for feature in features:
            if len(get[feature.column or feature.name] or []) != len(events):
                self._refuse(feature.column or feature.name, "have different lengths", s.name)
        found: dict[str, list[Any]] = {"ages": self._ages(get[self.spec.timestamp or ""], events, s)}
        for event in s.ids:
            found[event.name] = self._ids(get[event.column or event.name] or [], self.tables[event.table])
        for dense in s.floats:
            values = get[dense.column or dense.name] or []
            found[f"float {dense.name}"] = [self._dense(value, dense, s.name) for value in values]
        return {name: values[-s.max_length :] for name, values in found.items()}

    def _ages(self, row: Any, events: list[Any], s: SequenceSpec) -> list[float]:
        unit, row_unit = self.units[s.timestamps], self.units[self.spec.timestamp or ""]
        time, times = _time(row, row_unit), [_time(event, unit) for event in events]
        if isinstance(time, float) or any(isinstance(event, float) for event in times):
            # floats are float64, and so are the integers beside them
            time, times = _as_float(time), [_as_float(event) for event in times]
        if time is None and events:
            self._refuse(self.spec.timestamp or "", "a row with events but without a time", s.name)
        if None in times:
            self._refuse(s.timestamps, "an event without a time", s.name)
        ages = [math.nan if time is None or event is None else _difference(time, event) for event in times]
        if any(age <= 0 for age in ages):
            self._refuse(s.timestamps, "an event that is not earlier than its row", s.name)
        if any(b < a for a, b in pairwise(times) if a is not None and b is not None):
            self._refuse(s.timestamps, "events are not in order", s.name)
        if any(abs(age) > MAX_FLOAT32 for age in ages):
            self._refuse(s.timestamps, "an event whose age is beyond float32", s.name)
        return ages


Time = Fraction | float


def _time(value: Any, unit: Fraction | None) -> Time | None:
    """Seconds, or the number itself where the type has no unit; None where it is missing or beyond 64 bits."""
    if unit is not None:
        return None if value is None else value * unit
    if isinstance(value, float) or (isinstance(value, Decimal) and value.as_tuple().exponent != 0):
        return float(value) if math.isfinite(value) else None
    return Fraction(int(value)) if value is not None and -(2**63) <= value < 2**63 else None


def _as_float(time: Time | None) -> float | None:
    return None if time is None else float(time)


def _difference(time: Time, event: Time) -> float:
    return float(time - event)


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _unit(name: str) -> Fraction | None:
    """Seconds of a type's unit; None for numbers."""
    if name.startswith("date"):
        return Fraction(86_400) if "32" in name else Fraction(1, 1000)
    found = re.match(r"timestamp\[(\w+)", name)
    return Fraction(1, PER_SECOND[found[1]]) if found else None


def _pylist(column: pa.ChunkedArray) -> list[Any]:
    """Plain values; times and dates as the integers that they are stored as: datetime has no nanoseconds."""
    item = list_item(column.type)
    name = str(item or column.type)
    if not name.startswith(("timestamp", "date")):
        return column.to_pylist()
    plain = pa.int32() if name.startswith("date32") else pa.int64()
    if item is None:
        return column.cast(plain).to_pylist()
    return [one.values.cast(plain).to_pylist() if one.is_valid else None for one in column]
