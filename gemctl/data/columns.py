"""Which Arrow types each role of a feature spec accepts, and which columns must agree with each other.

    uses = column_uses(spec, histories=True)
    shared, problems = check_schema(file, schema, uses)   # one file's schema against the spec
    problems += disagreements(shared)                     # and all files' schemas against each other

Types with the same meaning have one `Kind`, whatever their width, sign or encoding. Where the kind decides what a value
means, it must be the same in all columns concerned and in all files, training and evaluation alike: the string "7" and
the integer 7 have different hashes, an integer time has no unit, a timestamp without a time zone is not an instant.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pyarrow import types as pt

from gemctl.data.files import DataFile
from gemctl.specs.data import FeatureSpec
from gemctl.suggest import did_you_mean


class Kind(Enum):
    """The meaning of a column's values."""

    NOTHING = "nulls alone"  # Arrow's null type, accepted in every role: all values are missing
    INTEGERS = "integers"
    FLOATS = "floats"
    BOOLEANS = "booleans"
    STRINGS = "strings"
    INSTANTS = "timestamps with a time zone"
    LOCAL_TIMES = "timestamps without a time zone"
    DATES = "dates"


NUMBERS = frozenset({Kind.INTEGERS, Kind.FLOATS, Kind.BOOLEANS})
IDS = {"vocab": frozenset({Kind.INTEGERS}), "hash": frozenset({Kind.INTEGERS, Kind.STRINGS})}
TIMES = frozenset({Kind.INTEGERS, Kind.FLOATS, Kind.INSTANTS, Kind.LOCAL_TIMES, Kind.DATES})
CLOCK = "clock"


def kind_of(type_: Any) -> Kind | None:
    """The kind of an Arrow type that is not a list; None for types that no role accepts."""
    if pt.is_dictionary(type_):
        return kind_of(type_.value_type)
    if pt.is_decimal(type_):
        return Kind.FLOATS if type_.scale > 0 else Kind.INTEGERS
    if pt.is_timestamp(type_):
        return Kind.INSTANTS if type_.tz else Kind.LOCAL_TIMES
    tests = {
        Kind.NOTHING: pt.is_null,
        Kind.INTEGERS: pt.is_integer,
        Kind.FLOATS: pt.is_floating,
        Kind.BOOLEANS: pt.is_boolean,
        Kind.STRINGS: lambda t: pt.is_string(t) or pt.is_large_string(t) or pt.is_string_view(t),
        Kind.DATES: pt.is_date,
    }
    return next((kind for kind, test in tests.items() if test(type_)), None)


def is_list(type_: Any) -> bool:
    return any(
        test(type_)
        for test in (pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view, pt.is_large_list_view)
    )


@dataclass(frozen=True)
class Use:
    """A column in one role. `agrees`: a group whose columns must all have the same kind, or None."""

    column: str
    role: str
    kinds: frozenset[Kind]
    wanted: str  # `kinds` in words
    many: bool = False  # lists
    agrees: str | None = None


@dataclass(frozen=True)
class SharedColumn:
    """A column of a file that must agree with others: all columns of a group `use.agrees` must have the same `sort`."""

    file: str
    use: Use
    type: Any
    sort: str


def column_uses(spec: FeatureSpec, *, histories: bool) -> list[Use]:
    """Every column that is read, once per role; without `histories` those of sequences and times are left out."""
    tables = {table.name: table for table in spec.tables}
    uses: list[Use] = []

    def add_ids(column: str, role: str, table: str, many: bool) -> None:
        ids = tables[table].ids
        wanted = "integers or strings" if ids == "hash" else "integers"
        agrees = f"table {table!r}" if ids == "hash" else None
        uses.append(Use(column, role, IDS[ids], f"lists of {wanted}" if many else wanted, many, agrees))

    def add_number(column: str | None, role: str, wanted: str = "a number", many: bool = False) -> None:
        if column:
            uses.append(Use(column, role, NUMBERS, wanted, many))

    for feature in spec.categorical:
        add_ids(feature.column or feature.name, f"categorical {feature.name!r}", feature.table, feature.multi)
    for dense in spec.dense:
        add_number(dense.column or dense.name, f"dense {dense.name!r}")
    if histories and spec.sequences and spec.timestamp:
        times = "integers, floats, timestamps or dates"
        uses.append(Use(spec.timestamp, "timestamp", TIMES, times, agrees=CLOCK))
        for sequence in spec.sequences:
            role = f"sequence {sequence.name!r}"
            uses.append(Use(sequence.timestamps, role, TIMES, f"lists of {times}", many=True, agrees=CLOCK))
            for event in sequence.ids:
                add_ids(event.column or event.name, role, event.table, many=True)
            for dense in sequence.floats:
                add_number(dense.column or dense.name, role, "lists of numbers", many=True)
    for label in spec.labels:
        add_number(label.column or label.name, f"label {label.name!r}", "0/1 numbers or booleans")
        add_number(label.mask, f"mask of label {label.name!r}", "0/1 numbers or booleans")
    if spec.domain:
        uses.append(Use(spec.domain.column, "domain", frozenset({Kind.INTEGERS}), "integers"))
    add_number(spec.weight, "weight")
    add_number(spec.true_probability, "true_probability")
    return uses


