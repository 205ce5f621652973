"""One Parquet row group (an Arrow table) → a RowBlock: ids mapped to table rows, lists to values + offsets, checked.

Everything is vectorised. What a column may be is checked once from the schema (parquet.py); here only values are:
aligned lists, events strictly earlier than their row, labels of 0 and 1. Keys of the block are `rows`, `dense` [B, F],
`labels` and `label_mask` [B, T], `weight`, `domain`, `true_probability`, `categorical/NAME`; jagged ones are
`categorical/NAME` (multi-valued) and `sequence/NAME` with `ages`, `ids/NAME`, `floats/NAME`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gemctl.data.hashing import hash_strings, mix64
from gemctl.data.rows import JaggedRows, RowBlock
from gemctl.errors import InputError
from gemctl.specs.data import DenseSpec, FeatureSpec, LabelSpec, SequenceSpec, TableSpec

Problems = list[str | None]


@dataclass(frozen=True)
class Place:
    """Where a row group lies, for messages and row numbers."""

    file: str
    group: int  # of the file
    first_row: int  # of the group, in the data set

    def problem(self, rows: np.ndarray, text: str, values: np.ndarray | None = None) -> str | None:
        """A line naming the first of `rows` (bool [B]: where it is wrong) and its value, or None."""
        wrong = np.flatnonzero(rows)
        if not wrong.size:
            return None
        text += "" if values is None else f", not {values[wrong[0]]:g}"
        more = f" (and {wrong.size - 1} more rows of this row group)" if wrong.size > 1 else ""
        return f"{self.file}: row group {self.group}, row {wrong[0]}: {text}{more}"


def decode(table: Any, spec: FeatureSpec, place: Place, *, histories: bool) -> RowBlock:
    """The rows of `table`; without `histories` every sequence is empty and its columns are not touched."""
    problems: Problems = []
    count = table.num_rows
    tables = {t.name: t for t in spec.tables}
    fixed = {"rows": place.first_row + np.arange(count)}
    jagged: dict[str, JaggedRows] = {}
    for feature in spec.categorical:
        column, key = _column(table, feature.column or feature.name), f"categorical/{feature.name}"
        if feature.multi:
            offsets, values = _list(column)
            jagged[key] = JaggedRows(offsets, {"ids": table_rows(values, tables[feature.table])})
        else:
            fixed[key] = table_rows(column, tables[feature.table])
    fixed["dense"] = np.zeros((count, len(spec.dense)), np.float32)
    for i, dense in enumerate(spec.dense):
        values = _dense(_column(table, dense.column or dense.name), dense)
        problems.append(place.problem(~np.isfinite(values), f"{dense.column or dense.name}: not a finite number"))
        fixed["dense"][:, i] = values
    fixed.update(_labels(table, spec.labels, place, problems))
    fixed.update(_row_values(table, spec, place, problems))
    times = _times(_column(table, spec.timestamp)) if spec.timestamp and spec.sequences and histories else None
    for sequence in spec.sequences:
        if times is None:
            events = _no_events(sequence, count)
        else:
            events = _sequence(table, sequence, tables, place, times, problems)
        jagged[f"sequence/{sequence.name}"] = events
    found = [problem for problem in problems if problem]
    if found:
        raise InputError(found)
    return RowBlock(fixed, jagged)


def table_rows(ids: Any, table: TableSpec) -> np.ndarray:
    """Rows of `table` for an Arrow array of ids; unknown ids and nulls get the last row. int32 where that is enough."""
    if pa.types.is_dictionary(ids.type):
        ids = ids.cast(ids.type.value_type)
    known = ids.is_valid().to_numpy(zero_copy_only=False)
    last = table.rows - 1
    if table.ids == "hash":
        rows = np.full(len(ids), last, np.int64)
        present = ids.drop_null()
        rows[known] = (_hash(present) % np.uint64(last)).astype(np.int64)
    else:
        # unsigned 64-bit ids past int64's range are out of any vocabulary
        values = ids.fill_null(0).to_numpy(zero_copy_only=False)
        rows = np.where(known & (values >= 0) & (values < last), values, last)
    return rows.astype(np.int32 if last < 2**31 else np.int64)


def _hash(ids: Any) -> np.ndarray:
    if pa.types.is_integer(ids.type):
        return mix64(ids.to_numpy(zero_copy_only=False))
    return hash_strings(ids)


def _column(table: Any, name: str) -> Any:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def _list(column: Any) -> tuple[np.ndarray, Any]:
    """Offsets int64 [B+1] and the flat values of a list column; a null list is empty."""
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), column.flatten()


def _dense(column: Any, spec: DenseSpec) -> np.ndarray:
    """float32; null and NaN become 0, what float32 can't hold infinite."""
    kind = column.type if pa.types.is_float32(column.type) else pa.float64()
    values = column.cast(kind).to_numpy(zero_copy_only=False)
    values = np.nan_to_num(values, copy=True, posinf=np.inf, neginf=-np.inf)
    if spec.log:
        values = np.copysign(np.log1p(np.abs(values)), values)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


@dataclass(frozen=True)
class _Times:
    values: np.ndarray  # int64 (Arrow timestamps: µs) or float64
    present: np.ndarray
    per_second: float | None  # of Arrow timestamps; None: a unit of the data's own


def _times(column: Any) -> _Times:
    per_second = None
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
        per_second = 1e6
    present = column.is_valid().to_numpy(zero_copy_only=False)
    exact = pa.types.is_integer(column.type)
    values = column.fill_null(0).cast(pa.int64() if exact else pa.float64()).to_numpy(zero_copy_only=False)
    return _Times(values, present if exact else present & np.isfinite(values), per_second)


