"""Converts raw logs to training Parquet, split by time, with event histories and running means, and writes the spec.

    gemctl data import ml-100k data/ml100k

Writes train, valid and test Parquet (80/10/10 by time), `spec.yaml` and `vocabularies.json` (the token of each table
row). A row contains nothing from rows of the same time or later: ties are not history. Vocabularies and bucket edges
come from the training part; tokens that first occur later have id −1, the unknown row. An interaction's own columns
(such as its rating) describe its outcome, so they are labels and history, never features of the row itself.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gemctl import paths
from gemctl.data.recbole import AtomicFile, RawLog, numbers, read
from gemctl.data.rows import JaggedRows
from gemctl.durable import sync_file, sync_folder
from gemctl.errors import InputError
from gemctl.specs.feature_spec import load, scalar

ROW_GROUP = 20_000
_SPLIT = {"train": 80, "valid": 10, "test": 10}  # percent
_BUCKETS = 16  # of a numeric side column with more than 2·16 values
_SMOOTHING = 10.0  # pseudo-rows at the mean of all earlier rows with which a running mean starts
_RATING_LABELS = ("liked=rating>=4", "loved=rating>=5")
_LABEL = re.compile(r"(?P<name>[A-Za-z]\w*)=(?P<column>\w+)(?P<sign>>=|<=|==|>|<)(?P<value>-?\d+(\.\d+)?)")


@dataclass(frozen=True)
class Imported:
    """What was written to `folder`: `rows` by part, rows of each table, and `notes` on what was left out and why."""

    folder: str
    rows: dict[str, int]
    tables: dict[str, int]
    labels: dict[str, float]  # share of ones in the training part
    notes: list[str]


@dataclass
class _Plan:
    """The columns of the output and the lines of the spec, collected step by step."""

    train: np.ndarray  # bool [N]: rows of the training part
    columns: dict[str, Any] = field(default_factory=dict)
    vocabularies: dict[str, list[str]] = field(default_factory=dict)
    categorical: list[str] = field(default_factory=list)
    dense: list[str] = field(default_factory=list)
    event_ids: list[str] = field(default_factory=list)
    event_floats: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    events: dict[str, np.ndarray] = field(default_factory=dict)  # per row: its values as an event
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, values: Any) -> None:
        """Adds an output column; InputError if the name is already used."""
        if name in self.columns:
            raise InputError(f"two columns would be called {name!r}: rename one in the raw files")
        self.columns[name] = values


class Histories:
    """The history of each row of a log in time order: the strictly earlier rows with the same key, at most `limit`.

        past = Histories(user, time, limit=100)
        past.events(item, slice(0, 20_000))      # each row's last 100 items, oldest first
        past.sums(click)                         # each row's number of earlier clicks

    Rows of the same time are not in each other's history, as their order is unknown. `order`: rows sorted by (key,
    time); the history of row r is order[start[r]:stop[r]], oldest first.
    """

    def __init__(self, key: np.ndarray, time: np.ndarray, limit: int | None = None) -> None:
        count = key.size
        self.order = np.argsort(key, kind="stable")  # rows are already in time order
        keys, times = key[self.order], time[self.order]
        new_key = np.concatenate([[True], keys[1:] != keys[:-1]])
        new_time = new_key | np.concatenate([[True], times[1:] != times[:-1]])
        self.start, self.stop = np.empty(count, np.int64), np.empty(count, np.int64)
        self.start[self.order] = np.maximum.accumulate(np.where(new_key, np.arange(count), 0))
        self.stop[self.order] = np.maximum.accumulate(np.where(new_time, np.arange(count), 0))
        if limit is not None:
            self.start = np.maximum(self.start, self.stop - limit)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """float64 [N]: the sum of `values` over each row's history."""
        running = np.concatenate([[0.0], np.cumsum(values[self.order])])
        return running[self.stop] - running[self.start]

    def events(self, values: np.ndarray, rows: slice) -> JaggedRows:
        """The values of the histories of `rows`."""
        start = self.start[rows]
        return JaggedRows(np.zeros(1, np.int64), {"": values[self.order]}).cut(start, self.stop[rows] - start)


