"""Drafts a feature spec from Parquet files, with a comment that gives the reason for each guess.

    gemctl data spec clicks.parquet -o spec.yaml

A guess is based on a column's type, its name and a sample of the first rows. The draft is always a valid spec that
reads these rows. Columns without a role are listed in comments with the reason: users should read every line.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from gemctl import paths
from gemctl.data.columns import TIMES, Kind
from gemctl.data.describe import SAMPLE_ROWS, Column, describe
from gemctl.data.files import DataPath, find_files, shown, urls
from gemctl.data.parquet import ParquetSource
from gemctl.data.values import times
from gemctl.errors import InputError
from gemctl.specs.data import FeatureSpec
from gemctl.specs.feature_spec import TAKEN, parse, scalar
from gemctl.specs.yaml_file import printable


def _words(words: str, end: bool = False) -> re.Pattern[str]:
    """Matches names that contain one of the words between underscores (`end`: as the last word)."""
    return re.compile(rf"(^|_)({'|'.join(words.split())}){'$' if end else '(_|$)'}", re.I)


_TIME = _words("times? timestamps? ts date datetime at")
_ID = _words("ids? uid user item key code category cat type class brand slot segment city country device os", end=True)
_LABEL = _words(
    "labels? clicks? clicked likes? liked purchased? buy bought convert(ed)? conversion target y shared? follow(ed)? "
    "long_view watched installed"
)
_ANSWER = re.compile(r"labels?|target|y", re.I)  # an outcome even if it can't be a label
_PREDICTION = _words("prob probability pred prediction predicted pctr pcvr")
_WEIGHT = re.compile(r"(sample_?|example_?|row_?)?weights?", re.I)
_DOMAIN = re.compile(r"(domain|surface|scenario|channel)(_id)?", re.I)
_HISTORY = r"(hist|history|histories|past|recent|seq|sequence|clicked|viewed|list|last|event|events)"
_INDEX = re.compile(r"__index_level_\d+__")
_FEW = 32  # integers with at most so many values are ids, whatever their name
_MOST_DOMAINS = 1000
_CALENDAR = 1e8  # larger times count from 1970, in seconds or smaller units


@dataclass(frozen=True)
class Draft:
    """The spec's `text`, the reasons for columns without a role, and where it was written (None: not written)."""

    text: str
    rows_seen: int
    undecided: dict[str, str]
    path: str | None = None


@dataclass
class _Guess:
    """Parts of the spec while it is drafted: lines with their comments."""

    top: list[str] = field(default_factory=list)
    tables: dict[str, list[Column]] = field(default_factory=dict)  # and the columns that use them
    categorical: list[str] = field(default_factory=list)
    dense: list[str] = field(default_factory=list)
    sequences: list[str] = field(default_factory=list)
    sequence_tables: set[str] = field(default_factory=set)
    multi_tables: set[str] = field(default_factory=set)  # used by a multi-valued feature, which is pooled
    labels: list[str] = field(default_factory=list)
    labelled: list[str] = field(default_factory=list)  # the labels' columns
    undecided: dict[str, str] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)  # already used, by kind


def draft(url: DataPath, labels: list[str]) -> Draft:
    """A draft for the Parquet files of `url`; `labels`: the label columns, if their names do not reveal them.

    InputError if there are no rows, no label or no feature; it names the columns.
    """
    files = find_files(url)
    sample = describe(files.files)
    left_out = dict(sample.left_out)
    while True:
        columns = [column for column in sample.columns if column.name not in left_out]
        guess = _guess(url, columns, labels, left_out)
        notes = [f"# {printable(note)}" for note in files.notes("Beside the files read")]
        comments = [*notes, *_left_out(guess.undecided)]
        text = "".join(f"{line}\n" for line in [*_lines(guess, url, sample.rows), *comments])
        spec = _loaded(url, text, guess)
        whole, parts = _unread(url, spec)
        if not parts:
            return Draft(text + whole, sample.rows, guess.undecided)
        if labelled := [f"label {column}: {reason}" for column, reason in parts.items() if column in guess.labelled]:
            raise InputError(labelled)
        left_out |= parts


def _guess(url: DataPath, columns: list[Column], labels: list[str], left_out: dict[str, str]) -> _Guess:
    guess = _Guess(undecided=dict(left_out))
    left = _labels(guess, columns, labels, shown(url))
    time, left = _row_roles(guess, left)
    left = _sequences(guess, left, time)
    for column in left:
        _feature(guess, column)
    return guess


