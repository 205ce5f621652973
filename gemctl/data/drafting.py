"""Guesses a feature spec from a Parquet file, with a comment that says why for each guess.

    gemctl data spec clicks.parquet -o spec.yaml

A guess rests on a column's type, its name and a sample of the first rows. The draft always loads, and what could not
be given a role stands in it as a comment: its author should read every line.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from pyarrow import types as pt

from gemctl import paths
from gemctl.data.describe import Column, as_times, describe
from gemctl.data.files import DataPath, find_files, shown
from gemctl.data.parquet import ParquetSource, open_file
from gemctl.errors import InputError
from gemctl.specs.feature_spec import TAKEN, parse, scalar


def _words(words: str, end: bool = False) -> re.Pattern[str]:
    """Matches names that have one of the words between underscores, or as their last word."""
    return re.compile(rf"(^|_)({'|'.join(words.split())}){'$' if end else '(_|$)'}", re.I)


_TIME = _words("times? timestamps? ts date datetime at")
_ID = _words("ids? uid user item key code category cat type class brand slot segment city country device os", end=True)
_LABEL = _words(
    "labels? clicks? clicked likes? liked purchased? buy bought convert(ed)? conversion target y shared? follow(ed)? "
    "long_view watched installed"
)
_PREDICTION = _words("prob probability pred prediction predicted pctr pcvr")
_WEIGHT = re.compile(r"(sample_?|example_?|row_?)?weights?", re.I)
_DOMAIN = re.compile(r"(domain|surface|scenario|channel)(_id)?", re.I)
_HISTORY = r"(hist|history|histories|past|recent|seq|sequence|clicked|viewed|list|last|event|events)"
_FEW = 32  # integers with so few values are ids whatever their name


@dataclass(frozen=True)
class Draft:
    """The spec's `text`, the columns that got no role with the reason, and where it was written (None: nowhere)."""

    text: str
    rows_seen: int
    undecided: dict[str, str]
    path: str | None = None


@dataclass
class _Guess:
    """Parts of the spec as they come together: lines with their comments."""

    top: list[str] = field(default_factory=list)
    tables: dict[str, list[Column]] = field(default_factory=dict)  # the columns whose ids each holds
    categorical: list[str] = field(default_factory=list)
    dense: list[str] = field(default_factory=list)
    sequences: list[str] = field(default_factory=list)
    sequence_tables: set[str] = field(default_factory=set)
    labels: list[str] = field(default_factory=list)
    undecided: dict[str, str] = field(default_factory=dict)


def draft(url: DataPath, labels: list[str]) -> Draft:
    """A draft for the Parquet files of `url`; `labels`: label columns, where their names do not tell."""
    first = find_files(url).files[0]
    table, columns = describe(open_file(first), first.path)
    if table.num_rows == 0:
        raise InputError(f"{first.path}: no rows to learn from")
    guess = _Guess()
    left = _labels(guess, columns, labels, shown(url))
    time, left = _row_roles(guess, left)
    left = _sequences(guess, left, time)
    for column in left:
        _feature(guess, column)
    name = re.sub(r"\W", "_", first.path.rsplit("/", 1)[-1].removesuffix(".parquet"))
    text = "\n".join(_lines(guess, shown(url), name, table.num_rows)) + "\n"
    return Draft(text + _trial(url, text, table.num_rows), table.num_rows, guess.undecided)


def _labels(guess: _Guess, columns: list[Column], named: list[str], url: str) -> list[Column]:
    known = {column.name: column for column in columns}
    problems = [f"{url}: --label {name}: no such column" for name in named if name not in known]
    problems += [
        f"{url}: --label {name}: a label is 0 or 1; this column is {known[name].kind}, {known[name].seen()}"
        for name in named
        if name in known and not known[name].binary
    ]
    binary = [column.name for column in columns if column.binary and column.distinct == 2]
    chosen = named or [name for name in binary if _LABEL.search(name)] or (binary if len(binary) == 1 else [])
    if not chosen:
        seen = f"columns of 0 and 1: {', '.join(binary)}" if binary else "no column holds just 0 and 1"
        problems.append(f"{url}: which column is the label? Give --label COLUMN ({seen})")
    if problems:
        raise InputError(problems)
    why = "named by --label" if named else "0 and 1, and named like an outcome"
    for name in chosen:
        guess.labels.append(f"{_entry(name)}}}  # {why}; {known[name].seen()}")
    return [column for column in columns if column.name not in chosen]