def import_recbole(source: str | Path, out: str | Path, *, labels: Iterable[str] = (), history: int = 100) -> Imported:
    """Imports RecBole atomic files; `labels` as NAME=COLUMN>=NUMBER; at most `history` events per row."""
    log = read(source)
    time = log.inter.columns[log.time].to_numpy(zero_copy_only=False)
    order = np.argsort(time, kind="stable")
    time = _whole(time[order])
    inter = {name: column.take(pa.array(order)) for name, column in log.inter.columns.items()}
    cuts = _cuts(time)
    plan = _Plan(train=np.arange(time.size) < cuts[1])
    plan.add("time", time)
    user, item = (_key(plan, inter[column], table) for column, table in ((log.user, "user"), (log.item, "item")))
    plan.events["item"] = plan.columns["item"]
    for side, key, prefix in ((log.users, inter[log.user], "user"), (log.items, inter[log.item], "item")):
        if side is not None:
            _side_features(plan, side, key, prefix)
    _labels(plan, log, inter, list(labels))
    _running_means(plan, {"user": user, "item": item}, time)
    _event_columns(plan, log, inter)
    with paths.writing(str(out)):
        return _write(plan, log.name, Path(out), cuts, Histories(user, time, history))


def _whole(time: np.ndarray) -> np.ndarray:
    """As int64 if all times are whole numbers within its range."""
    return time.astype(np.int64) if ((time == np.floor(time)) & (np.abs(time) < 2.0**63)).all() else time


def _cuts(time: np.ndarray) -> list[int]:
    """Row edges of the parts, moved so that rows of the same time stay together."""
    shares = np.cumsum(list(_SPLIT.values()))[:-1]
    edges = [int(np.searchsorted(time, time[time.size * share // 100], side="left")) for share in shares]
    cuts = [0, *edges, time.size]
    for part, rows in zip(_SPLIT, np.diff(cuts), strict=True):
        if rows == 0:
            raise InputError(f"the {part} part is empty: {time.size} rows are too few, or too many have the same time")
    return cuts


def _key(plan: _Plan, column: Any, table: str) -> np.ndarray:
    """Adds the user or item id as a feature; returns a number per distinct id, including unknown ones."""
    _vocabulary(plan, table, column)
    plan.add(f"{table}_token", column)
    plan.categorical.append(f"{{name: {table}, table: {table}}}")
    return column.dictionary_encode().indices.to_numpy(zero_copy_only=False)


def _vocabulary(plan: _Plan, name: str, column: Any) -> None:
    """Adds column `name`: the index of each token among those of the training part, in order of first occurrence."""
    known = pc.unique(column.filter(pa.array(plan.train))).drop_null()
    plan.vocabularies[name] = known.to_pylist()
    plan.add(name, _indices(column, known))


def _indices(column: Any, known: Any) -> np.ndarray:
    return pc.index_in(column, value_set=known).fill_null(-1).to_numpy(zero_copy_only=False)


def _side_features(plan: _Plan, side: AtomicFile, key: Any, prefix: str) -> None:
    """Adds the columns of a `.user` or `.item` file, joined to each row."""
    place = pc.index_in(key, value_set=side.columns[side.key])
    for column, kind in list(side.kinds.items())[1:]:
        name = re.sub(r"\W", "_", column if column.startswith(prefix) else f"{prefix}_{column}")
        values = side.columns[column]
        if kind == "float":
            plan.add(name, values.take(place).to_numpy(zero_copy_only=False))
            plan.dense.append(f"{{name: {name}}}")
        elif kind == "token":
            _single_valued(plan, name, values.take(place))
        elif kind == "token_seq":
            _multi_valued(plan, name, values, place, f"{side.path.name}: {column}")
        else:
            plan.notes.append(f"{side.path.name}: {column} left out: float_seq has no role")


def _single_valued(plan: _Plan, name: str, column: Any) -> None:
    values = numbers(column)
    comment = ""
    if values is not None and len(pc.unique(column)) > 2 * _BUCKETS:
        known = values[plan.train & ~np.isnan(values)]
        edges = np.unique(np.quantile(known, np.arange(1, _BUCKETS) / _BUCKETS)) if known.size else np.zeros(0)
        bucket = pa.array(np.searchsorted(edges, values, side="right"), mask=np.isnan(values))
        column = bucket.cast(pa.string())
        comment = f"  # {edges.size + 1} buckets of equal share; edges {', '.join(f'{edge:g}' for edge in edges)}"
    _vocabulary(plan, name, column)
    plan.categorical.append(f"{{name: {name}, table: {name}}}{comment}")


def _multi_valued(plan: _Plan, name: str, values: Any, place: Any, what: str) -> None:
    lists = pc.split_pattern(values.fill_null(""), " ")
    tokens, owner = lists.flatten(), pc.list_parent_indices(lists)
    filled = pc.not_equal(tokens, "")
    tokens, owner = tokens.filter(filled), owner.filter(filled).to_numpy(zero_copy_only=False)
    distinct = len(pc.unique(tokens))
    if distinct > len(values) / 2:
        plan.notes.append(f"{what} left out: {distinct} distinct tokens in {len(values)} lines, in effect an id")
        return
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(values)))])
    entity = place.fill_null(-1).to_numpy(zero_copy_only=False)
    in_training = np.zeros(len(values), bool)
    in_training[entity[plan.train & (entity >= 0)]] = True
    known = pc.unique(tokens.filter(pa.array(in_training[owner])))
    plan.vocabularies[name] = known.to_pylist()
    by_entity = JaggedRows(offsets, {"": _indices(tokens, known)})
    lengths = np.where(entity >= 0, by_entity.lengths()[entity], 0)
    plan.add(name, by_entity.cut(offsets[entity], lengths))
    plan.categorical.append(f"{{name: {name}, table: {name}, multi: true}}")