def _loaded(url: DataPath, text: str, guess: _Guess) -> FeatureSpec:
    """The draft as a spec. It is invalid only if no column can be a feature, which is an InputError."""
    try:
        return parse(text, "the draft")
    except InputError as error:
        if guess.categorical or guess.dense:
            raise
        reasons = [f"{printable(column)}: {printable(reason)}" for column, reason in guess.undecided.items()]
        what = f"{shown(url)}: no column can be a feature besides the label" + (
            " and the histories" * bool(guess.sequences)
        )
        raise InputError([what, *reasons]) from error


def _labels(guess: _Guess, columns: list[Column], named: list[str], url: str) -> list[Column]:
    known = {column.name: column for column in columns}
    problems = [
        f"{url}: --label {name}: {guess.undecided.get(name, 'no such column')}" for name in named if name not in known
    ]
    problems += [
        f"{url}: --label {name}: a label is 0 or 1; this column is {known[name].type}, {known[name].summary()}"
        for name in named
        if name in known and not known[name].binary
    ]
    binary = [column.name for column in columns if column.binary and column.distinct == 2]
    chosen = (
        list(dict.fromkeys(named))
        or [name for name in binary if _LABEL.search(name)]
        or (binary if len(binary) == 1 else [])
    )
    if not chosen:
        choices = f"columns of 0 and 1: {', '.join(binary)}" if binary else "no column has only 0 and 1"
        problems.append(f"{url}: which column is the label? Use --label COLUMN ({choices})")
    if problems:
        raise InputError(problems)
    why = "named by --label" if named else "0 and 1, and named like an outcome"
    for name in chosen:
        guess.labelled.append(name)
        guess.labels.append(f"{_entry(guess, 'label', name)}}}  # {why}; {known[name].summary()}")
    return [column for column in columns if column.name not in chosen]


def _row_roles(guess: _Guess, columns: list[Column]) -> tuple[Column | None, list[Column]]:
    """Finds the row's time, weight and domain, and the columns that can't be a feature."""
    clocks = [column for column in columns if not column.many and _is_time(column)]
    clocks.sort(key=lambda c: (c.name.lower() not in {"timestamp", "time", "ts"}, not c.clock, c.kind is Kind.DATES))
    time = clocks[0] if clocks else None
    if time:
        guess.top.append(f"timestamp: {scalar(time.name)}  # named or typed like the row's time; {time.summary()}")
    left, has_domain, has_weight = [], False, False
    for column in columns:
        if column is time:
            continue
        unit = column.low is not None and column.low >= 0
        whole = not column.many and unit and not column.missing
        if any(column is other for other in clocks):
            guess.undecided[column.name] = "a second time column"
        elif _INDEX.fullmatch(column.name):
            guess.undecided[column.name] = "the index of a pandas table"
        elif whole and _WEIGHT.fullmatch(column.name) and not has_weight:
            guess.top.append(f"weight: {scalar(column.name)}  # by its name; {column.summary()}")
            has_weight = True
        elif whole and not has_domain and _is_domain(column):
            count = int(column.high or 0) + 1
            guess.top.append(
                f"domain: {{column: {scalar(column.name)}, count: {count}}}  # by its name; {column.summary()}"
            )
            has_domain = True
        elif not column.many and (_ANSWER.fullmatch(column.name) or (column.binary and _LABEL.search(column.name))):
            guess.undecided[column.name] = "named like an outcome: as a feature it might reveal the answer; " + (
                "--label makes it a label" if column.binary else f"not a label, as it is not 0 or 1; {column.summary()}"
            )
        elif column.whole_floats and _ID.search(column.name):
            guess.undecided[column.name] = (
                f"named like ids, which are integers or text, but {column.type} (pandas turns integers with gaps into "
                f'floats; astype("Int64") keeps them); {column.summary()}'
            )
        elif _PREDICTION.search(column.name):
            guess.undecided[column.name] = "named like a prediction: as a feature it might reveal the answer"
        elif column.distinct <= 1:
            guess.undecided[column.name] = f"the same value in all rows; {column.summary()}"
        else:
            left.append(column)
    return time, left


def _is_time(column: Column) -> bool:
    """Timestamps, dates, and numbers with a name like a time."""
    return column.clock or (column.kind in TIMES and bool(_TIME.search(column.name)))


def _is_domain(column: Column) -> bool:
    return column.integer and bool(_DOMAIN.fullmatch(column.name)) and (column.high or 0) < _MOST_DOMAINS


