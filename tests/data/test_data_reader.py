"""The Parquet reader against a plain Python reading of the same rows, and one clear error for each broken file."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gemctl.config.schema import DataConfig
from gemctl.data.drafting import draft
from gemctl.data.hashing import hash_strings
from gemctl.data.parquet import ParquetSource
from gemctl.data.rows import RowBlock
from gemctl.errors import InputError
from gemctl.plan.job import check_data
from gemctl.specs.data import FeatureSpec
from gemctl.specs.feature_spec import parse
from tests.data.parquet_oracle import plain_float, plain_hash, plain_row

SPEC = """
name: test
timestamp: time
weight: weight
true_probability: p
domain: {column: place, count: 3}
tables: [{name: item, rows: 40}, {name: word, rows: 30, ids: hash}, {name: code, rows: 50, ids: hash}]
categorical:
  - {name: item, table: item}
  - {name: code, table: code}
  - {name: words, table: word, multi: true}
dense: [{name: price, log: true}, {name: score}]
sequences:
  - name: clicks
    timestamps: h_time
    max_length: 4
    ids: [{name: item, table: item, column: h_item}]
    floats: [{name: dwell, column: h_dwell, log: true}]
labels: [{name: click}, {name: buy, mask: shown}]
"""


def spec(text: str = SPEC) -> FeatureSpec:
    return parse(text, "spec.yaml")


def columns(count: int = 90, seed: int = 0) -> dict[str, list[Any]]:
    """Random rows, with nulls wherever they are legal."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, count)

    def sometimes_null(values: list[Any], share: float = 0.1) -> list[Any]:
        return [None if rng.random() < share else value for value in values]

    def ids(size: int) -> list[Any]:
        return sometimes_null(rng.integers(-3, 45, size).tolist())

    return {
        "time": (1000 + np.arange(count) * 3).tolist(),
        "weight": rng.random(count).tolist(),
        "p": rng.random(count).tolist(),
        "place": rng.integers(0, 3, count).tolist(),
        "item": ids(count),
        "code": sometimes_null(rng.integers(-(2**60), 2**60, count).tolist()),
        "words": sometimes_null(
            [sometimes_null([f"wörd {rng.integers(99)}" * k for k in range(n % 4)]) for n in lengths]
        ),
        "price": sometimes_null(rng.normal(size=count).tolist()),
        "score": sometimes_null([math.nan if rng.random() < 0.1 else rng.random() for _ in range(count)]),
        "h_time": sometimes_null([sorted(rng.integers(0, 999, n).tolist()) for n in lengths], 0),
        "h_item": [ids(n) for n in lengths],
        "h_dwell": [sometimes_null(rng.normal(size=n).tolist()) for n in lengths],
        "click": sometimes_null(rng.integers(0, 2, count).tolist()),
        "buy": rng.integers(0, 2, count).tolist(),
        "shown": sometimes_null(rng.integers(0, 2, count).tolist()),
    }


def write(path: Path, rows: dict[str, list[Any]], group: int = 20, **types: Any) -> Path:
    table = pa.table({name: pa.array(values, types.get(name)) for name, values in rows.items()})
    pq.write_table(table, path, row_group_size=group)
    return path


def check(block: RowBlock, rows: dict[str, list[Any]], numbers: np.ndarray) -> None:
    """The block holds rows `numbers` of `rows`, in that order."""

    def jagged(name: str, values: str, place: int) -> list[Any]:
        column = block.jagged[name]
        return column.values[values][column.offsets[place] : column.offsets[place + 1]].tolist()

    assert block.fixed["rows"].tolist() == numbers.tolist()
    for place, n in enumerate(numbers):
        row = {name: values[n] for name, values in rows.items()}
        assert block.fixed["categorical/item"][place] == plain_row(row["item"], 40, False)
        assert block.fixed["categorical/code"][place] == plain_row(row["code"], 50, True)
        words = [plain_row(word, 30, True) for word in row["words"] or []]
        assert jagged("categorical/words", "ids", place) == words
        dense = [plain_float(row["price"], True), plain_float(row["score"], False)]
        assert block.fixed["dense"][place].tolist() == pytest.approx(dense)
        items = [plain_row(item, 40, False) for item in row["h_item"]][-4:]
        assert jagged("sequence/clicks", "ids/item", place) == items
        dwell = [plain_float(value, True) for value in row["h_dwell"]][-4:]
        assert jagged("sequence/clicks", "floats/dwell", place) == pytest.approx(dwell)
        ages = [row["time"] - time for time in row["h_time"]][-4:]
        assert jagged("sequence/clicks", "ages", place) == ages
        mask = [float(row["click"] is not None), float(bool(row["shown"]))]
        assert block.fixed["label_mask"][place].tolist() == mask
        assert block.fixed["labels"][place].tolist() == [row["click"] or 0, row["buy"]]
        assert block.fixed["weight"][place] == np.float32(row["weight"])
        assert block.fixed["domain"][place] == row["place"]
        assert block.fixed["true_probability"][place] == np.float32(row["p"])