def _labels(plan: _Plan, log: RawLog, inter: dict[str, Any], texts: list[str]) -> None:
    if not texts and log.inter.kinds.get("rating") == "float":
        texts = list(_RATING_LABELS)
    if not texts:
        floats = [name for name, kind in log.inter.kinds.items() if kind == "float" and name != log.time]
        columns = ", ".join(floats) or "(none)"
        raise InputError(f"no label: use --label NAME=COLUMN>=NUMBER with one of the columns {columns}")
    problems = []
    for text in texts:
        match = _LABEL.fullmatch(text.replace(" ", ""))
        if match is None:
            problems.append(f"--label {text!r}: expected NAME=COLUMN>=NUMBER (or >, <=, <, ==)")
        elif log.inter.kinds.get(match["column"]) != "float":
            problems.append(f"--label {text!r}: {log.inter.path.name} has no float column {match['column']!r}")
        elif f"label_{match['name']}" in plan.columns:
            problems.append(f"--label {text!r}: a second label with this name")
        else:
            values = inter[match["column"]].to_numpy(zero_copy_only=False)
            plan.add(f"label_{match['name']}", _compare(values, match["sign"], float(match["value"])))
            plan.labels.append(f"{{name: {scalar(match['name'])}, column: label_{match['name']}}}  # {text}")
    if problems:
        raise InputError(problems)


def _compare(values: np.ndarray, sign: str, threshold: float) -> np.ndarray:
    """float32 [N]: 0, 1, or NaN for a missing value."""
    compare = {">=": np.greater_equal, "<=": np.less_equal, ">": np.greater, "<": np.less, "==": np.equal}[sign]
    return np.where(np.isnan(values), np.nan, compare(values, threshold)).astype(np.float32)


def _running_means(plan: _Plan, keys: dict[str, np.ndarray], time: np.ndarray) -> None:
    """Adds the number of earlier rows of each user and item, and the smoothed mean of each label over them."""
    everyone = Histories(np.zeros(time.size, np.int64), time)
    for key, values in keys.items():
        earlier = Histories(values, time)
        plan.add(f"earlier_{key}_rows", (earlier.stop - earlier.start).astype(np.float32))
        plan.dense.append(f"{{name: earlier_{key}_rows, log: true}}")
        for label in [name for name in plan.columns if name.startswith("label_")]:
            known = ~np.isnan(plan.columns[label])
            ones = np.nan_to_num(plan.columns[label])
            prior = (everyone.sums(ones) + 1) / (everyone.sums(known) + 2)
            mean = (earlier.sums(ones) + _SMOOTHING * prior) / (earlier.sums(known) + _SMOOTHING)
            name = f"earlier_{key}_{label.removeprefix('label_')}"
            plan.add(name, mean.astype(np.float32))
            plan.dense.append(f"{{name: {name}}}")


