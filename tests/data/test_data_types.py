"""What a column's type means to the Parquet reader: every width, sign, unit and zone, in one file and across files."""

import itertools
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pytest import approx

from gemctl.config.schema import DataConfig
from gemctl.data.decode import table_rows
from gemctl.data.loader import eval_batches
from gemctl.data.parquet import ParquetSource
from gemctl.data.rows import RowBlock
from gemctl.errors import InputError
from gemctl.plan.job import check_data
from gemctl.specs.data import FeatureSpec, TableSpec
from gemctl.specs.feature_spec import parse

SPEC = """
name: types
timestamp: time
tables: [{name: user, rows: 51, ids: hash}, {name: item, rows: 301}]
categorical: [{name: user, table: user}, {name: item, table: item}]
dense: [{name: price}]
sequences: [{name: seen, timestamps: seen_time, ids: [{name: item, table: item, column: seen_item}]}]
labels: [{name: clicked}]
"""
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
ZONE = ZoneInfo("America/Los_Angeles")
NOON = datetime(2026, 3, 9, 12)


def spec(text: str = SPEC) -> FeatureSpec:
    return parse(text, "spec.yaml")


def write(path: Path, **columns: Any) -> Path:
    """Two rows with an event each; `columns` replace those of the same name."""
    table = {
        "user": pa.array([1, 2]),
        "item": pa.array([3, 4]),
        "price": pa.array([0.5, 1.5]),
        "time": pa.array([1000, 2000]),
        "seen_time": pa.array([[900], [1800]]),
        "seen_item": pa.array([[5], [6]]),
        "clicked": pa.array([0, 1]),
    }
    pq.write_table(pa.table({**table, **columns}), path)
    return path


def read(path: Path, text: str = SPEC) -> RowBlock:
    source = ParquetSource(str(path), spec(text))
    return source.read(np.arange(source.row_count))


def ages(path: Path) -> list[float]:
    return list(read(path).jagged["sequence/seen"].values["ages"])


def problems(path: Path, text: str = SPEC) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(path, text)
    return [problem.replace(f"{path}/", "").replace(str(path), path.name) for problem in caught.value.problems]


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@pytest.mark.parametrize("rows", [3, 301, 40_001, 2**31 + 2])
def test_unknown_ids_of_any_width_take_the_last_row(kind: pa.DataType, rows: int) -> None:
    bound = np.iinfo(kind.to_pandas_dtype())
    values = [None, int(bound.min), int(bound.max), 0, 1, 2]
    expected = [value if value is not None and 0 <= value < rows - 1 else rows - 1 for value in values]
    assert table_rows(pa.array(values, kind), TableSpec("item", rows)).tolist() == expected
    assert table_rows(pa.array([None], kind), TableSpec("item", rows, "hash")).tolist() == [rows - 1]


def test_the_last_row_of_a_table_is_that_of_unknown_ids() -> None:
    ids = pa.array([-1, 0, 299, 300, 301, None])
    assert table_rows(ids, TableSpec("item", 301)).tolist() == [300, 0, 299, 300, 300, 300]
    assert table_rows(ids, TableSpec("item", 2**31)).dtype == np.int32
    assert table_rows(ids, TableSpec("item", 2**31 + 1)).dtype == np.int64


def test_unknown_ids_of_narrow_columns_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", item=pa.array([-1, None], pa.int8()), seen_item=[np.array([-2], np.int16)] * 2)
    data = DataConfig(spec="", train="", eval=str(path))
    (batch,) = eval_batches(data, spec(), global_batch=9, rank=0, world=1)
    assert batch.unknown_ids == {"user": 0, "item": 4}
    assert batch.categorical["item"].values.tolist() == [300, 300]


def test_integers_of_all_types_and_decimals_hash_alike() -> None:
    table = TableSpec("user", 10**6, "hash")
    for value in (7, 100):
        kinds = [*INTEGERS, pa.decimal128(38, 0), pa.decimal256(70, 0)]
        found = {int(table_rows(pa.array([value], pa.int64()).cast(kind), table)[0]) for kind in kinds}
        assert len(found) == 1
    beyond = [2**63 + 5, 2**64 - 1]
    wide = pa.array([Decimal(value) for value in beyond], pa.decimal128(38, 0))
    rows = table_rows(wide, table).tolist()
    assert rows == table_rows(pa.array(beyond, pa.uint64()), table).tolist()
    assert rows == table_rows(pa.array([value - 2**64 for value in beyond], pa.int64()), table).tolist()
    assert table_rows(wide, TableSpec("item", 30)).tolist() == [29, 29]


def test_strings_of_all_types_hash_alike(tmp_path: Path) -> None:
    words = pa.array(["a", None])
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        write(tmp_path / f"{kind.id}.parquet", user=words.cast(kind))
    source = ParquetSource(str(tmp_path), spec())
    rows = source.read(np.arange(source.row_count)).fixed["categorical/user"].tolist()
    assert rows == table_rows(words, TableSpec("user", 51, "hash")).tolist() * 3
    assert rows[1] == 50 != rows[0]