def test_reads_what_plain_python_reads(tmp_path: Path) -> None:
    rows = columns()
    source = ParquetSource(str(write(tmp_path / "a.parquet", rows)), spec())
    numbers = np.random.default_rng(1).permutation(90)[:50]
    for keep in (1, 3, 99):
        source.keep = keep
        check(source.read(numbers), rows, numbers)
    assert len(source.read(np.zeros(0, np.int64)).fixed["rows"]) == 0
    source.close()


def test_a_folder_is_one_data_set_in_order_of_names(tmp_path: Path) -> None:
    first, second = columns(30, seed=1), columns(45, seed=2)
    write(tmp_path / "part-1.parquet", second)
    write(tmp_path / "part-0.parquet", first)
    (tmp_path / "_SUCCESS").touch()
    source = ParquetSource(f"file://{tmp_path}", spec())
    rows = {name: first[name] + second[name] for name in first}
    assert source.group_rows == [20, 10, 20, 20, 5]
    check(source.read(np.arange(75)), rows, np.arange(75))


def test_arrow_types_that_mean_the_same_read_the_same(tmp_path: Path) -> None:
    rows = columns()
    types = {
        "item": pa.int8(),
        "h_item": pa.large_list(pa.int16()),
        "words": pa.list_(pa.large_string()),
        "price": pa.float64(),
        "code": pa.int64(),
        "buy": pa.bool_(),
        "place": pa.uint16(),
    }
    rows["buy"] = [bool(value) for value in rows["buy"]]
    source = ParquetSource(str(write(tmp_path / "a.parquet", rows, **types)), spec())
    check(source.read(np.arange(90)), rows, np.arange(90))


def test_arrow_timestamps_give_ages_in_seconds(tmp_path: Path) -> None:
    rows = columns(10)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    real = dict(rows, time=[start + timedelta(milliseconds=1500 + n) for n in range(10)])
    real["h_time"] = [[start] * len(times) for times in rows["h_time"]]
    types = {"time": pa.timestamp("ns", "Europe/Paris"), "h_time": pa.list_(pa.timestamp("ms", "UTC"))}
    block = ParquetSource(str(write(tmp_path / "a.parquet", real, **types)), spec()).read(np.arange(10))
    expected = np.repeat(1.5 + np.arange(10) / 1000, [min(len(t), 4) for t in rows["h_time"]])
    assert block.jagged["sequence/clicks"].values["ages"] == pytest.approx(expected)


def test_without_histories_no_event_is_read(tmp_path: Path) -> None:
    rows = columns()
    for name in ("h_time", "h_item", "h_dwell"):
        del rows[name]
    source = ParquetSource(str(write(tmp_path / "a.parquet", rows)), spec(), histories=False)
    events = source.read(np.arange(30)).jagged["sequence/clicks"]
    assert events.offsets.tolist() == [0] * 31
    assert {name: values.size for name, values in events.values.items()} == {
        "ages": 0,
        "ids/item": 0,
        "floats/dwell": 0,
    }


def test_hashes_never_change_between_versions() -> None:
    words = pa.array(["x", "", "a", "abcdefgh", "abcdefghi", "ü"])
    assert hash_strings(words.slice(1)).tolist() == [plain_hash(word.as_py()) for word in words.slice(1)]
    assert int(hash_strings(pa.array(["gem"]))[0]) == 1647545338240779286


def set_row(column: str, row: int, value: Any) -> Any:
    def change(rows: dict[str, list[Any]]) -> None:
        rows[column][row] = value

    return change


def set_events(row: int, **lists: list[Any]) -> Any:
    def change(rows: dict[str, list[Any]]) -> None:
        rows["h_time"][row], rows["h_item"][row], rows["h_dwell"][row] = [1, 2], [1, 1], [0.0, 0.0]
        for name, values in lists.items():
            rows[name][row] = values

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            set_events(25, h_item=[1]),
            "row group 1, row 5: sequence 'clicks': h_item and h_time have different lengths",
        ),
        (
            set_events(3, h_time=[1, 1009]),
            "row group 0, row 3: sequence 'clicks': h_time: an event that is not earlier",
        ),
        (set_events(3, h_time=[2, 1]), "row group 0, row 3: sequence 'clicks': h_time: events are not in order"),
        (set_events(3, h_time=[None, 1]), "row group 0, row 3: sequence 'clicks': h_time: an event without a time"),
        (set_row("click", 41, 2), "row group 2, row 1: click: a label is 0 or 1, not 2"),
        (set_row("place", 41, 3), "row group 2, row 1: place: a domain is 0 … 2, not 3"),
        (set_row("place", 41, None), "row group 2, row 1: place: a domain is 0 … 2, not nan"),
        (set_row("weight", 1, -1.0), "row group 0, row 1: weight: a weight is a number ≥ 0, not -1"),
        (set_row("price", 1, math.inf), "row group 0, row 1: price: not a finite number"),
        (set_row("score", 1, 1e300), "row group 0, row 1: score: not a finite number"),
    ],
)
def test_a_wrong_value_is_named_by_file_and_row(tmp_path: Path, change: Any, expected: str) -> None:
    rows = columns()
    change(rows)
    path = write(tmp_path / "bad.parquet", rows)
    with pytest.raises(InputError) as error:
        ParquetSource(str(path), spec()).read(np.arange(90))
    assert len(error.value.problems) == 1
    assert f"{path}: {expected}" in error.value.problems[0]