def _no_events(sequence: SequenceSpec, count: int) -> JaggedRows:
    values: dict[str, np.ndarray] = {f"ids/{feature.name}": np.zeros(0, np.int64) for feature in sequence.ids}
    values |= {f"floats/{feature.name}": np.zeros(0, np.float32) for feature in sequence.floats}
    return JaggedRows(np.zeros(count + 1, np.int64), {**values, "ages": np.zeros(0, np.float32)})


def _sequence(
    table: Any, spec: SequenceSpec, tables: dict[str, TableSpec], place: Place, row_times: _Times, problems: Problems
) -> JaggedRows:
    """The last `max_length` events of each row; none where lists are not aligned, which is a problem noted."""
    offsets, time_values = _list(_column(table, spec.timestamps))
    lengths = np.diff(offsets)
    aligned = True
    lists: dict[str, Any] = {}
    for group, features in (("ids", spec.ids), ("floats", spec.floats)):
        for feature in features:
            name = feature.column or feature.name
            found, lists[f"{group}/{feature.name}"] = _list(_column(table, name))
            wrong = np.diff(found) != lengths
            text = f"sequence {spec.name!r}: not as many values in {name} as in {spec.timestamps}"
            problems.append(place.problem(wrong, text))
            aligned &= not wrong.any()
    if not aligned:
        return _no_events(spec, table.num_rows)
    ages = _ages(spec, offsets, _times(time_values), row_times, place, problems)
    events = JaggedRows(offsets, {"ages": ages})
    for feature in spec.ids:
        events.values[f"ids/{feature.name}"] = table_rows(lists[f"ids/{feature.name}"], tables[feature.table])
    for feature in spec.floats:
        values = _dense(lists[f"floats/{feature.name}"], feature)
        finite = np.isfinite(values)
        problems.append(place.problem(_any(~finite, offsets), f"{feature.column or feature.name}: not a finite number"))
        events.values[f"floats/{feature.name}"] = values
    return events.last(spec.max_length)


def _ages(
    spec: SequenceSpec, offsets: np.ndarray, events: _Times, rows: _Times, place: Place, problems: Problems
) -> np.ndarray:
    """float32 [ΣL]: row time − event time. Every event must be earlier than its row, none before the one before it."""
    lengths = np.diff(offsets)
    where = f"sequence {spec.name!r}: {spec.timestamps}"
    problems.append(place.problem(_any(~events.present, offsets), f"{where}: an event without a time"))
    problems.append(place.problem(~rows.present & (lengths > 0), "a row with events but without a time"))
    ages = np.repeat(rows.values, lengths) - events.values
    problems.append(place.problem(_any(ages <= 0, offsets), f"{where}: an event that is not earlier than its row"))
    backward = np.zeros(ages.size, bool)
    backward[1:] = np.diff(events.values) < 0
    backward[offsets[:-1][lengths > 0]] = False
    problems.append(place.problem(_any(backward, offsets), f"{where}: not in order of time, oldest first"))
    return (ages / (events.per_second or 1)).astype(np.float32)


def _any(flags: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """bool [B]: whether any of a row's values is flagged."""
    if not flags.any():
        return np.zeros(offsets.size - 1, bool)
    counts = np.concatenate([[0], np.cumsum(flags)])
    return counts[offsets[1:]] > counts[offsets[:-1]]


def _labels(table: Any, labels: list[LabelSpec], place: Place, problems: Problems) -> dict[str, np.ndarray]:
    """`labels` and `label_mask`, float32 [B, T]; a null or NaN label is masked and reads 0."""
    values = np.zeros((table.num_rows, len(labels)), np.float32)
    mask = np.ones_like(values)
    for t, label in enumerate(labels):
        name = label.column or label.name
        column = _numbers(_column(table, name))
        missing = np.isnan(column)
        mask[missing, t] = 0
        values[:, t] = np.where(missing, 0, column)
        wrong = ~np.isin(values[:, t], (0, 1))
        problems.append(place.problem(wrong, f"{name}: a label is 0 or 1", column))
        if label.mask:
            mask[:, t] *= np.nan_to_num(_numbers(_column(table, label.mask))) != 0
    return {"labels": values, "label_mask": mask}


def _row_values(table: Any, spec: FeatureSpec, place: Place, problems: Problems) -> dict[str, np.ndarray]:
    """`weight` and `true_probability` float32 [B], `domain` int64 [B]."""
    count = table.num_rows
    weight, probability, domain = np.ones(count), np.full(count, np.nan), np.zeros(count)
    if spec.weight:
        weight = _numbers(_column(table, spec.weight))
        wrong = ~(np.isfinite(weight) & (weight >= 0))
        problems.append(place.problem(wrong, f"{spec.weight}: a weight is a number ≥ 0", weight))
    if spec.domain:
        domain = _numbers(_column(table, spec.domain.column))
        wrong = ~((domain >= 0) & (domain < spec.domain.count))
        text = f"{spec.domain.column}: a domain is 0 … {spec.domain.count - 1}"
        problems.append(place.problem(wrong, text, domain))
        domain = np.nan_to_num(domain)
    if spec.true_probability:
        probability = _numbers(_column(table, spec.true_probability))
    return {
        "weight": weight.astype(np.float32),
        "domain": domain.astype(np.int64),
        "true_probability": probability.astype(np.float32),
    }


def _numbers(column: Any) -> np.ndarray:
    """float64, null → NaN."""
    return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
