"""Describes the columns of Parquet files: types, distinct values, ranges and nulls, from a sample of the first rows.

    sample = describe(find_files("clicks.parquet").files)
    print(sample.columns[0].summary())      # 812 distinct in 50,000, 0 … 811, 0.1% null
    print(sample.left_out)               # {"user": "2 columns have this name"}

Every column appears, either with its statistics or with the reason why it has none.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as pt

from gemctl.data.columns import NUMBERS, Kind, is_list, kind_of
from gemctl.data.files import DataFile
from gemctl.data.parquet import leaves, open_file
from gemctl.data.values import flat, floats, lists
from gemctl.errors import InputError

SAMPLE_ROWS = 50_000
MOST_FILES = 256  # whose footers are read; of more files, an evenly spaced selection
MOST_VALUES = 100_000_000  # of a column in one row group: reading one row may take as much memory as reading all
CLOCKS = frozenset({Kind.INSTANTS, Kind.LOCAL_TIMES, Kind.DATES})


@dataclass(frozen=True)
class Column:
    """One column; for a list column (`many`) everything except `lengths` describes the values inside the lists."""

    name: str
    type: Any  # Arrow type
    kind: Kind
    many: bool
    values: Any  # Arrow array of the sample's values, flat
    lengths: np.ndarray  # int64 [rows]; all 1 unless `many`
    low: float | None  # smallest and largest number: in all files if their footers have it, else in the sample
    high: float | None  # (exact for integers)

    @property
    def integer(self) -> bool:
        return self.kind is Kind.INTEGERS

    @property
    def text(self) -> bool:
        return self.kind is Kind.STRINGS

    @property
    def number(self) -> bool:
        """Integers, floats or booleans."""
        return self.kind in NUMBERS

    @property
    def clock(self) -> bool:
        """Timestamps or dates."""
        return self.kind in CLOCKS

    @cached_property
    def numbers(self) -> np.ndarray:
        """float64 [N]; null → NaN. Only for numbers."""
        return floats(self.values)

    @cached_property
    def missing(self) -> int:
        """Number of values that are null or NaN."""
        return int(np.isnan(self.numbers).sum()) if self.number else int(self.values.null_count)

    @cached_property
    def distinct(self) -> int:
        """Number of distinct values, nulls excluded."""
        if self.kind is Kind.FLOATS or pt.is_decimal(self.values.type):
            return int(np.unique(self.numbers[~np.isnan(self.numbers)]).size)
        return int(pc.count_distinct(self.values).as_py())

    @property
    def binary(self) -> bool:
        """Whether all values are 0 or 1."""
        zero_one = self.kind is Kind.BOOLEANS or (self.number and {self.low, self.high} <= {0.0, 1.0})
        return not self.many and zero_one and 0 < self.distinct <= 2

    @property
    def whole_floats(self) -> bool:
        """Whether all floats are whole numbers, as when pandas writes integers with gaps."""
        return self.kind is Kind.FLOATS and bool((np.nan_to_num(self.numbers) % 1 == 0).all())

    @property
    def skewed(self) -> bool:
        """Whether all values are ≥ 0 and a few are far above the others."""
        if self.low is None or self.high is None or self.low < 0:
            return False
        return bool(self.high > 100 * max(float(np.nanmedian(self.numbers)), 0.1))

    @property
    def numbers_rows(self) -> bool:
        """Whether nearly every row has a different value, as request ids do."""
        filled = len(self.values) - self.missing
        return filled > 1000 and self.distinct > 0.99 * filled

    def summary(self) -> str:
        """The statistics in one line."""
        parts = [f"{self.distinct:,} distinct in {len(self.values):,}"]
        if self.low is not None and self.high is not None:
            low, high = (str(n) if isinstance(n, int) else f"{n:.10g}" for n in (self.low, self.high))
            parts.append(f"{low} … {high}")
        if self.many and self.lengths.size:
            parts.append(f"{self.lengths.mean():.1f} per row")
        if self.missing:
            parts.append(f"{self.missing / len(self.values):.1%} null")
        return ", ".join(parts)


@dataclass(frozen=True)
class Sample:
    """The first `rows` rows: `columns` that can have a role, in file order, and `left_out`: why the others can't.

    The columns are those of the first file that has rows; files with another schema are not in the sample.
    """

    rows: int
    columns: list[Column]
    left_out: dict[str, str]


def describe(files: Sequence[DataFile]) -> Sample:
    """Describes the files' first SAMPLE_ROWS rows and the ranges in all footers. InputError if no file has rows, or if
    one is damaged."""
    chosen = files[:: max(1, -(-len(files) // MOST_FILES))]
    first = next((file for file in files if _rows(file)), None)
    if first is None:
        raise InputError(f"{files[0].path}: no rows to learn from" + (" (nor in any other file)" if files[1:] else ""))
    with open_file(first) as opened:
        schema = opened.schema_arrow
        names, left_out = _usable(opened)
    ranges = _ranges(chosen, names)
    table = _sample(files, schema, names)
    columns = []
    for name in names:
        try:
            columns.append(_column(name, table.column(name), ranges.get(name)))
        except (_NoRole, pa.ArrowException) as error:
            left_out[name] = " ".join(str(error).split())
    return Sample(table.num_rows, columns, left_out)


class _NoRole(Exception):
    """No role of a feature spec accepts this column."""


def _rows(file: DataFile) -> int:
    with open_file(file) as opened:
        return int(opened.metadata.num_rows)


def _usable(opened: Any) -> tuple[list[str], dict[str, str]]:
    """Names of the columns that can be read by name, and what is wrong with the others."""
    names = opened.schema_arrow.names
    counts = Counter(names)
    left_out = {name: f"{count} columns have this name" for name, count in counts.items() if count > 1}
    if "" in counts:
        left_out[""] = "a column without a name"
    footer = opened.metadata
    groups = [footer.row_group(group) for group in range(footer.num_row_groups)]
    for index in range(footer.num_columns):
        path, most = footer.schema.column(index).path, max(group.column(index).num_values for group in groups)
        # pyarrow also reads everything below a name, and `item.views` may be a column or a part of one
        for name in names if most > MOST_VALUES else []:
            if path == name or path.startswith(f"{name}."):
                left_out[name] = f"{most:,} values in one row group are too many to sample: write smaller row groups"
    return [name for name in counts if name not in left_out], left_out


def _sample(files: Sequence[DataFile], schema: Any, names: list[str]) -> Any:
    """The first rows of the files with this schema."""
    batches: list[Any] = []
    rows = 0
    for file in files:
        if rows >= SAMPLE_ROWS:
            break
        with open_file(file) as opened:
            if not opened.schema_arrow.equals(schema):
                continue
            for batch in _batches(opened, file.path, names):
                batches.append(batch)
                rows += batch.num_rows
                if rows >= SAMPLE_ROWS:
                    break
    kept = schema.empty_table().select([schema.names.index(name) for name in names]).schema
    tables = [pa.Table.from_batches([batch]).select(names) for batch in batches]
    return pa.concat_tables([kept.empty_table(), *tables]).slice(0, SAMPLE_ROWS)


def _batches(opened: Any, path: str, names: list[str]) -> Iterator[Any]:
    for group in range(opened.metadata.num_row_groups):
        try:
            yield from opened.iter_batches(SAMPLE_ROWS, row_groups=[group], columns=names)
        except (OSError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{path}: row group {group} can't be read, the file is damaged: {reason}") from error


def _column(name: str, chunked: Any, whole: tuple[int, int] | None) -> Column:
    many, lengths = is_list(chunked.type), np.ones(len(chunked), np.int64)
    kind = kind_of(chunked.type.value_type if many else chunked.type)
    if kind is None:
        raise _NoRole(f"type {chunked.type} has no role")
    if many:
        offsets, values = lists(chunked)
        lengths = np.diff(offsets)
    else:
        values = flat(chunked)
    if kind is Kind.NOTHING or values.null_count == len(values):
        raise _NoRole("no value in the sampled rows" if len(values) else "only empty lists in the sampled rows")
    low, high = _bounds(kind, values)
    if whole is not None and low is not None and high is not None:
        low, high = min(low, whole[0]), max(high, whole[1])
    return Column(name, chunked.type.value_type if many else chunked.type, kind, many, values, lengths, low, high)


def _bounds(kind: Kind, values: Any) -> tuple[float | None, float | None]:
    if kind is Kind.INTEGERS:
        bounds = pc.min_max(values)
        return int(bounds["min"].as_py()), int(bounds["max"].as_py())
    if kind is Kind.FLOATS:
        numbers = floats(values)
        if np.isnan(numbers).all():
            raise _NoRole("only NaN in the sampled rows")
        return float(np.nanmin(numbers)), float(np.nanmax(numbers))
    return None, None


def _ranges(files: Sequence[DataFile], names: list[str]) -> dict[str, tuple[int, int]]:
    """Smallest and largest integer by column, if the footers have them."""
    found: dict[str, tuple[int, int]] = {}
    for file in files:
        with open_file(file) as opened:
            for name, index in leaves(opened.schema_arrow, opened.metadata.num_columns).items():
                kind = opened.schema_arrow.field(name).type if name in names else None
                if kind is None or not pt.is_integer(kind.value_type if is_list(kind) else kind):
                    continue
                for group in range(opened.metadata.num_row_groups):
                    statistics = opened.metadata.row_group(group).column(index).statistics
                    if statistics is not None and statistics.has_min_max:
                        low, high = found.get(name, (statistics.min, statistics.max))
                        found[name] = min(low, statistics.min), max(high, statistics.max)
    return found