def test_files_that_differ_in_kinds_of_ids_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet")
    write(tmp_path / "1.parquet", user=pa.array([None, None]))  # nulls alone are of either kind
    write(tmp_path / "2.parquet", user=pa.array(["1", "2"]))
    write(tmp_path / "3.parquet", user=pa.array(["1", "2"], pa.large_string()))
    rule = "ids of the hashed table 'user' must all be integers or all be strings, as 7 and \"7\" have different rows"
    assert problems(tmp_path) == [
        "2.parquet: column 'user' is string (and 1 more), but column 'user' of 0.parquet is int64: " + rule
    ]


def test_columns_of_one_hashed_table_are_of_one_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", seen_item=pa.array([["5"], ["6"]]))
    hashed = SPEC.replace("rows: 301", "rows: 301, ids: hash")
    (problem,) = problems(path, hashed)
    assert "column 'seen_item' is list<element: string>, but column 'item' is int64: ids of the hashed" in problem


def test_columns_that_no_file_fills_are_missing_everywhere(tmp_path: Path) -> None:
    nothing = pa.nulls(2)
    block = read(write(tmp_path / "a.parquet", user=nothing, item=nothing, price=nothing, clicked=nothing))
    assert block.fixed["categorical/user"].tolist() == [50, 50]
    assert block.fixed["dense"].tolist() == [[0], [0]]
    assert block.fixed["label_mask"].tolist() == [[0], [0]]
    empty = read(write(tmp_path / "a.parquet", time=nothing, seen_time=[[], []], seen_item=nothing))
    assert empty.jagged["sequence/seen"].offsets.tolist() == [0, 0, 0]


def test_evaluation_rows_are_compared_with_training_rows(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    train = write(tmp_path / "train.parquet")
    data = DataConfig(spec=str(tmp_path / "spec.yaml"), train=str(train), eval=str(tmp_path / "eval.parquet"))
    write(tmp_path / "eval.parquet", user=pa.array([1, 2], pa.uint16()))
    check_data(data)
    write(tmp_path / "eval.parquet", user=pa.array(["1", "2"]), time=[NOON] * 2, seen_time=[[NOON]] * 2)
    with pytest.raises(InputError) as caught:
        check_data(data)
    first, second = caught.value.problems
    assert first.startswith(f"{data.eval}: column 'user' is string, but column 'user' of {train} is int64: ids of")
    assert second.startswith(f"{data.eval}: column 'time' is timestamp[us] (and 1 more), but column 't")


CLOCKS: dict[str, tuple[Any, Any]] = {
    "integers": (pa.array([1000, 2000]), pa.array([[400], [1400]])),
    "floats": (pa.array([1000.5, 2000]), pa.array([[400.5], [1400.0]])),
    "instants": (pa.array([NOON] * 2, pa.timestamp("us", "UTC")), None),
    "local": (pa.array([NOON] * 2, pa.timestamp("ms")), None),
    "dates": (pa.array([NOON.date()] * 2), pa.array([[date(2026, 3, 8)]] * 2)),
}


def clock(name: str) -> dict[str, Any]:
    """Columns with events 600 units before their rows (dates: a day)."""
    rows, events = CLOCKS[name]
    if events is None:
        earlier = pa.array([NOON - timedelta(seconds=600)] * 2, rows.type)
        events = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), earlier)
    return {"time": rows, "seen_time": events}


@pytest.mark.parametrize(("one", "other"), itertools.product(CLOCKS, CLOCKS))
def test_clocks_that_cannot_be_compared_are_refused_in_a_file_and_across_files(
    tmp_path: Path, one: str, other: str
) -> None:
    write(tmp_path / "0.parquet", **clock(one))
    write(tmp_path / "1.parquet", **clock(other))
    mixed = write(tmp_path / "mixed", **{**clock(one), "seen_time": clock(other)["seen_time"]})
    if one == other or {one, other} == {"integers", "floats"}:
        age = 86400 if one == "dates" else 600
        assert ages(tmp_path) == [age] * 2 + [600 if other != "dates" else 86400] * 2
        assert ages(mixed) == approx([age] * 2, abs=1)
        return
    (problem,) = problems(tmp_path)
    assert problem.startswith("1.parquet: column 'time' is ") and "column 'time' of 0.parquet is " in problem
    (problem,) = problems(mixed)
    assert problem.startswith("mixed: column 'seen_time' is ") and "but column 'time' is " in problem


def test_ages_are_exact_whatever_the_units(tmp_path: Path) -> None:
    start = 1_700_000_000
    for (row_unit, row_scale), (unit, scale) in itertools.product(
        {"ms": 10**3, "us": 10**6, "ns": 10**9}.items(), repeat=2
    ):
        row = pa.array([start * row_scale, start * row_scale + 1]).cast(pa.timestamp(row_unit, "UTC"))
        event = pa.array([[start * scale - 1]] * 2).cast(pa.list_(pa.timestamp(unit, "Europe/Paris")))
        found = ages(write(tmp_path / "a.parquet", time=row, seen_time=event))
        assert found == approx([1 / scale, 1 / row_scale + 1 / scale], rel=1e-6)


