"""Whatever a writer makes: the draft loads and reads rows, or one message names what is missing."""

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gemctl.config.schema import DataConfig
from gemctl.data import describe
from gemctl.data.drafting import Draft, draft
from gemctl.data.loader import Loader
from gemctl.errors import InputError
from gemctl.specs.data import FeatureSpec
from gemctl.specs.feature_spec import parse

ROWS = 60
Rng = np.random.Generator


def write(path: Path, columns: dict[str, Any], **how: Any) -> str:
    """Without the Arrow schema that pyarrow adds unless told: types as other writers leave them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = [values if isinstance(values, pa.Array) else pa.array(values) for values in columns.values()]
    pq.write_table(pa.Table.from_arrays(arrays, names=list(columns)), path, **how)
    return str(path)


def columns_of(spec: FeatureSpec) -> set[str]:
    """Every column that the spec names."""
    named: list[Any] = [*spec.categorical, *spec.dense, *spec.labels]
    for sequence in spec.sequences:
        named += [*sequence.ids, *sequence.floats]
    found = {feature.column or feature.name for feature in named} | {one.timestamps for one in spec.sequences}
    return found | {name for name in (spec.timestamp, spec.weight, spec.domain and spec.domain.column) if name}


def reads(path: str, found: Draft) -> FeatureSpec:
    """The draft as a spec, which must load and read a batch, in lines that are all YAML or comments."""
    spec = parse(found.text, "draft")
    loader = Loader(DataConfig(spec="", train=path, prefetch=0), spec, global_batch=8, seed=0, rank=0, world=1)
    _, batch = next(loader)
    loader.close()
    assert len(batch) == 8
    return spec


def test_names_with_dots_are_columns_of_their_own(tmp_path: Path) -> None:
    """`item.views` is no part of `item`, and its range not `item`'s."""
    columns = {
        "item.views": [0, 10**9] * ROWS,
        "item": [0, 1, 2, 3] * (ROWS // 2),
        "item.title": ["a", "b"] * ROWS,
        "user": pa.array([{"views": 10**6, "id": 7}] * 2 * ROWS),
        "y": [0, 1] * ROWS,
    }
    path = write(tmp_path / "a.parquet", columns)
    found = draft(path, ["y"])
    spec = reads(path, found)
    assert {table.name: (table.rows, table.ids) for table in spec.tables}["item"] == (5, "vocab")
    assert "item.views" in columns_of(spec) and "0 … 1000000000" in found.text
    assert found.undecided == {"user": "type struct<views: int64, id: int64> has no role"}


def test_numbers_that_floats_do_not_hold_are_written_whole(tmp_path: Path) -> None:
    clock = 1_700_000_000_123_456_789
    columns = {
        "stamp": [clock + n for n in range(ROWS)],
        "big": pa.array([2**64 - 1, 2**63] * (ROWS // 2), pa.uint64()),
        "half": pa.array(np.arange(ROWS, dtype=np.float16)),
        "price": pa.array([Decimal("1.50"), Decimal("2.25")] * (ROWS // 2), pa.decimal128(38, 2)),
        "y": [0, 1] * (ROWS // 2),
    }
    path = write(tmp_path / "a.parquet", columns)
    found = draft(path, ["y"])
    assert f"{clock} … {clock + ROWS - 1}" in found.text
    assert {"half", "price", "big", "stamp"} <= columns_of(reads(path, found))


def test_the_first_files_may_be_empty_and_later_ones_have_other_ranges(tmp_path: Path) -> None:
    (tmp_path / "notes: x.csv").touch()
    for part, ids in enumerate(([], [1, 2], [5, 90])):
        write(
            tmp_path / f"dt={part}/part.parquet",
            {"item_id": pa.array(ids * ROWS, pa.int64()), "y": pa.array([0, 1] * len(ids) * (ROWS // 2), pa.int64())},
        )
    found = draft(str(tmp_path), ["y"])
    assert found.rows_seen == 4 * ROWS
    assert (
        f"1 file is not read, as their names do not end in .parquet, .pq, .parq: {tmp_path}/notes: x.csv" in found.text
    )
    assert reads(str(tmp_path), found).tables[0].rows == 92
    with pytest.raises(InputError, match="no rows to learn from"):
        draft(str(tmp_path / "dt=0"), [])


def test_a_row_of_more_values_than_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "MOST_VALUES", 10_000)
    columns = {"bomb": [[1] * 20_000, *[[1]] * 39], "x": np.arange(40.0), "y": [0, 1] * 20}
    path = write(tmp_path / "a.parquet", columns)
    found = draft(path, ["y"])
    assert found.undecided == {
        "bomb": "20,039 values in one row group are too many to sample: write smaller row groups"
    }
    assert columns_of(reads(path, found)) == {"x", "y"}


def test_what_a_spec_needs_and_the_table_has_not_is_named(tmp_path: Path) -> None:
    binary = [0, 1] * (ROWS // 2)
    with pytest.raises(InputError) as caught:
        draft(write(tmp_path / "a.parquet", {"y": binary, "blob": [b"x"] * ROWS}), [])
    assert caught.value.problems == [
        f"{tmp_path}/a.parquet: no column can be a feature besides the label",
        "blob: type binary has no role",
    ]
    path = write(tmp_path / "b.parquet", {"y": binary, "x": np.arange(ROWS * 1.0), "blob": [b"x"] * ROWS, "": binary})
    with pytest.raises(InputError, match="--label blob: type binary has no role"):
        draft(path, ["blob"])
    assert "a column without a name" in draft(path, ["y"]).text


def test_a_label_of_one_class_can_be_named_and_half_empty_request_ids_are_no_feature(tmp_path: Path) -> None:
    rows = 2400
    columns = {
        "request_id": [None if n % 2 else f"r{n}" for n in range(rows)],
        "x": np.arange(rows * 1.0),
        "y": [0] * rows,
    }
    found = draft(write(tmp_path / "a.parquet", columns), ["y"])
    assert parse(found.text, "draft").labels[0].name == "y"
    assert found.undecided["request_id"].startswith("nearly every row has a different value; 1,200 distinct in 2,400")


def test_notes_on_odd_names_stay_comments(tmp_path: Path) -> None:
    odd = {
        "a\nlabels: []": [b"x"] * ROWS,
        'he said: "1e5"\u2028#': np.arange(ROWS * 1.0),
        "x y": np.arange(ROWS * 1.0),
        "x_y": np.arange(ROWS * 2.0)[::2],
        "type": ["a", "b"] * (ROWS // 2),
        "1e5": np.arange(ROWS * 3.0)[::3],
        "日本": ["a", "b"] * (ROWS // 2),
        "y": [0, 1] * (ROWS // 2),
    }
    path = write(tmp_path / "odd\nname.parquet", odd)
    found = draft(path, ["y"])
    spec = reads(path, found)
    assert columns_of(spec) == set(odd) - {"a\nlabels: []"}
    assert sorted(feature.name for feature in spec.dense) == ["1e5", "he_said___1e5___", "x_y", "x_y_2"]


def _lists(rng: Rng, count: int, make: Callable[[], Any]) -> list[Any]:
    return [None if rng.random() < 0.1 else [make() for _ in range(rng.integers(0, 4))] for _ in range(count)]


def _random(rng: Rng, count: int) -> pa.Array:
    """A column of any type, sometimes with nulls, sometimes with a single value."""
    now = datetime(2026, 1, 1)
    numbers = rng.integers(0, int(rng.choice([2, 5, 100, 10**6])), count)
    width = rng.choice(["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
    whole = pa.array(numbers).cast(getattr(pa, str(width))(), safe=False)
    real = rng.choice([1.0, np.nan, np.inf, -np.inf, 1e300, 0.0], count, p=[0.9, 0.02, 0.02, 0.02, 0.02, 0.02])
    words = [f"w{n}" for n in numbers]
    makers: list[Callable[[], pa.Array]] = [
        lambda: whole,
        lambda: pa.array(rng.integers(-(2**63), 2**63 - 1, count)),
        lambda: pa.array(rng.integers(0, 2**64 - 1, count, dtype=np.uint64)),
        lambda: pa.array(rng.random(count) * real),
        lambda: pa.array(rng.random(count).astype(str(rng.choice(["float16", "float32"])))),
        lambda: pa.array(rng.integers(0, 2, count)).cast(rng.choice([pa.int8(), pa.bool_(), pa.float32(), pa.int64()])),
        lambda: pa.array(words).cast(rng.choice([pa.string(), pa.large_string(), pa.string_view()])),
        lambda: pa.array(words).dictionary_encode(),
        whole.dictionary_encode,
        lambda: pa.array([word.encode() for word in words]),
        lambda: pa.array([b"0123456789abcdef"] * count, pa.binary(16)),
        lambda: pa.array([now + timedelta(seconds=int(n)) for n in numbers]),
        lambda: pa.array([now.replace(tzinfo=UTC) + timedelta(seconds=int(n)) for n in numbers]),
        lambda: pa.array([date(2026, 1, 1) + timedelta(days=int(n % 300)) for n in numbers]),
        lambda: pa.array([time(int(n % 24)) for n in numbers]),
        lambda: pa.array([timedelta(seconds=int(n)) for n in numbers]),
        lambda: pa.array([Decimal(int(n)) / 4 for n in numbers], pa.decimal128(20, 2)),
        lambda: pa.array([Decimal(int(n)) for n in numbers], pa.decimal256(40, 0)),
        lambda: pa.nulls(count, rng.choice([pa.null(), pa.int64(), pa.string(), pa.list_(pa.int64())])),
        lambda: pa.array([{"a": int(n), "b.c": str(n)} for n in numbers]),
        lambda: pa.array([[(str(n), int(n))] for n in numbers], pa.map_(pa.string(), pa.int64())),
        lambda: pa.array(_lists(rng, count, lambda: int(rng.integers(0, 50))), pa.list_(pa.int32())),
        lambda: pa.array(_lists(rng, count, rng.random), pa.list_(pa.float64())),
        lambda: pa.array(_lists(rng, count, lambda: f"t{rng.integers(0, 9)}"), pa.large_list(pa.string())),
        lambda: pa.array([[int(n), 1] for n in numbers], pa.list_(pa.int64(), 2)),
        lambda: pa.array([[[int(n)]] for n in numbers], pa.list_(pa.list_(pa.int64()))),
        lambda: pa.array([[{"a": int(n)}] for n in numbers], pa.list_(pa.struct([("a", pa.int64())]))),
        lambda: pa.array(_lists(rng, count, lambda: now - timedelta(days=1)), pa.list_(pa.timestamp("ms"))),
        lambda: pa.array(_lists(rng, count, lambda: 5), pa.list_(pa.int64())),
        lambda: pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef"] * count, pa.binary(16))),
    ]  # fmt: skip
    made = makers[rng.integers(len(makers))]()
    if rng.random() < 0.15 and not isinstance(made, (pa.ExtensionArray, pa.StringViewArray)):
        made = made.take(pa.array([None if rng.random() < 0.5 else n for n in range(count)], pa.int64()))
    return made


PLAIN_NAMES = """
y clicked label user_id item item.title item.views user history_item history_time time seen_at weight domain timestamp
type items tags x_y x-y a:b a/b # 1e5 null true ~ { [a] - _id ids pctr hist_ % ${x} 日本 é " '
"""
NAMES = [*PLAIN_NAMES.split(), "x y", "a\nb", "\t", "", "\\", "\u2028", "__index_level_0__", "e" * 300]
MISSING = r"no rows to learn from|which column is the label\?|no column can be a feature|label .*: "


def try_random_tables(folder: Path, seeds: range) -> int:
    """Drafts a spec for one random data set a seed; returns how many drafts there were."""
    drafted = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        names = [str(name) for name in rng.choice(NAMES, rng.integers(1, 9), replace=bool(rng.random() < 0.1))]
        path, labelled = folder / str(seed), rng.random() < 0.9
        empty, rows = int(rng.choice([0, 8])), int(rng.choice([8, 40, 120]))
        whole = _table(rng, names, empty + rows, labelled)
        parts = [whole.slice(0, empty), whole.slice(empty)]
        if rng.random() < 0.1:
            parts[1] = _table(rng, names, rows, labelled)
        for part, table in enumerate(parts):
            (path / f"dt={part}").mkdir(parents=True)
            pq.write_table(
                table, path / f"dt={part}/part.parquet", row_group_size=int(rng.choice([7, 50])),
                store_schema=bool(rng.random() < 0.5), use_dictionary=bool(rng.random() < 0.5),
            )  # fmt: skip
        label = names[:1] if labelled and rng.random() < 0.9 else []
        try:
            found = draft(str(path), label)
        except InputError as error:
            assert re.search(MISSING, error.problems[0]), (seed, error.problems)
            continue
        spec = reads(str(path), found)
        assert columns_of(spec) | set(found.undecided) == set(names), (seed, found.text)
        assert not columns_of(spec) & set(found.undecided), (seed, found.text)
        assert "# These rows can't be read" not in found.text, (seed, found.text)
        drafted += 1
    return drafted


def _table(rng: Rng, names: list[str], count: int, labelled: bool) -> pa.Table:
    arrays = [_random(rng, count) for _ in names]
    if labelled:
        arrays[0] = pa.array([n % 2 for n in range(count)])
    return pa.Table.from_arrays(arrays, names=names)


def test_30_random_tables(tmp_path: Path) -> None:
    assert try_random_tables(tmp_path, range(30)) > 12


@pytest.mark.slow
def test_400_random_tables(tmp_path: Path) -> None:
    assert try_random_tables(tmp_path, range(30, 430)) > 200
