"""What a Parquet file's columns look like: types, distinct values, ranges, nulls, from a sample of the first rows.

table, columns = describe(open_file(filesystem, path), path)
print(columns[0].seen())      # 812 distinct in 50,000, 0 … 811, 0.1% null
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as pt

from gemctl.data.columns import is_list, repeated
from gemctl.data.parquet import read_group
from gemctl.errors import InputError

SAMPLE_ROWS = 50_000


@dataclass(frozen=True)
class Column:
    """One column; of a list column (`many`) all but `lengths` tell of the values inside the lists."""

    name: str
    kind: Any  # Arrow type
    many: bool
    values: Any  # Arrow array of the sample's values, flat
    lengths: np.ndarray  # int64 [rows]; all 1 unless `many`
    distinct: int
    low: float | None  # smallest and largest number: of the whole file where it says so, else of the sample
    high: float | None

    @property
    def integer(self) -> bool:
        return bool(pt.is_integer(self.kind))

    @property
    def text(self) -> bool:
        return bool(pt.is_string(self.kind) or pt.is_large_string(self.kind))

    @property
    def number(self) -> bool:
        """Integers, floats or booleans."""
        return bool(self.integer or pt.is_floating(self.kind) or pt.is_boolean(self.kind))

    @property
    def binary(self) -> bool:
        """Whether all values are 0 or 1."""
        return not self.many and self.distinct > 0 and (bool(pt.is_boolean(self.kind)) or self._only_0_and_1())

    @property
    def skewed(self) -> bool:
        """Whether a few values ≥ 0 are far above the others."""
        if not self.number or self.low is None or self.high is None or self.low < 0:
            return False
        middle = pc.quantile(self.values, q=0.5)[0].as_py() or 0.0
        return self.high > 100 * max(middle, 0.1)

    @property
    def numbers_rows(self) -> bool:
        """Whether (nearly) every row has a value of its own, as request ids do."""
        filled = len(self.values) - self.values.null_count
        return filled > 1000 and self.distinct > 0.99 * filled

    def seen(self) -> str:
        """One line of facts."""
        parts = [f"{self.distinct:,} distinct in {len(self.values):,}"]
        if self.low is not None and self.high is not None:
            parts.append(f"{self.low:.10g} … {self.high:.10g}")
        if self.many and self.lengths.size:
            parts.append(f"{self.lengths.mean():.1f} a row")
        if self.values.null_count:
            parts.append(f"{self.values.null_count / len(self.values):.1%} null")
        return ", ".join(parts)

    def _only_0_and_1(self) -> bool:
        return self.number and self.distinct <= 2 and {self.low, self.high} <= {0.0, 1.0}


def describe(file: Any, path: str) -> tuple[Any, list[Column]]:
    """The first rows of a `pyarrow.parquet.ParquetFile` (at most SAMPLE_ROWS), and its columns.

    `path` names the file in InputErrors: columns of one name, a damaged row group.
    """
    if twice := repeated(path, file.schema_arrow):
        raise InputError(list(twice.values()))
    tables, rows = [file.schema_arrow.empty_table()], 0
    for group in range(file.num_row_groups):
        if rows < SAMPLE_ROWS:
            tables.append(read_group(file, path, group))
            rows += tables[-1].num_rows
    table = pa.concat_tables(tables).slice(0, SAMPLE_ROWS).combine_chunks()
    return table, [_column(table, name, file.metadata) for name in table.column_names]


def _column(table: Any, name: str, metadata: Any) -> Column:
    values = table.column(name).combine_chunks()
    many, lengths = is_list(values.type), np.ones(len(values), np.int64)
    if many:
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        values = pc.list_flatten(values)
    if pt.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    plain = pt.is_primitive(kind) or pt.is_string(kind) or pt.is_large_string(kind)
    distinct = int(pc.count_distinct(values).as_py()) if plain else 0
    low, high = _bounds(values, name, metadata)
    return Column(name, kind, many, values, lengths, distinct, low, high)


def _bounds(values: Any, name: str, metadata: Any) -> tuple[float | None, float | None]:
    if not (pt.is_integer(values.type) or pt.is_floating(values.type)) or values.null_count == len(values):
        return None, None
    found = pc.min_max(values.drop_null())
    low, high = float(found["min"].as_py()), float(found["max"].as_py())
    if not pt.is_integer(values.type):
        return low, high
    for group in range(metadata.num_row_groups):
        chunks = metadata.row_group(group)
        for index in range(chunks.num_columns):
            chunk = chunks.column(index)
            if chunk.path_in_schema.split(".")[0] == name and chunk.statistics and chunk.statistics.has_min_max:
                low, high = min(low, chunk.statistics.min), max(high, chunk.statistics.max)
    return low, high


def as_times(values: Any) -> np.ndarray:
    """float64 seconds, or the numbers as they are; null → NaN."""
    if pt.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz), safe=False).cast(pa.int64())
    return values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