def _sequences(guess: _Guess, columns: list[Column], time: Column | None) -> list[Column]:
    """Makes an event sequence from each list of times and the lists of the same length."""
    left = list(columns)
    for clock in columns:
        if not clock.many or not _is_time(clock) or not any(clock is column for column in left):
            continue
        left = [c for c in left if c is not clock]
        members = [c for c in left if c.many and not c.clock and np.array_equal(c.lengths, clock.lengths)]
        reason = _why_no_sequence(clock, members, time)
        if reason:
            guess.undecided[clock.name] = reason
            continue
        left = [c for c in left if not any(c is member for member in members)]
        name = re.sub(r"\W", "_", re.sub(rf"_?{_TIME.pattern}", "", clock.name, flags=re.I)).strip("_") or "history"
        name = _unique(guess, "sequence", _free(name, "events"))
        guess.sequences += [
            f"  - name: {scalar(name)}",
            f"    timestamps: {scalar(clock.name)}  # earlier than their row in all sampled rows; {clock.summary()}",
            f"    max_length: {clock.lengths.max()}  # longest list in the sample",
        ]
        _event_features(guess, members, f"feature of {name}")
    return left


def _event_features(guess: _Guess, members: list[Column], what: str) -> None:
    floats = [column for column in members if column.kind in (Kind.FLOATS, Kind.BOOLEANS)]
    guess.sequences.append("    ids:")
    for column in members:
        if not any(column is other for other in floats):
            entry, table = _entry(guess, what, column.name, _stem(column.name)), _table(guess, column, sequence=True)
            guess.sequences.append(f"      - {entry}, table: {scalar(table)}}}  # {column.summary()}")
    if floats:
        guess.sequences.append("    floats:")
    for column in floats:
        log = ", log: true" if column.skewed else ""
        entry = _entry(guess, what, column.name, _stem(column.name))
        guess.sequences.append(f"      - {entry}{log}}}  # {column.summary()}")


def _why_no_sequence(clock: Column, members: list[Column], time: Column | None) -> str | None:
    if not any(c.integer or c.text for c in members):
        return "a list of times, but no list of ids has the same length in every row"
    if time is None:
        return "a list of times, but no column looks like the row's own time"
    if time.kind is not clock.kind and (time.clock or clock.clock):
        return f"a list of {clock.type}, but the row's time is {time.type}"
    if time.low is not None and clock.high is not None and time.low > _CALENDAR and clock.high < time.low / 100:
        return f"a list of times up to {clock.high:.10g}, but {time.name} is {time.low:.10g} or more: of another unit?"
    owner = np.repeat(np.arange(clock.lengths.size), clock.lengths)
    events, rows = times(clock.values), times(time.values).take(owner)
    if not (events.known & rows.known & events.before(rows)).all():
        return f"a list of times, but some are not earlier than {time.name}"
    if events.take(slice(1, None)).before(events.take(slice(-1)))[np.diff(owner) == 0].any():
        return "a list of times, but not in order, oldest first"
    return None


def _feature(guess: _Guess, column: Column) -> None:
    ids = column.text or (column.integer and (column.many or bool(_ID.search(column.name)) or column.distinct <= _FEW))
    if column.clock:
        guess.undecided[column.name] = "a list of times that belongs to no sequence"
    elif not ids and column.many:
        guess.undecided[column.name] = f"a list of {column.type} without a list of times of the same length"
    elif ids and not column.many and column.numbers_rows:
        guess.undecided[column.name] = f"nearly every row has a different value; {column.summary()}"
    elif ids:
        multi = ", multi: true" if column.many else ""
        table = _table(guess, column, sequence=False)
        guess.categorical.append(
            f"  - {_entry(guess, 'feature', column.name)}, table: {scalar(table)}{multi}}}  # {_why(column)}"
        )
    else:
        log = ", log: true" if column.skewed else ""
        reason = " far above the median, so log" if log else ""
        guess.dense.append(f"  - {_entry(guess, 'feature', column.name)}{log}}}  # {column.summary()}{reason}")


def _why(column: Column) -> str:
    if column.text:
        kind = "text"
    elif column.many:
        kind = "lists of integers"
    else:
        kind = "integers named like ids" if _ID.search(column.name) else f"integers with at most {_FEW} values"
    return f"{kind}; {column.summary()}"


def _table(guess: _Guess, column: Column, sequence: bool) -> str:
    """The table for a column's ids: shared with columns of the same stem (item_id, history_item) if possible."""
    name = _free(_stem(column.name), "id")
    if column.many and not sequence and name in guess.sequence_tables:
        name += "_bag"
    base, number = name, 1
    while not _shares(guess, name, column, sequence):
        number += 1
        name = f"{base}_{number}"
    guess.tables.setdefault(name, []).append(column)
    if sequence:
        guess.sequence_tables.add(name)
    elif column.many:
        guess.multi_tables.add(name)
    return name


def _shares(guess: _Guess, name: str, column: Column, sequence: bool) -> bool:
    """Whether a table of this name, if it exists, can serve the column: pooled and unpooled ids can't share one."""
    members = guess.tables.get(name, [])
    pooled = guess.multi_tables if sequence else guess.sequence_tables if column.many else set()
    return not members or (members[0].text == column.text and name not in pooled)