def _row_roles(guess: _Guess, columns: list[Column]) -> tuple[Column | None, list[Column]]:
    """Finds the row's time, weight and domain, and columns that can't be a feature."""
    times = [c for c in columns if not c.many and (pt.is_timestamp(c.kind) or (c.number and _TIME.search(c.name)))]
    times.sort(key=lambda c: (c.name.lower() not in {"timestamp", "time", "ts"}, not pt.is_timestamp(c.kind)))
    time = times[0] if times else None
    if time:
        guess.top.append(f"timestamp: {scalar(time.name)}  # named or typed like the row's time; {time.seen()}")
    left, has_domain, has_weight = [], False, False
    for column in columns:
        if column is time:
            continue
        unit = column.low is not None and column.low >= 0
        if any(column is other for other in times):
            guess.undecided[column.name] = "a second time"
        elif not column.many and unit and _WEIGHT.fullmatch(column.name) and not has_weight:
            guess.top.append(f"weight: {scalar(column.name)}  # by its name; {column.seen()}")
            has_weight = True
        elif not column.many and column.integer and unit and _DOMAIN.fullmatch(column.name) and not has_domain:
            count = int(column.high or 0) + 1
            guess.top.append(
                f"domain: {{column: {scalar(column.name)}, count: {count}}}  # by its name; {column.seen()}"
            )
            has_domain = True
        elif _PREDICTION.search(column.name):
            guess.undecided[column.name] = "named like a prediction: as a feature it might tell the answer"
        elif not (column.number or column.text or pt.is_timestamp(column.kind)):
            guess.undecided[column.name] = f"type {column.kind} has no role"
        elif column.distinct <= 1:
            guess.undecided[column.name] = f"the same everywhere; {column.seen()}"
        else:
            left.append(column)
    return time, left


def _sequences(guess: _Guess, columns: list[Column], time: Column | None) -> list[Column]:
    """Makes an event sequence of each list of times with the lists that are as long as it."""
    left = list(columns)
    for clock in columns:
        if not clock.many or not (pt.is_timestamp(clock.kind) or (clock.number and _TIME.search(clock.name))):
            continue
        left = [c for c in left if c is not clock]
        members = [c for c in left if c.many and np.array_equal(c.lengths, clock.lengths)]
        reason = _why_no_sequence(clock, members, time)
        if reason:
            guess.undecided[clock.name] = reason
            continue
        left = [c for c in left if not any(c is member for member in members)]
        name = re.sub(r"\W", "_", re.sub(rf"_?{_TIME.pattern}", "", clock.name, flags=re.I)).strip("_") or "history"
        name = _free(name, "events")
        guess.sequences += [
            f"  - name: {scalar(name)}",
            f"    timestamps: {scalar(clock.name)}  # earlier than their row in all rows seen; {clock.seen()}",
            f"    max_length: {clock.lengths.max()}  # longest list seen",
        ]
        _event_features(guess, members)
    return left


def _event_features(guess: _Guess, members: list[Column]) -> None:
    floats = [column for column in members if pt.is_floating(column.kind)]
    guess.sequences.append("    ids:")
    for column in members:
        if not any(column is other for other in floats):
            table = _table(guess, column, sequence=True)
            guess.sequences.append(
                f"      - {_entry(column.name, _stem(column.name))}, table: {scalar(table)}}}  # {column.seen()}"
            )
    if floats:
        guess.sequences.append("    floats:")
    for column in floats:
        log = ", log: true" if column.skewed else ""
        guess.sequences.append(f"      - {_entry(column.name, _stem(column.name))}{log}}}  # {column.seen()}")


def _why_no_sequence(clock: Column, members: list[Column], time: Column | None) -> str | None:
    if not any(c.integer or c.text for c in members):
        return "a list of times, but no list of ids is as long as it in every row"
    if time is None:
        return "a list of times, but no column looks like the row's own time"
    if pt.is_timestamp(time.kind) != pt.is_timestamp(clock.kind):
        return f"a list of {clock.kind}, but the row's time is {time.kind}"
    events, owner = as_times(clock.values), np.repeat(np.arange(clock.lengths.size), clock.lengths)
    if not (events < as_times(time.values)[owner]).all():
        return f"a list of times, but some are not earlier than {time.name}"
    if (np.diff(events) < 0)[np.diff(owner) == 0].any():
        return "a list of times, but not in order, oldest first"
    return None


