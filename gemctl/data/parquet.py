"""A data set of Parquet files (files.py says which): its row-group index, and rows by number.

    source = ParquetSource("data/train.parquet", spec, histories=True)
    source.read(np.array([40_000, 3]))      # a RowBlock with these two rows, in this order

Opening reads the footers and checks the schema of every file against the spec: all problems at once. Only needed
columns are read, a row group at a time; the last `keep` decoded row groups stay in memory, and MOST_OPEN files open.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types as pt

from gemctl.data.decode import Place, decode
from gemctl.data.files import DataFile, DataPath, find_files
from gemctl.data.rows import RowBlock, concatenate
from gemctl.errors import InputError
from gemctl.specs.data import FeatureSpec

MOST_OPEN = 32  # data sets have more files than a process may open


class ParquetSource:
    """Rows of all files, numbered through in the files' order.

    `group_rows`: rows of each row group; `keep`: decoded row groups that stay in memory (least recently used go
    first). Not thread-safe: one reader per thread.
    """

    def __init__(self, url: DataPath, spec: FeatureSpec, *, histories: bool = True) -> None:
        self.url, self.spec, self.histories, self.keep = url, spec, histories, 1
        self._needed = needed_columns(spec, histories=histories)
        found = find_files(url)
        self.ignored, self._files = found.ignored, found.files
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._footers: list[Any] = []
        problems: list[str] = []
        for index, file in enumerate(self._files):
            opened = self._opened(index)
            self._footers.append(opened.metadata)
            problems += self._check(file, opened)
        if problems:
            raise InputError(problems)
        self._groups = [(f, g) for f, footer in enumerate(self._footers) for g in range(footer.num_row_groups)]
        self.group_rows = [self._footers[f].row_group(g).num_rows for f, g in self._groups]
        self._starts = np.concatenate([[0], np.cumsum(self.group_rows, dtype=np.int64)])
        self.row_count = int(self._starts[-1])
        self._decoded: OrderedDict[int, RowBlock] = OrderedDict()

    def read(self, rows: np.ndarray) -> RowBlock:
        """The rows of these numbers (int64 [B], 0 ≤ row < row_count) in their order."""
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        # in order of first need, so that a batch over two windows is done with the first before it reads the second
        groups, first = np.unique(owners, return_index=True)
        pieces, positions = [], []
        for group in groups[np.argsort(first)]:
            mine = np.flatnonzero(owners == group)
            pieces.append(self._group(int(group)).take(rows[mine] - self._starts[group]))
            positions.append(mine)
        if not pieces:
            return self._empty()
        return concatenate(pieces).take(np.argsort(np.concatenate(positions)))

    def close(self) -> None:
        """Closes the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _opened(self, index: int) -> Any:
        """The file of this number as a `pyarrow.parquet.ParquetFile`."""
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
        # no threads: a rank's prefetch thread reads while the rank's other cores compute
        path, columns = self._files[file].path, list(self._needed)
        table = read_group(self._opened(file), path, group, columns=columns, use_threads=False)
        place = Place(path, group, int(self._starts[index]))
        block = decode(table, self.spec, place, histories=self.histories)
        self._decoded[index] = block
        return block

    def _empty(self) -> RowBlock:
        table = self._opened(0).schema_arrow.empty_table()
        return decode(table, self.spec, Place(self._files[0].path, 0, 0), histories=self.histories)

    def _check(self, file: DataFile, opened: Any) -> Iterable[str]:
        path, schema = file.path, opened.schema_arrow
        if twice := [problem for name, problem in repeated(path, schema).items() if name in self._needed]:
            yield from twice
            return
        for name, (role, legal, wanted) in self._needed.items():
            if name not in schema.names and name in file.partition_keys():
                yield (
                    f"{path}: no column {name!r}, needed as {role}: it is a key of the folders' names, which is not "
                    "read as a column: write it into the files, too"
                )
            elif name not in schema.names:
                near = get_close_matches(name, schema.names, n=1)
                hint = f"nearest: {near[0]}" if near else f"there are: {', '.join(schema.names)}"
                yield f"{path}: no column {name!r}, needed as {role} ({hint})"
            elif not legal(schema.field(name).type):
                yield f"{path}: column {name!r} is {schema.field(name).type}, needed is {wanted}, as {role}"
        yield from _same_clock(path, schema, self.spec, self.histories)