def test_a_zone_is_an_instant_and_none_is_not(tmp_path: Path) -> None:
    local = [[(NOON - timedelta(seconds=600))]] * 2
    aware = pa.array([NOON.replace(tzinfo=ZONE)] * 2, pa.timestamp("us", "America/Los_Angeles"))
    (problem,) = problems(write(tmp_path / "a.parquet", time=aware, seen_time=pa.array(local)))
    assert problem == (
        "a.parquet: column 'seen_time' is list<element: timestamp[us]>, but column 'time' is timestamp[us, "
        "tz=America/Los_Angeles]: row and event times must all be timestamps with a time zone, timestamps without one, "
        "dates, or numbers of one unit"
    )
    utc = pa.array([[(NOON.replace(tzinfo=ZONE) - timedelta(seconds=600)).astimezone(UTC)]] * 2)
    assert ages(write(tmp_path / "a.parquet", time=aware, seen_time=utc)) == [600, 600]


def test_int96_timestamps_of_any_year_are_read(tmp_path: Path) -> None:
    last = datetime(9999, 12, 31)
    table = pq.read_table(write(tmp_path / "a.parquet", time=pa.array([last] * 2), seen_time=[[NOON]] * 2))
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert ages(tmp_path / "a.parquet") == [np.float32((last - NOON).total_seconds())] * 2


@pytest.mark.parametrize(
    ("kind", "row", "event", "age"),
    [
        (pa.int64(), 2**63 - 1, 2**63 - 2, 1),
        (pa.int64(), 2**63 - 1, -(2**63), 2.0**64),
        (pa.uint64(), 2**53 + 2, 2**53 + 1, 1),
        (pa.timestamp("us"), 2**63 - 1, -(2**63), 2.0**64 / 1e6),
    ],
    ids=str,
)
def test_ages_between_extreme_times_do_not_wrap(tmp_path: Path, kind: Any, row: int, event: int, age: float) -> None:
    rows, events = pa.array([row] * 2, kind), pa.array([[event]] * 2, pa.list_(kind))
    assert ages(write(tmp_path / "a.parquet", time=rows, seen_time=events)) == [np.float32(age)] * 2
    with pytest.raises(InputError, match="not earlier than its row"):
        early = pa.array([event] * 2, kind)
        ages(write(tmp_path / "a.parquet", time=early, seen_time=pa.array([[row]] * 2, pa.list_(kind))))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"time": pa.array([2**63, 3000], pa.uint64())}, "row 0: time: a row with events but without a time"),
        ({"time": pa.array([1e300, 1e4])}, "row 0: sequence 'seen': seen_time: an event whose age is beyond float32"),
        ({"seen_time": pa.array([[None], [4]])}, "row 0: sequence 'seen': seen_time: an event without a time"),
        ({"clicked": pa.array([1 + 1e-12, 1])}, "row 0: clicked: a label is 0 or 1, not 1.000000000001"),
        ({"clicked": pa.array([2**53 + 1, 1])}, "row 0: clicked: a label is 0 or 1, not 9007199254740992.0"),
        ({"price": pa.array([Decimal(10) ** 39, Decimal(1)])}, "row 0: price: not a finite number"),
    ],
)
def test_values_that_would_become_others_are_refused(tmp_path: Path, columns: Any, expected: str) -> None:
    (problem,) = problems(write(tmp_path / "a.parquet", **columns))
    assert problem.startswith(f"a.parquet: row group 0, {expected}")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([1_700_000_000 * 10**9 + 1, -(2**63)], [1.7e18, -(2.0**63)]),
        (pa.array([2**64 - 1, None], pa.uint64()), [2.0**64, 0]),
        ([True, False], [1, 0]),
        (pa.array([np.float16(0.5), None], pa.float16()), [0.5, 0]),
        ([Decimal("12345678901234567890.25"), Decimal("-0.01")], [12345678901234567890.25, -0.01]),
        (pa.array([Decimal("1.5"), None], pa.decimal32(5, 2)), [1.5, 0]),
        (pa.array(["x", "x"]).dictionary_encode().indices.dictionary_encode(), [0, 0]),
    ],
    ids=str,
)
def test_dense_values_of_any_number_type_are_rounded_to_float32(tmp_path: Path, column: Any, expected: Any) -> None:
    found = read(write(tmp_path / "a.parquet", price=column)).fixed["dense"][:, 0]
    assert found.tolist() == np.float32(expected).tolist()


def test_weights_and_probabilities_out_of_range_are_refused(tmp_path: Path) -> None:
    text = SPEC + "weight: w\ntrue_probability: p\n"
    path = write(tmp_path / "a.parquet", w=[1e300, 1], p=[0.5, 27.3])
    assert problems(path, text) == [
        "a.parquet: row group 0, row 0: w: a weight is a number ≥ 0, not 1e+300",
        "a.parquet: row group 0, row 1: p: a probability is 0 … 1, not 27.3",
    ]


def test_a_column_of_two_roles_must_suit_both(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", user=["1", "2"])
    text = SPEC.replace("{name: price}", "{name: price}, {name: number, column: user}")
    assert problems(path, text) == ["a.parquet: column 'user' is string; dense 'number' needs a number"]
