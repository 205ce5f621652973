"""Random feature specs and Parquet data sets for them: every type in every role, in several files, right and wrong.

    case = Case(17, folder)      # the same spec and files whenever it is made

A third of the cases has faults: types and values that a role does not take, columns that are not there, lists that are
not aligned, files that disagree. In the others types still differ from file to file as much as they may.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gemctl.specs.data import (
    CategoricalSpec,
    DenseSpec,
    DomainSpec,
    EventIdSpec,
    FeatureSpec,
    LabelSpec,
    SequenceSpec,
    TableSpec,
)
from tests.data.parquet_oracle import File
from tests.data.parquet_types import (
    CLOCKS,
    EVERYTHING,
    FAMILIES,
    INTEGERS,
    LISTS,
    NO_ROLE,
    NUMBERS,
    STRINGS,
    Clock,
    fitted,
)

NAMES = [
    "a",
    "b",
    "item",
    "item.id",
    "seen.time",
    "user id",
    "größe",
    "list",
    "element",
    "x=1",
    "c-d",
    "q'",
    "A",
    "ä b",
]
ROWS = [2, 3, 50, 129, 257, 300, 40_001, 2**31 + 2]


class Case:
    """A spec, and the files of one or two data sets for it, written below `folder`."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self._random = seed, random.Random(seed)
        self._faults = self._random.choice([0, 0, 0, 0, 0.01, 0.03, 0.1])
        self._names = [f"{self._pick(NAMES)}{n if n else ''}" for n in range(60)]
        self.histories = not self._chance(0.08)
        self.spec = self._spec()
        self._kinds, self._clock = self._sorts()
        self.train = self._files(folder / "train", self._random.choice([1, 1, 2, 2, 3]))
        self.eval = self._files(folder / "eval", 1) if self._chance(0.25) else []

    # chance

    def _pick(self, values: Any) -> Any:
        return values[self._random.randrange(len(values))]

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _fault(self) -> bool:
        return bool(self._faults) and self._chance(self._faults)

    # the spec

    def _spec(self) -> FeatureSpec:
        count = self._random.randint(1, 4)
        tables = [TableSpec(f"t{n}", self._pick(ROWS), self._pick(["vocab", "hash"])) for n in range(count)]
        names = iter(self._names)
        features = [
            CategoricalSpec(f"c{n}", table.name, next(names), multi=self._chance(0.3))
            for n, table in enumerate([*tables, self._pick(tables)])
        ]
        dense = [DenseSpec(f"d{n}", next(names), log=self._chance(0.4)) for n in range(self._random.randint(0, 3))]
        pooled = {f.table for f in features if f.multi}
        unpooled = [table for table in tables if table.name not in pooled]
        vocabularies = {table.name for table in tables if table.ids == "vocab"}
        shared = [f.column for f in features if not f.multi and f.table in vocabularies]
        if shared and self._chance(0.2):
            dense.append(DenseSpec("shared", shared[0]))
        sequences = [
            SequenceSpec(
                f"s{n}",
                [
                    EventIdSpec(f"e{i}", self._pick(unpooled).name, next(names))
                    for i in range(self._random.randint(1, 2))
                ],
                next(names),
                [DenseSpec(f"f{i}", next(names), log=self._chance(0.5)) for i in range(self._random.randint(0, 2))],
                self._pick([1, 2, 3, 10_000]),
            )
            for n in range(self._random.choice([0, 1, 1, 2]) if unpooled else 0)
        ]
        labels = [
            LabelSpec(f"l{n}", next(names), next(names) if self._chance(0.4) else None)
            for n in range(self._random.randint(1, 2))
        ]
        return FeatureSpec(
            "fuzz",
            tables,
            labels,
            features,
            dense,
            sequences,
            next(names) if sequences else None,
            DomainSpec(next(names), self._pick([1, 3, 100])) if self._chance(0.4) else None,
            next(names) if self._chance(0.4) else None,
            next(names) if self._chance(0.3) else None,
        )

    def _sorts(self) -> tuple[dict[str, list[pa.DataType]], list[pa.DataType]]:
        """What all files must agree on: the types of each table's ids, and those of the times."""
        kinds = {t.name: STRINGS if t.ids == "hash" and self._chance(0.5) else INTEGERS for t in self.spec.tables}
        return kinds, self._pick(CLOCKS)

    # files

    def _files(self, folder: Path, count: int) -> list[File]:
        folder.mkdir()
        return [self._file(folder / f"part-{n}.parquet") for n in range(count)]

    def _file(self, path: Path) -> File:
        if self._faults and self._chance(0.15):
            self._kinds, self._clock = self._sorts()
        rows = self._random.choice([0, 1, *range(3, 26)])
        columns = self._columns(rows)
        schema = self._schema(columns)
        table = pa.table(list(columns.values()), schema=schema)
        if rows > 1 and self._chance(0.3):  # as several chunks
            cut = self._random.randrange(rows)
            table = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
        return self._write(path, table, rows)

    def _schema(self, columns: dict[str, pa.Array]) -> pa.Schema:
        """The columns in any order, with others among them; sometimes not nullable where nothing is null."""
        for _ in range(self._random.randint(0, 3)):
            kind, rows = self._pick([*NO_ROLE, *EVERYTHING]), len(next(iter(columns.values())))
            columns[f"{self._pick([*columns, 'other'])}.{self._pick(NAMES)}"] = pa.array([None] * rows, kind)
        names = list(columns)
        self._random.shuffle(names)
        for name in names:
            columns[name] = columns.pop(name)
        strict = self._chance(0.3)
        return pa.schema(
            [pa.field(n, a.type, nullable=not (strict and a.null_count == 0 and len(a))) for n, a in columns.items()]
        )

    def _write(self, path: Path, table: pa.Table, rows: int) -> File:
        if self._fault():
            table = self._broken(table)
        group = self._pick([max(rows, 1), max(rows, 1), max(rows // 2, 1), max(rows // 4, 1)])
        nanos = any("timestamp[ns" in str(field.type) for field in table.schema)
        int96 = self._chance(0.1) and not nanos
        options: dict[str, Any] = {
            "compression": self._pick(["none", "snappy", "gzip", "brotli", "zstd", "lz4"]),
            "data_page_version": self._pick(["1.0", "2.0"]),
            "version": self._pick(["2.6", "2.6", "2.4", "1.0"]) if not nanos else "2.6",
            "use_dictionary": self._chance(0.6),
            "use_byte_stream_split": False,
            "data_page_size": self._pick([512, 1 << 20]),
            "write_batch_size": self._pick([1, 1024]),
            "store_schema": self._chance(0.7),
            "use_compliant_nested_type": self._chance(0.8),
            "store_decimal_as_integer": self._chance(0.3),
            "write_page_index": self._chance(0.3),
            "write_statistics": self._chance(0.8),
            "use_deprecated_int96_timestamps": int96,
        }
        if any("duration" in str(field.type) for field in table.schema):
            options["store_schema"] = True  # else nothing in the file says that they are no integers
        if not options["use_dictionary"]:
            options["column_encoding"] = self._encodings(table.schema)
        pq.write_table(table, path, row_group_size=group, **options)
        return File(str(path), table, group, int96)

    def _encodings(self, schema: pa.Schema) -> dict[str, str]:
        """Encodings other than PLAIN for flat columns of types that have some."""
        fitting = {
            "int32": ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"],
            "int64": ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"],
            "float": ["BYTE_STREAM_SPLIT"],
            "double": ["BYTE_STREAM_SPLIT"],
            "string": ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"],
            "bool": ["RLE"],
        }
        flat = {field.name: fitting.get(str(field.type), ["PLAIN"]) for field in schema if "." not in field.name}
        return {name: self._pick(["PLAIN", *encodings]) for name, encodings in flat.items()}

    def _broken(self, table: pa.Table) -> pa.Table:
        """Without a column, with one twice, or with one renamed."""
        index = self._random.randrange(table.num_columns)
        how = self._random.randrange(3)
        if how == 0 and table.num_columns > 1:
            return table.remove_column(index)
        if how == 1:
            return table.append_column(table.schema.field(index), table.column(index))
        names = table.schema.names
        return table.rename_columns([f"{name}_" if n == index else name for n, name in enumerate(names)])

    # columns

    def _columns(self, rows: int) -> dict[str, pa.Array]:
        spec, found = self.spec, dict[str, pa.Array]()
        tables = {table.name: table for table in spec.tables}
        for feature in spec.categorical:
            table = tables[feature.table]
            kind = self._type(self._kinds[table.name])
            one = partial(self._id, kind, table)
            if feature.multi:
                found[feature.column or ""] = self._lists(kind, [self._pick([0, 0, 1, 2, 3]) for _ in range(rows)], one)
            else:
                found[feature.column or ""] = pa.array([one() for _ in range(rows)], kind)
        for dense in spec.dense:
            if dense.column not in found:
                kind = self._type(NUMBERS)
                found[dense.column or ""] = pa.array([self._dense(kind) for _ in range(rows)], kind)
        for column, legal, usual, wrong, nulls in self._plain_columns():
            if column:
                kind = self._type(legal, nulls)
                values = [self._number(kind, self._pick(usual), wrong) for _ in range(rows)]
                missing = 0.1 if nulls else self._faults / 4
                found[column] = pa.array([None if self._chance(missing) else value for value in values], kind)
        if spec.timestamp:
            self._histories(found, rows, tables)
        return found

    def _plain_columns(self) -> Iterator[tuple[str | None, list[pa.DataType], Sequence[float], Sequence[float], bool]]:
        """Column, types, right values, wrong ones, and whether it may be null."""
        for label in self.spec.labels:
            yield label.column, NUMBERS, [0, 1], [2, -1, 1 + 1e-12], True
            yield label.mask, NUMBERS, [0, 1], [2, -1, 1 + 1e-12], True
        if domain := self.spec.domain:
            yield domain.column, INTEGERS, range(domain.count), [domain.count, -1], False
        yield self.spec.weight, NUMBERS, [0, 1, 0.5, 20], [-1, math.inf, 1e300], False
        yield self.spec.true_probability, NUMBERS, [0, 1, 0.5], [27.5, -0.25], True

    def _type(self, legal: list[pa.DataType], nulls: bool = True) -> pa.DataType:
        if self._fault():
            return self._pick(self._pick([NO_ROLE, *FAMILIES]))
        return pa.null() if nulls and self._chance(0.03) else self._pick(legal)

    def _histories(self, found: dict[str, pa.Array], rows: int, tables: dict[str, TableSpec]) -> None:
        row_kind = self._type(self._clock)
        if beyond := bool(self._faults) and self._clock is CLOCKS[0] and self._chance(0.3):  # int64's range
            row_kind = self._pick([pa.uint64(), pa.decimal128(20, 0)])
        kinds = {s.name: self._type(self._clock) for s in self.spec.sequences}
        clock = Clock(self._random, [row_kind, *kinds.values()])
        times = [None if row_kind == pa.null() or self._chance(0.1) else clock.row() for _ in range(rows)]
        ticks = [None if time is None else clock.as_type(time, row_kind) for time in times]
        if beyond:
            ticks = [time and fitted(row_kind, self._pick([time, 2**63 + 5]), self._random) for time in ticks]
        found[self.spec.timestamp or ""] = pa.array(ticks, row_kind)
        for s in self.spec.sequences:
            size = self._pick([None, None, None, None, 1, 3])  # of fixed-size lists
            timeless = kinds[s.name] == pa.null()
            lengths = [0 if timeless or time is None else self._length(size) for time in times]
            events = [sorted(clock.event(time or 0) for _ in range(n)) for time, n in zip(times, lengths, strict=True)]
            if self._fault():
                self._spoil(events, times)
            stamps = iter([clock.as_type(time, kinds[s.name]) for row in events for time in row])
            found[s.timestamps] = self._lists(kinds[s.name], lengths, stamps.__next__, size)
            for event in s.ids:
                table = tables[event.table]
                kind = self._type(self._kinds[table.name])
                one = partial(self._id, kind, table)
                found[event.column or ""] = self._lists(kind, self._other(lengths), one, size)
            for dense in s.floats:
                kind = self._type(NUMBERS)
                found[dense.column or ""] = self._lists(kind, self._other(lengths), partial(self._dense, kind), size)

    def _length(self, size: int | None) -> int:
        """Of a list; where some column may have lists of a fixed size, that or 0."""
        if size:
            return size if self._chance(0.8) else 0
        return self._random.randint(0, 5)

    def _other(self, lengths: list[int]) -> list[int]:
        """The lengths; with a fault, one of them is another one."""
        if not (lengths and self._fault()):
            return lengths
        row = self._random.randrange(len(lengths))
        return [n + (row == index) for index, n in enumerate(lengths)]

    def _spoil(self, events: list[list[Any]], times: list[Any]) -> None:
        """Turns a history around, or lets an event be as late as its row."""
        filled = [n for n, row in enumerate(events) if row]
        if filled:
            row = self._pick(filled)
            events[row].reverse()
            if self._chance(0.5):
                events[row][-1] = times[row]

    def _lists(
        self, kind: pa.DataType, lengths: list[int], value: Callable[[], Any], size: int | None = None
    ) -> pa.Array:
        """Lists of `lengths`; of a fixed `size` too, where all have it or are empty. Some empty ones are null."""
        lists: list[list[Any] | None] = [[value() for _ in range(n)] for n in lengths]
        if any(lengths) and self._fault():
            row = self._pick([row for row in lists if row])
            row[self._random.randrange(len(row))] = None
        fixed = size is not None and set(lengths) <= {0, size} and self._chance(0.5)
        lists = [None if row == [] and (fixed or self._chance(0.3)) else row for row in lists]
        if kind == pa.null() and not any(lists) and self._chance(0.5):
            return pa.nulls(len(lists))
        if self._fault():
            return pa.array([row[0] if row else None for row in lists], kind)
        return pa.array(lists, pa.list_(kind, size) if fixed else self._pick(LISTS)(kind))

    # values

    def _id(self, kind: pa.DataType, table: TableSpec) -> Any:
        if self._chance(0.1):
            return None
        near = self._pick([0, 1, table.rows - 2, table.rows - 1, table.rows, -1, self._random.randrange(table.rows)])
        wide = self._random.choice([2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 127, 128, 255, 256, -128, 2**70])
        return self._number(kind, near if self._chance(0.8) else wide, [])

    def _dense(self, kind: pa.DataType) -> Any:
        if self._chance(0.1):
            return None
        usual = [0, 1, -3, 0.5, 2**53 + 1, 2**63 - 1, 2**64 - 1, -1e-3, 1e30, math.nan, self._random.gauss(0, 100)]
        return self._number(kind, self._pick(usual), [math.inf, -1e300])

    def _number(self, kind: pa.DataType, value: float, wrong: Sequence[float]) -> Any:
        """`value` as a type holds it, else something near; with a fault one of `wrong` instead."""
        if wrong and self._fault():
            value = self._pick(wrong)
        return fitted(kind, value, self._random)
