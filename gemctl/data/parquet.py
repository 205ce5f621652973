"""The rows of Parquet files by number, checked against a feature spec, and what footers reveal before reading.

    source = ParquetSource("s3://logs/clicks/dt=2026-03-*", spec)
    block = source.read(np.array([17, 3]))                # a RowBlock

Opening reads the footers and checks every file's schema against the spec and the other files, reporting all problems at
once. Only the needed columns are read, one row group at a time; the last `keep` decoded row groups stay in memory, and
MOST_OPEN files stay open.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types as pt

from gemctl.data.columns import SharedColumn, check_schema, column_uses, disagreements
from gemctl.data.decode import Place, decode
from gemctl.data.files import DataFile, DataPath, find_files
from gemctl.data.rows import RowBlock, concatenate
from gemctl.errors import InputError
from gemctl.specs.data import FeatureSpec

GIB = 1 << 30
READ_BYTES = 32
"""Bytes of memory per value while its row group is read and decoded, at most (measured: 31, for ids and times)."""
MOST_OPEN = 32  # a data set may have more files than a process may open


class ParquetSource:
    """Rows of all files, numbered consecutively in file order.

    `group_rows`: rows of each row group. `columns`: those that must agree with other data sets for the same model.
    `keep`: number of decoded row groups in memory (an LRU cache). Not thread-safe: use one reader per thread.
    """

    def __init__(self, url: DataPath, spec: FeatureSpec, *, histories: bool = True) -> None:
        self.url, self.spec, self.histories, self.keep = url, spec, histories, 1
        uses = column_uses(spec, histories=histories)
        self._needed = list(dict.fromkeys(use.column for use in uses))
        found = find_files(url)
        self.ignored, self._files = found.ignored, found.files
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._footers: list[Any] = []
        self.columns: list[SharedColumn] = []
        problems: list[str] = []
        for index, file in enumerate(self._files):
            opened = self._opened(index)
            self._footers.append(opened.metadata)
            columns, wrong = check_schema(file, opened.schema_arrow, uses)
            self.columns += columns
            problems += wrong
        problems += disagreements(self.columns)
        if problems:
            raise InputError(problems)
        self._groups = [(f, g) for f, footer in enumerate(self._footers) for g in range(footer.num_row_groups)]
        self.group_rows = [self._footers[f].row_group(g).num_rows for f, g in self._groups]
        self._starts = np.concatenate([[0], np.cumsum(self.group_rows, dtype=np.int64)])
        self.row_count = int(self._starts[-1])
        self._decoded: OrderedDict[int, RowBlock] = OrderedDict()

    def read(self, rows: np.ndarray) -> RowBlock:
        """The rows with these numbers (int64 [B], 0 ≤ row < row_count), in this order."""
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        # in order of first use, so that a batch over two windows finishes the first before it reads the second
        groups, first = np.unique(owners, return_index=True)
        pieces, positions = [], []
        for group in groups[np.argsort(first)]:
            mine = np.flatnonzero(owners == group)
            pieces.append(self._group(int(group)).take(rows[mine] - self._starts[group]))
            positions.append(mine)
        if not pieces:
            return self._empty()
        return concatenate(pieces).take(np.argsort(np.concatenate(positions)))

    def check_memory(self, memory: int) -> None:
        """InputError that names every row group that is too large for a host with `memory` bytes."""
        problems = []
        for file, footer in zip(self._files, self._footers, strict=True):
            for group, values in enumerate(read_values(footer, self._needed)):
                if values * READ_BYTES > memory:
                    rows = footer.row_group(group).num_rows
                    problems.append(
                        f"{file.path}: row group {group}: {rows:,} rows with {values:,} values in the needed columns: "
                        f"reading it takes about {values * READ_BYTES / GIB:.1f} GiB, but a host has "
                        f"{memory / GIB:.1f}; write smaller row groups or shorter lists"
                    )
        if problems:
            raise InputError(problems)

    def close(self) -> None:
        """Closes the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _opened(self, index: int) -> Any:
        """File number `index` as a `pyarrow.parquet.ParquetFile`."""
        if index not in self._open:
            while len(self._open) >= MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            known = self._footers[index] if index < len(self._footers) else None
            self._open[index] = open_file(self._files[index], known)
        self._open.move_to_end(index)
        return self._open[index]

    def _group(self, index: int) -> RowBlock:
        if index in self._decoded:
            self._decoded.move_to_end(index)
            return self._decoded[index]
        while len(self._decoded) >= self.keep:
            self._decoded.popitem(last=False)
        file, group = self._groups[index]
        # no threads: the prefetch thread reads while the rank's other cores compute
        path = self._files[file].path
        table = read_group(self._opened(file), path, group, columns=self._needed, use_threads=False)
        place = Place(path, group, int(self._starts[index]))
        block = decode(table, self.spec, place, histories=self.histories)
        self._decoded[index] = block
        return block

    def _empty(self) -> RowBlock:
        table = self._opened(0).schema_arrow.empty_table()
        return decode(table, self.spec, Place(self._files[0].path, 0, 0), histories=self.histories)


def open_file(file: DataFile, footer: Any = None) -> Any:
    """The file as a `pyarrow.parquet.ParquetFile`; `footer`: its metadata, if already read."""
    try:
        where = file.path if file.local else file.filesystem.open(file.path, "rb")
        # INT96 timestamps as nanoseconds, the default, would wrap outside of 1677 … 2262
        return pq.ParquetFile(where, metadata=footer, coerce_int96_timestamp_unit="us")
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file.path}: not a readable Parquet file: {error}") from error


def read_group(file: Any, path: str, group: int, **how: Any) -> pa.Table:
    """One row group of a `pyarrow.parquet.ParquetFile`; InputError if its bytes are damaged."""
    wanted = file.metadata.row_group(group).num_rows
    try:
        table = file.read_row_group(group, **how)
        if table.num_rows != wanted:
            raise pa.ArrowInvalid(f"it has {table.num_rows} of its {wanted} rows")
        return table
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: row group {group} can't be read, the file is damaged: {reason}") from error


def read_values(footer: Any, columns: Iterable[str]) -> list[int]:
    """Number of stored values of the columns in each row group, including columns that pyarrow also reads (`item.views`
    if `item` is requested, as it may be a part of it).

    A file of a few kilobytes may hold hundreds of millions of values, as runs of one value cost nothing there. A row
    group is read whole and only then cut to a sequence's `max_length`."""
    wanted = set(columns)
    paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
    read = [index for index, path in enumerate(paths) if any(prefix in wanted for prefix in _prefixes(path))]
    groups = (footer.row_group(number) for number in range(footer.num_row_groups))
    return [sum(group.column(index).num_values for index in read) for group in groups]


def leaves(schema: Any, count: int) -> dict[str, int]:
    """The Parquet column number (of `count`) of each field of the Arrow schema that has exactly one. Names are
    ambiguous: `item.views` may be a field of this name or a part of `item`."""
    sizes = [_leaf_count(field.type) for field in schema]
    if sum(sizes) != count:
        return {}
    starts = np.cumsum([0, *sizes])
    names = schema.names
    return {name: int(starts[i]) for i, name in enumerate(names) if sizes[i] == 1 and names.count(name) == 1}


def _leaf_count(kind: Any) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf_count(kind.storage_type)
    if pt.is_dictionary(kind):
        return _leaf_count(kind.value_type)
    return sum(_leaf_count(kind.field(index).type) for index in range(kind.num_fields)) if kind.num_fields else 1


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