def open_file(file: DataFile, footer: Any = None) -> Any:
    """The file as a `pyarrow.parquet.ParquetFile`; `footer`: its metadata, where that has been read before."""
    try:
        return pq.ParquetFile(file.path if file.local else file.filesystem.open(file.path, "rb"), metadata=footer)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{file.path}: not a readable Parquet file: {error}") from error


def read_group(file: Any, path: str, group: int, **how: Any) -> pa.Table:
    """One row group of a `pyarrow.parquet.ParquetFile`; InputError where its bytes are damaged."""
    try:
        return file.read_row_group(group, **how)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: row group {group} can't be read, the file is damaged: {reason}") from error


def repeated(path: str, schema: Any) -> dict[str, str]:
    """By name that several columns have, which so means none of them: the problem."""
    counts = Counter(schema.names)
    return {name: f"{path}: {n} columns are called {name!r}: rename all but one" for name, n in counts.items() if n > 1}


Need = tuple[str, Callable[[Any], bool], str]  # role, what types are legal, and in words


def is_list(kind: Any) -> bool:
    return pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)


def _is_number(kind: Any) -> bool:
    return pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_null(kind)


def _is_time(kind: Any) -> bool:
    return pt.is_integer(kind) or pt.is_floating(kind) or pt.is_timestamp(kind)


def _is_hashable(kind: Any) -> bool:
    kind = kind.value_type if pt.is_dictionary(kind) else kind
    return pt.is_integer(kind) or pt.is_string(kind) or pt.is_large_string(kind)


def _is_integer(kind: Any) -> bool:
    return pt.is_integer(kind.value_type if pt.is_dictionary(kind) else kind)


def _lists(legal: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda kind: is_list(kind) and legal(kind.value_type)


def needed_columns(spec: FeatureSpec, *, histories: bool) -> dict[str, Need]:
    """What is read, and what each column must be. A column with two roles keeps the stricter first one's check."""
    hashed = {table.name: table.ids == "hash" for table in spec.tables}
    needs: dict[str, Need] = {}

    def need(column: str, role: str, legal: Callable[[Any], bool], wanted: str) -> None:
        needs.setdefault(column, (role, legal, wanted))

    def need_ids(column: str, role: str, table: str, many: bool) -> None:
        legal, wanted = (_is_hashable, "integers or strings") if hashed[table] else (_is_integer, "integers")
        need(column, role, _lists(legal) if many else legal, f"lists of {wanted}" if many else wanted)

    for feature in spec.categorical:
        need_ids(feature.column or feature.name, f"categorical {feature.name!r}", feature.table, feature.multi)
    for dense in spec.dense:
        need(dense.column or dense.name, f"dense {dense.name!r}", _is_number, "a number")
    if histories and spec.sequences:
        need(spec.timestamp or "", "timestamp", _is_time, "an integer, a float or a timestamp")
        for sequence in spec.sequences:
            role = f"sequence {sequence.name!r}"
            need(sequence.timestamps, role, _lists(_is_time), "lists of integers, floats or timestamps")
            for event in sequence.ids:
                need_ids(event.column or event.name, role, event.table, many=True)
            for dense in sequence.floats:
                need(dense.column or dense.name, role, _lists(_is_number), "lists of numbers")
    for label in spec.labels:
        need(label.column or label.name, f"label {label.name!r}", _is_number, "0/1 numbers or booleans")
        if label.mask:
            need(label.mask, f"mask of label {label.name!r}", _is_number, "0/1 numbers or booleans")
    if spec.domain:
        need(spec.domain.column, "domain", _is_integer, "integers")
    for column, role in ((spec.weight, "weight"), (spec.true_probability, "true_probability")):
        if column:
            need(column, role, _is_number, "a number")
    return needs


def _same_clock(path: str, schema: Any, spec: FeatureSpec, histories: bool) -> Iterable[str]:
    """Ages are differences, so rows and events must both have Arrow timestamps or both plain numbers."""
    row = spec.timestamp
    for sequence in spec.sequences if histories and row in schema.names else []:
        name = sequence.timestamps
        if name not in schema.names or not is_list(schema.field(name).type):
            continue
        ours, theirs = schema.field(row).type, schema.field(name).type.value_type
        if _is_time(ours) and _is_time(theirs) and pt.is_timestamp(ours) != pt.is_timestamp(theirs):
            yield f"{path}: column {name!r} holds {theirs}, column {row!r} {ours}: they must have one unit"