def check_schema(file: DataFile, schema: Any, uses: Iterable[Use]) -> tuple[list[SharedColumn], list[str]]:
    """The columns of a file (its Arrow `schema`) that must agree with others, and the problems of the file itself."""
    shared: list[SharedColumn] = []
    problems = list(repeated(file.path, schema, {use.column for use in uses}).values())
    if problems:
        return shared, problems
    missing = set()
    for use in uses:
        if use.column not in schema.names:
            if use.column not in missing:
                problems.append(_missing(file, use, schema.names))
            missing.add(use.column)
            continue
        type_ = schema.field(use.column).type
        inner = type_.value_type if use.many and is_list(type_) else type_
        kind = kind_of(inner)
        if (use.many and inner is type_ and kind is not Kind.NOTHING) or kind not in use.kinds | {Kind.NOTHING}:
            problems.append(f"{file.path}: column {use.column!r} is {type_}; {use.role} needs {use.wanted}")
        elif use.agrees and kind is not Kind.NOTHING:
            shared.append(SharedColumn(file.path, use, type_, _sort(use, kind)))
    return shared, problems


def repeated(path: str, schema: Any, needed: set[str] | None = None) -> dict[str, str]:
    """The problem of each name that several columns have, so that it is ambiguous. `needed`: check only these names."""
    counts = Counter(name for name in schema.names if needed is None or name in needed)
    return {name: f"{path}: {n} columns are called {name!r}: rename all but one" for name, n in counts.items() if n > 1}


def disagreements(shared: Iterable[SharedColumn]) -> list[str]:
    """A line for every sort that differs from the first one of its group, with the first column of each."""
    groups: dict[str, dict[str, list[SharedColumn]]] = {}
    for column in shared:
        groups.setdefault(column.use.agrees or "", {}).setdefault(column.sort, []).append(column)
    return [
        _disagreement(group, first[0], others)
        for group, sorts in groups.items()
        for first in [next(iter(sorts.values()))]
        for others in list(sorts.values())[1:]
    ]


def _disagreement(group: str, first: SharedColumn, others: list[SharedColumn]) -> str:
    rule = (
        "row and event times must all be timestamps with a time zone, timestamps without one, dates, or numbers of one "
        "unit"
        if group == CLOCK
        else f'ids of the hashed {group} must all be integers or all be strings, as 7 and "7" have different rows'
    )
    other, more = others[0], f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    where = "" if first.file == other.file else f" of {first.file}"
    return (
        f"{other.file}: column {other.use.column!r} is {other.type}{more}, "
        f"but column {first.use.column!r}{where} is {first.type}: {rule}"
    )


def _sort(use: Use, kind: Kind | None) -> str:
    """What must be the same; for times, numbers of any kind are one sort."""
    return "numbers" if use.agrees == CLOCK and kind in NUMBERS else str(kind)


def _missing(file: DataFile, use: Use, names: list[str]) -> str:
    needed = f"{file.path}: no column {use.column!r}, needed as {use.role}"
    if use.column in file.partition_keys():
        return f"{needed}: it is a key in folder names, which are not read as columns; write it into the files too"
    return needed + (did_you_mean(use.column, names) or f" (columns: {', '.join(names)})")