def _event_columns(plan: _Plan, log: RawLog, inter: dict[str, Any]) -> None:
    """Adds what an event contains besides the item: the interaction's other columns."""
    plan.event_ids.append("{name: item, table: item, column: history_item}")
    for source, kind in log.inter.kinds.items():
        if source in (log.user, log.item, log.time):
            continue
        column, name = inter[source], re.sub(r"\W", "_", source)
        if kind == "token" or (kind == "float" and len(pc.unique(column)) <= 2 * _BUCKETS):
            _vocabulary(plan, f"event_{name}", column.cast(pa.string()))
            plan.events[name] = plan.columns.pop(f"event_{name}")
            plan.event_ids.append(f"{{name: {scalar(name)}, table: event_{name}, column: history_{name}}}")
        elif kind == "float":
            plan.events[name] = column.to_numpy(zero_copy_only=False).astype(np.float32)
            plan.event_floats.append(f"{{name: {scalar(name)}, column: history_{name}}}")
        else:
            plan.notes.append(f"{log.inter.path.name}: {name} left out: {kind} has no role in events")


def _write(plan: _Plan, name: str, out: Path, cuts: list[int], histories: Histories) -> Imported:
    out.mkdir(parents=True, exist_ok=True)
    for part, (start, stop) in zip(_SPLIT, pairwise(cuts), strict=True):
        chunks = (slice(i, min(i + ROW_GROUP, stop)) for i in range(start, stop, ROW_GROUP))
        _write_part(out / f"{part}.parquet", (_table(plan, histories, rows) for rows in chunks))
    tables = {table: len(tokens) + 1 for table, tokens in plan.vocabularies.items()}
    limit = int((histories.stop - histories.start).max(initial=1))
    (out / "spec.yaml").write_text("\n".join(_spec_lines(plan, name, tables, limit)) + "\n", encoding="utf-8")
    (out / "vocabularies.json").write_text(
        json.dumps({"format": 1, "tables": plan.vocabularies}, ensure_ascii=False), encoding="utf-8"
    )
    for file in (*(f"{part}.parquet" for part in _SPLIT), "vocabularies.json", "spec.yaml"):
        sync_file(out / file)
    sync_folder(out)
    load(out / "spec.yaml")  # fails if names in the raw files clash
    rows = dict(zip(_SPLIT, np.diff(cuts).tolist(), strict=True))
    labels = {n[6:]: float(np.nanmean(v[plan.train])) for n, v in plan.columns.items() if n.startswith("label_")}
    return Imported(str(out), rows, tables, labels, plan.notes)


def _write_part(path: Path, tables: Iterator[Any]) -> None:
    first = next(tables)
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        writer.write_table(first, row_group_size=ROW_GROUP)
        for table in tables:
            writer.write_table(table, row_group_size=ROW_GROUP)


def _table(plan: _Plan, histories: Histories, rows: slice) -> Any:
    index = np.arange(rows.start, rows.stop)
    columns = {
        name: _list_array(values.take(index)) if isinstance(values, JaggedRows) else values[rows]
        for name, values in plan.columns.items()
    }
    columns["history_time"] = _list_array(histories.events(plan.columns["time"], rows))
    for name, values in plan.events.items():
        columns[f"history_{name}"] = _list_array(histories.events(values, rows))
    return pa.table(columns)


def _list_array(jagged: JaggedRows) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(jagged.offsets), pa.array(jagged.values[""]))


def _spec_lines(plan: _Plan, name: str, tables: dict[str, int], longest: int) -> Iterator[str]:
    yield "# Written by `gemctl data import`; vocabularies.json has the token of each table row."
    yield f"name: {scalar(name)}"
    yield "timestamp: time"
    yield "tables:  # the last row of each is for tokens that do not occur in the training part"
    yield from (f"  - {{name: {table}, rows: {max(rows, 2)}}}" for table, rows in tables.items())
    yield "categorical:"
    yield from (f"  - {line}" for line in plan.categorical)
    yield "dense:  # earlier_*: over strictly earlier rows"
    yield from (f"  - {line}" for line in plan.dense)
    yield "sequences:"
    yield "  - name: history"
    yield "    timestamps: history_time"
    yield f"    max_length: {max(longest, 1)}"
    yield "    ids:"
    yield from (f"      - {line}" for line in plan.event_ids)
    if plan.event_floats:
        yield "    floats:"
        yield from (f"      - {line}" for line in plan.event_floats)
    yield "labels:"
    yield from (f"  - {line}" for line in plan.labels)