def _stem(name: str) -> str:
    stem = re.sub(rf"^{_HISTORY}_|_{_HISTORY}$", "", name, flags=re.I)
    stem = re.sub(r"(_ids?|(?<!s)s)$", "", stem, flags=re.I)
    return _word(stem or name)


def _word(text: str) -> str:
    """`text` as a name that a spec accepts."""
    return re.sub(r"[^\w-]", "_", text)


def _free(name: str, kind: str) -> str:
    """A name for a table or sequence, with `kind` appended if a spec reserves the name."""
    return f"{name}_{kind}" if name in TAKEN else name


def _unique(guess: _Guess, what: str, name: str) -> str:
    """The name, with a number appended if another `what` has it."""
    taken = guess.names.setdefault(what, set())
    base, number = name, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    taken.add(name)
    return name


def _entry(guess: _Guess, what: str, column: str, name: str | None = None) -> str:
    """`{name: …`, with `, column: …` if the name of the new `what` differs from it; the caller closes the brace."""
    name = _unique(guess, what, _word(column) if name is None else name)
    return f"{{name: {scalar(name)}" + ("" if name == column else f", column: {scalar(column)}")


def _table_line(name: str, columns: list[Column]) -> str:
    low = min((column.low for column in columns if column.low is not None), default=0.0)
    high = max((column.high for column in columns if column.high is not None), default=0.0)
    distinct = max(column.distinct for column in columns)
    used = ", ".join(printable(column.name) for column in columns)
    if not columns[0].text and low >= 0 and high < max(10 * distinct, 1000):
        reason = f"integers 0 … {high}, and one row for unknown ids"
        return f"  - {{name: {scalar(name)}, rows: {int(high) + 2}}}  # {used}: {reason}"
    rows = 1 << (4 * distinct).bit_length()
    reason = (
        f"{'text' if columns[0].text else 'integers with gaps'}, {distinct:,} distinct in the sample, "
        "room for 4 times as many"
    )
    return f"  - {{name: {scalar(name)}, rows: {rows}, ids: hash}}  # {used}: {reason}"


def _lines(guess: _Guess, url: DataPath, rows: int) -> Iterator[str]:
    command = printable(f"gemctl data spec {' '.join(map(paths.word, urls(url)))}")
    yield f"# Drafted by `{command}` from the first {rows:,} rows: read every line before you train."
    file = urls(url)[0].rstrip("/").rsplit("/", 1)[-1]
    yield f"name: {scalar(_word(re.sub(r'[.](parquet|pq|parq)$', '', file, flags=re.I)) or 'data')}"
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


def _left_out(reasons: dict[str, str]) -> Iterator[str]:
    if reasons:
        yield "# Left out:"
        yield from (f"#   {printable(column)}: {printable(reason)}" for column, reason in reasons.items())


def _unread(url: DataPath, spec: FeatureSpec) -> tuple[str, dict[str, str]]:
    """Reads the first rows, of all schemas, with the draft. Returns the problems by column, or as comments if no single
    column is to blame."""
    problems = _problems(url, spec)
    if not problems:
        return "", {}
    by_column = {column: wrong[0] for column, part in _parts(spec) if (wrong := _problems(url, part))}
    lines = "".join(f"#   {printable(problem)}\n" for problem in problems)
    return f"# These rows can't be read with this draft; fix them or the draft:\n{lines}", by_column


def _problems(url: DataPath, spec: FeatureSpec) -> list[str]:
    try:
        source = ParquetSource(url, spec)
        source.read(np.arange(min(SAMPLE_ROWS, source.row_count)))
        source.close()
    except InputError as error:
        return error.problems
    return []


def _parts(spec: FeatureSpec) -> Iterator[tuple[str, FeatureSpec]]:
    """Specs with one column each, or one sequence (named by its column of times); the labels come first."""
    bare = replace(
        spec, labels=[], tables=[], categorical=[], dense=[], sequences=[], domain=None, weight=None, timestamp=None
    )
    for label in spec.labels:
        yield label.column or label.name, replace(bare, labels=[label])
    for feature in spec.categorical:
        yield feature.column or feature.name, replace(bare, tables=spec.tables, categorical=[feature])
    for dense in spec.dense:
        yield dense.column or dense.name, replace(bare, dense=[dense])
    if spec.domain:
        yield spec.domain.column, replace(bare, domain=spec.domain)
    if spec.weight:
        yield spec.weight, replace(bare, weight=spec.weight)
    for sequence in spec.sequences:
        part = replace(bare, tables=spec.tables, timestamp=spec.timestamp, sequences=[sequence])
        yield sequence.timestamps, part