def test_the_edges_of_weights_and_probabilities_are_allowed(tmp_path: Path) -> None:
    rows = columns()
    rows["weight"][1], rows["p"][1], rows["p"][2] = 0.0, 0.0, 1.0
    block = ParquetSource(str(write(tmp_path / "a.parquet", rows)), spec()).read(np.array([1, 2]))
    assert block.fixed["weight"][0] == 0 and block.fixed["true_probability"].tolist() == [0, 1]


def test_a_row_with_events_needs_a_time(tmp_path: Path) -> None:
    rows = columns()
    set_events(2)(rows)
    rows["time"][2] = None
    with pytest.raises(InputError, match="row 2: time: a row with events but without a time"):
        ParquetSource(str(write(tmp_path / "bad.parquet", rows)), spec()).read(np.arange(9))


def test_wrong_columns_are_named_all_at_once_when_opened(tmp_path: Path) -> None:
    rows = columns(5)
    rows["weigth"] = rows.pop("weight")
    rows["item"] = ["a"] * 5
    rows["h_dwell"] = [1.0] * 5
    rows["time"] = [datetime(2026, 1, 1)] * 5
    path = write(tmp_path / "bad.parquet", rows)
    with pytest.raises(InputError) as error:
        ParquetSource(str(path), spec())
    assert error.value.problems == [
        f"{path}: column 'item' is string; categorical 'item' needs integers",
        f"{path}: column 'h_dwell' is double; sequence 'clicks' needs lists of numbers",
        f"{path}: no column 'weight', needed as weight; did you mean weigth?",
        f"{path}: column 'h_time' is list<element: int64>, but column 'time' is timestamp[us]: row and event times "
        "must all be timestamps with a time zone, timestamps without one, dates, or numbers of one unit",
    ]


def test_what_is_no_data_set_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no Parquet")
    (tmp_path / "empty").mkdir()
    cases = {
        "text.parquet": "not a readable Parquet file",
        "empty": r"no Parquet file \(.parquet",
        "gone": "no such file or folder",
    }
    for name, expected in cases.items():
        with pytest.raises(InputError, match=expected) as error:
            ParquetSource(str(tmp_path / name), spec())
        assert len(error.value.problems) == 1


def damage(path: Path, group: int) -> None:
    """Overwrites the first pages of a row group; the footer stays whole."""
    column = pq.read_metadata(path).row_group(group).column(0)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    damage(path := write(tmp_path / "rows.parquet", columns()), 2)
    source = ParquetSource(str(path), spec())
    assert len(source.read(np.array([0, 39, 60])).fixed["rows"]) == 3
    for read in (lambda: source.read(np.array([40])), lambda: draft(str(path), ["click"])):
        with pytest.raises(InputError) as caught:
            read()
        (problem,) = caught.value.problems
        assert problem.startswith(f"{path}: row group 2 can't be read, the file is damaged: ") and "\n" not in problem


def test_columns_of_one_name_are_refused_where_they_are_needed(tmp_path: Path) -> None:
    table = pa.table({**columns(), "other": [0] * 90})
    for name, problems in (("price", ["'price'"]), ("other", [])):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(table.append_column(name, table["weight"]), path)
        expected = [f"{path}: 2 columns are called {text}: rename all but one" for text in problems]
        found = []
        try:
            ParquetSource(str(path), spec()).read(np.arange(9))
        except InputError as error:
            found = error.problems
        assert found == expected
        assert draft(str(path), ["click"]).undecided[name] == "2 columns have this name"


def test_data_without_rows_is_refused_before_a_launch(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    full, empty = write(tmp_path / "full.parquet", columns()), tmp_path / "empty.parquet"
    pq.write_table(pq.read_table(full).slice(0, 0), empty)
    data = DataConfig(spec=str(tmp_path / "spec.yaml"), train=str(full), eval=str(full))
    check_data(data)
    with pytest.raises(InputError) as caught:
        check_data(replace(data, train=str(empty), eval=str(empty)))
    assert caught.value.problems == [f"data.train={empty}: no rows", f"data.eval={empty}: no rows"]
