"""Decodes one Parquet row group (an Arrow table) to a RowBlock and checks it: ids become table rows, lists jagged rows.

Everything is vectorised. Column types are checked once, from the schema (columns.py); values are checked here: aligned
lists, events strictly earlier than their row, labels of 0 and 1. Keys of the block are `rows`, `dense` [B, F],
`labels` and `label_mask` [B, T], `weight`, `domain`, `true_probability`, `categorical/NAME`; jagged keys are
`categorical/NAME` (multi-valued) and `sequence/NAME` with `ages`, `ids/NAME`, `floats/NAME`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from pyarrow import types as pt

from gemctl.data.columns import Kind, kind_of
from gemctl.data.hashing import hash_strings, mix64
from gemctl.data.rows import JaggedRows, RowBlock
from gemctl.data.values import Times, flat, floats, integers, lists, times
from gemctl.errors import InputError
from gemctl.specs.data import DenseSpec, FeatureSpec, LabelSpec, SequenceSpec, TableSpec

Problems = list[str | None]


@dataclass(frozen=True)
class Place:
    """The position of a row group, for messages and row numbers."""

    file: str
    group: int  # of the file
    first_row: int  # of the group, in the data set

    def problem(self, rows: np.ndarray, text: str, values: np.ndarray | None = None) -> str | None:
        """A line that names the first wrong row (`rows`: bool [B]) and its value, or None."""
        wrong = np.flatnonzero(rows)
        if not wrong.size:
            return None
        text += "" if values is None else f", not {_number(float(values[wrong[0]]))}"
        more = f" (and {wrong.size - 1} more rows of this row group)" if wrong.size > 1 else ""
        return f"{self.file}: row group {self.group}, row {wrong[0]}: {text}{more}"


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def decode(table: Any, spec: FeatureSpec, place: Place, *, histories: bool) -> RowBlock:
    """The rows of `table`; without `histories` every sequence is empty and its columns are not read."""
    problems: Problems = []
    count = table.num_rows
    tables = {t.name: t for t in spec.tables}
    fixed = {"rows": place.first_row + np.arange(count)}
    jagged: dict[str, JaggedRows] = {}
    for feature in spec.categorical:
        column, key = table.column(feature.column or feature.name), f"categorical/{feature.name}"
        if feature.multi:
            offsets, values = lists(column)
            jagged[key] = JaggedRows(offsets, {"ids": table_rows(values, tables[feature.table])})
        else:
            fixed[key] = table_rows(flat(column), tables[feature.table])
    fixed["dense"] = np.zeros((count, len(spec.dense)), np.float32)
    for i, dense in enumerate(spec.dense):
        values = _dense(flat(table.column(dense.column or dense.name)), dense)
        problems.append(place.problem(~np.isfinite(values), f"{dense.column or dense.name}: not a finite number"))
        fixed["dense"][:, i] = values
    fixed.update(_labels(table, spec.labels, place, problems))
    fixed.update(_row_values(table, spec, place, problems))
    for sequence in spec.sequences:
        read = _sequence(table, sequence, spec, place, problems) if histories else _no_events(sequence, count)
        jagged[f"sequence/{sequence.name}"] = read
    distinct = list(dict.fromkeys(filter(None, problems)))  # two sequences may lack the same time
    if distinct:
        raise InputError(distinct)
    return RowBlock(fixed, jagged)


def table_rows(ids: Any, table: TableSpec) -> np.ndarray:
    """Rows of `table` for an Arrow array of ids; unknown ids and nulls get the last row. int32 if that is enough."""
    last = table.rows - 1
    if table.ids == "hash" and not pt.is_null(ids.type):
        rows = np.full(len(ids), last, np.int64)
        known = ids.is_valid().to_numpy(zero_copy_only=False)
        rows[known] = (_hash(ids.drop_null()) % np.uint64(last)).astype(np.int64)
    else:
        numbers = integers(ids)
        rows = np.where(numbers.exact & (numbers.bits >= 0), np.minimum(numbers.bits, last), last)
    return rows.astype(np.int32 if last < 2**31 else np.int64)


def _hash(ids: Any) -> np.ndarray:
    return hash_strings(ids) if kind_of(ids.type) is Kind.STRINGS else mix64(integers(ids).bits)


def _dense(column: Any, spec: DenseSpec) -> np.ndarray:
    """float32; null and NaN become 0, values beyond float32 become infinite."""
    values = np.nan_to_num(floats(column), posinf=np.inf, neginf=-np.inf)
    if spec.log:
        values = np.copysign(np.log1p(np.abs(values)), values)
    return _float32(values)


def _float32(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest; values that are too large become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _no_events(sequence: SequenceSpec, count: int) -> JaggedRows:
    values: dict[str, np.ndarray] = {f"ids/{feature.name}": np.zeros(0, np.int64) for feature in sequence.ids}
    values |= {f"floats/{feature.name}": np.zeros(0, np.float32) for feature in sequence.floats}
    return JaggedRows(np.zeros(count + 1, np.int64), {**values, "ages": np.zeros(0, np.float32)})


def _sequence(table: Any, sequence: SequenceSpec, spec: FeatureSpec, place: Place, problems: Problems) -> JaggedRows:
    """The last `max_length` events of each row; none if lists are not aligned, which is added to `problems`."""
    tables = {table.name: table for table in spec.tables}
    offsets, event_times = lists(table.column(sequence.timestamps))
    lengths = np.diff(offsets)
    aligned = True
    columns: dict[str, Any] = {}
    for group, features in (("ids", sequence.ids), ("floats", sequence.floats)):
        for feature in features:
            name = feature.column or feature.name
            own_offsets, columns[f"{group}/{feature.name}"] = lists(table.column(name))
            wrong = np.diff(own_offsets) != lengths
            text = f"sequence {sequence.name!r}: {name} and {sequence.timestamps} have different lengths"
            problems.append(place.problem(wrong, text))
            aligned &= not wrong.any()
    if not aligned:
        return _no_events(sequence, table.num_rows)
    row_times = times(flat(table.column(spec.timestamp)))
    no_time = ~row_times.known & (lengths > 0)
    problems.append(place.problem(no_time, f"{spec.timestamp}: a row with events but without a time {_NO_TIME}"))
    ages = _ages(sequence, offsets, times(event_times), row_times, place, problems)
    events = JaggedRows(offsets, {"ages": ages})
    for feature in sequence.ids:
        events.values[f"ids/{feature.name}"] = table_rows(columns[f"ids/{feature.name}"], tables[feature.table])
    for feature in sequence.floats:
        values = _dense(columns[f"floats/{feature.name}"], feature)
        finite = np.isfinite(values)
        problems.append(place.problem(_any(~finite, offsets), f"{feature.column or feature.name}: not a finite number"))
        events.values[f"floats/{feature.name}"] = values
    return events.last(sequence.max_length)


_NO_TIME = "(null, not finite, or beyond 64 bits)"


def _ages(
    sequence: SequenceSpec, offsets: np.ndarray, events: Times, rows: Times, place: Place, problems: Problems
) -> np.ndarray:
    """float32 [ΣL]: row time − event time. Events must be earlier than their row and in ascending order."""
    lengths = np.diff(offsets)
    owners = rows.take(np.repeat(np.arange(lengths.size), lengths))
    late = events.known & owners.known & ~events.before(owners)
    later, earlier = events.take(slice(1, None)), events.take(slice(-1))
    backward = np.zeros(late.size, bool)
    backward[1:] = later.known & earlier.known & later.before(earlier)
    backward[offsets[:-1][lengths > 0]] = False
    ages = _float32(owners.since(events))
    for wrong, what in (
        (~events.known, f"an event without a time {_NO_TIME}"),
        (late, "an event that is not earlier than its row"),
        (backward, "events are not in order, oldest first"),
        (events.known & owners.known & ~np.isfinite(ages), "an event whose age is beyond float32"),
    ):
        where = f"sequence {sequence.name!r}: {sequence.timestamps}"
        problems.append(place.problem(_any(wrong, offsets), f"{where}: {what}"))
    return ages


def _any(flags: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """bool [B]: whether any value of the row is flagged."""
    if not flags.any():
        return np.zeros(offsets.size - 1, bool)
    counts = np.concatenate([[0], np.cumsum(flags)])
    return counts[offsets[1:]] > counts[offsets[:-1]]


def _labels(table: Any, labels: list[LabelSpec], place: Place, problems: Problems) -> dict[str, np.ndarray]:
    """`labels` and `label_mask`, float32 [B, T]; a null or NaN label is masked and 0."""
    values = np.zeros((table.num_rows, len(labels)), np.float32)
    mask = np.ones_like(values)
    for t, label in enumerate(labels):
        name = label.column or label.name
        column = floats(flat(table.column(name)))
        missing = np.isnan(column)
        wrong = ~missing & ~np.isin(column, (0, 1))
        problems.append(place.problem(wrong, f"{name}: a label is 0 or 1", column))
        mask[missing, t] = 0
        values[:, t] = column == 1
        if label.mask:
            mask[:, t] *= np.nan_to_num(floats(flat(table.column(label.mask)))) != 0
    return {"labels": values, "label_mask": mask}


def _row_values(table: Any, spec: FeatureSpec, place: Place, problems: Problems) -> dict[str, np.ndarray]:
    """`weight` and `true_probability` float32 [B], `domain` int64 [B]."""
    count = table.num_rows
    weight, probability = np.ones(count, np.float32), np.full(count, np.nan, np.float32)
    domain = np.zeros(count, np.int64)
    if spec.weight:
        column = floats(flat(table.column(spec.weight)))
        weight = _float32(column)
        wrong = ~(np.isfinite(weight) & (column >= 0))
        problems.append(place.problem(wrong, f"{spec.weight}: a weight is a number ≥ 0", column))
    if spec.domain:
        values = flat(table.column(spec.domain.column))
        numbers = integers(values)
        wrong = ~(numbers.exact & (numbers.bits >= 0) & (numbers.bits < spec.domain.count))
        domain = np.where(wrong, 0, numbers.bits)
        text = f"{spec.domain.column}: a domain is 0 … {spec.domain.count - 1}"
        problems.append(place.problem(wrong, text, floats(values)))
    if spec.true_probability:
        column = floats(flat(table.column(spec.true_probability)))
        probability = _float32(column)
        wrong = ~(np.isnan(column) | ((column >= 0) & (column <= 1)))
        problems.append(place.problem(wrong, f"{spec.true_probability}: a probability is 0 … 1", column))
    return {"weight": weight, "domain": domain, "true_probability": probability}