def _feature(guess: _Guess, column: Column) -> None:
    ids = column.text or (column.integer and (column.many or bool(_ID.search(column.name)) or column.distinct <= _FEW))
    if pt.is_timestamp(column.kind):
        guess.undecided[column.name] = "a list of times that belongs to no sequence"
    elif not ids and column.many:
        guess.undecided[column.name] = f"a list of {column.kind} without a list of times as long as it"
    elif ids and not column.many and column.numbers_rows:
        guess.undecided[column.name] = f"nearly every row has a value of its own; {column.seen()}"
    elif ids:
        multi = ", multi: true" if column.many else ""
        table = _table(guess, column, sequence=False)
        guess.categorical.append(f"  - {_entry(column.name)}, table: {scalar(table)}{multi}}}  # {_why(column)}")
    else:
        log = ", log: true" if column.skewed else ""
        reason = " far above the median, so log" if log else ""
        guess.dense.append(f"  - {_entry(column.name)}{log}}}  # {column.seen()}{reason}")


def _why(column: Column) -> str:
    if column.text:
        kind = "text"
    elif column.many:
        kind = "lists of integers"
    else:
        kind = "integers named like ids" if _ID.search(column.name) else f"integers with at most {_FEW} values"
    return f"{kind}; {column.seen()}"


def _table(guess: _Guess, column: Column, sequence: bool) -> str:
    """The table for a column's ids: that of columns of the same stem (item_id, history_item), if it can be shared."""
    name = _stem(column.name)
    if column.many and not sequence and name in guess.sequence_tables:
        name += "_bag"  # a pooled feature and a sequence can't share one
    name = _free(name, "id")
    members = guess.tables.setdefault(name, [])
    if members and members[0].text != column.text:
        name = _free(re.sub(r"\W", "_", column.name), "id")
        members = guess.tables.setdefault(name, [])
    members.append(column)
    if sequence:
        guess.sequence_tables.add(name)
    return name


def _stem(name: str) -> str:
    stem = re.sub(rf"^{_HISTORY}_|_{_HISTORY}$", "", name, flags=re.I)
    stem = re.sub(r"(_ids?|(?<!s)s)$", "", stem, flags=re.I)
    return re.sub(r"\W", "_", stem) or name


def _free(name: str, kind: str) -> str:
    """A name for a table or sequence, with `kind` behind it where a spec refuses it as it is."""
    return f"{name}_{kind}" if name in TAKEN else name


def _entry(column: str, name: str | None = None) -> str:
    """`{name: …` with `, column: …` where the feature's name differs; the caller closes the brace."""
    name = re.sub(r"[^\w-]", "_", column) if name is None else name
    return f"{{name: {scalar(name)}" + ("" if name == column else f", column: {scalar(column)}")


def _table_line(name: str, columns: list[Column]) -> str:
    low = min((column.low for column in columns if column.low is not None), default=0.0)
    high = max((column.high for column in columns if column.high is not None), default=0.0)
    distinct = max(column.distinct for column in columns)
    used = ", ".join(column.name for column in columns)
    if not columns[0].text and low >= 0 and high < max(10 * distinct, 1000):
        reason = f"integers 0 … {high:g}, and one row for unknown ids"
        return f"  - {{name: {scalar(name)}, rows: {int(high) + 2}}}  # {used}: {reason}"
    rows = 1 << (4 * distinct).bit_length()
    reason = (
        f"{'text' if columns[0].text else 'integers with gaps'}, {distinct:,} distinct seen, room for 4 times as many"
    )
    return f"  - {{name: {scalar(name)}, rows: {rows}, ids: hash}}  # {used}: {reason}"


def _lines(guess: _Guess, url: str, name: str, rows: int) -> Iterator[str]:
    command = f"gemctl data spec {paths.word(url)}"
    yield f"# Drafted by `{command}` from the first {rows:,} rows: read every line before you train."
    yield f"name: {scalar(name)}"
    yield from guess.top
    tables = [_table_line(table, columns) for table, columns in guess.tables.items()]
    yield "tables:" if tables else "tables: []"
    yield from tables
    for key, lines in (
        ("categorical", guess.categorical),
        ("dense", guess.dense),
        ("sequences", guess.sequences),
        ("labels", [f"  - {line}" for line in guess.labels]),
    ):
        if lines:
            yield f"{key}:"
            yield from lines
    if guess.undecided:
        yield "# Left out:"
        yield from (f"#   {column}: {reason}" for column, reason in guess.undecided.items())


def _trial(url: DataPath, text: str, rows: int) -> str:
    """Reads the sample with the draft; what goes wrong, as comments."""
    spec = parse(text, "the draft")
    try:
        ParquetSource(url, spec).read(np.arange(rows))
    except InputError as error:
        lines = "\n".join(f"#   {problem}" for problem in error.problems)
        return f"# These rows can't be read with this draft; mend them or the draft:\n{lines}\n"
    return ""
