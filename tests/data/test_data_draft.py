"""The drafted spec: right guesses with reasons, nothing dropped silently, and it trains as it is."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gemctl.commands.data import draft_spec
from gemctl.config.schema import DataConfig
from gemctl.data.drafting import draft
from gemctl.data.loader import Loader
from gemctl.errors import InputError
from gemctl.specs.data import FeatureSpec
from gemctl.specs.feature_spec import load, parse

ROWS = 2000


def shop(**changes: Any) -> dict[str, Any]:
    """A log as a user might have it: strings, Arrow timestamps, lists, things that are no feature."""
    rng = np.random.default_rng(0)
    start = datetime(2026, 3, 1)
    lengths = rng.integers(0, 6, ROWS).tolist()
    columns: dict[str, Any] = {
        "request_id": [f"r{n}" for n in range(ROWS)],
        "created_at": [start + timedelta(minutes=n) for n in range(ROWS)],
        "user_id": [f"user-{n}" for n in rng.integers(0, 300, ROWS)],
        "item_id": rng.integers(0, 800, ROWS),
        "device": pa.array(rng.choice(["ios", "android", "web"], ROWS)).dictionary_encode(),
        "surface": rng.integers(0, 3, ROWS),
        "price": np.exp(rng.normal(2, 3, ROWS)),
        "age": rng.integers(18, 90, ROWS),
        "tags": [[f"t{n}" for n in rng.integers(0, 50, k)] for k in rng.integers(0, 4, ROWS)],
        "clicked_item_ids": [rng.integers(0, 800, n).tolist() for n in lengths],
        "clicked_at": [[start - timedelta(hours=n - k) for k in range(n)] for n in lengths],
        "clicked_dwell": [rng.random(n).tolist() for n in lengths],
        "embedding": [rng.random(2).tolist()] * ROWS,
        "constant": [1] * ROWS,
        "predicted_ctr": rng.random(ROWS),
        "sample_weight": rng.random(ROWS),
        "raw": [b"x"] * ROWS,
        "clicked": rng.integers(0, 2, ROWS).astype(bool),
        "is_member": rng.integers(0, 2, ROWS).astype(bool),
    }
    return columns | changes


def write(path: Path, columns: dict[str, Any]) -> str:
    pq.write_table(pa.table({name: values for name, values in columns.items() if values is not None}), path)
    return str(path)


def spec_of(path: str, *labels: str) -> FeatureSpec:
    return parse(draft(path, list(labels)).text, "draft")


def test_the_draft_gives_every_column_its_role(tmp_path: Path) -> None:
    path = write(tmp_path / "shop.parquet", shop())
    found = draft(path, [])
    spec = parse(found.text, "draft")
    assert (spec.name, spec.timestamp, spec.weight) == ("shop", "created_at", "sample_weight")
    assert (spec.domain.column, spec.domain.count) == ("surface", 3) if spec.domain else False
    assert {(f.name, f.table, f.multi) for f in spec.categorical} == {
        ("user_id", "user", False),
        ("item_id", "item", False),
        ("device", "device", False),
        ("tags", "tag", True),
    }
    assert {(t.name, t.ids) for t in spec.tables} == {
        ("user", "hash"), ("item", "vocab"), ("device", "hash"), ("tag", "hash"),
    }  # fmt: skip
    assert {(f.name, f.log) for f in spec.dense} == {("price", True), ("age", False), ("is_member", False)}
    (sequence,) = spec.sequences
    assert (sequence.timestamps, sequence.max_length) == ("clicked_at", 5)
    assert [(f.name, f.table, f.column) for f in sequence.ids] == [("item", "item", "clicked_item_ids")]
    assert [(f.name, f.column) for f in sequence.floats] == [("dwell", "clicked_dwell")]
    assert [label.name for label in spec.labels] == ["clicked"]
    assert set(found.undecided) == {"request_id", "embedding", "constant", "predicted_ctr", "raw"}
    for name, reason in found.undecided.items():
        assert f"#   {name}: {reason}" in found.text
    for line in found.text.splitlines():
        if line.lstrip().startswith("- {"):
            assert " # " in line, f"no reason given: {line}"


def test_the_draft_trains_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "shop.parquet", shop())
    draft_spec(path, [], str(tmp_path / "spec.yaml"))
    loader = Loader(
        DataConfig(spec="", train=path), load(tmp_path / "spec.yaml"), global_batch=100, seed=0, rank=0, world=1
    )
    _, batch = next(loader)
    loader.close()
    assert batch.unknown_ids == dict.fromkeys(batch.unknown_ids, 0)
    assert batch.tokens() > 100


def test_names_that_a_spec_refuses_get_another(tmp_path: Path) -> None:
    """A table and a sequence can't be called like a member of PyTorch's modules; features and columns can."""
    columns = shop()
    columns["type"] = columns.pop("device")
    columns["items_at"], columns["items_clicked"] = columns.pop("clicked_at"), columns.pop("clicked_item_ids")
    spec = spec_of(write(tmp_path / "shop.parquet", columns))
    assert {feature.name: feature.table for feature in spec.categorical}["type"] == "type_id"
    assert "type_id" in [table.name for table in spec.tables]
    assert [sequence.name for sequence in spec.sequences] == ["items_events"]


def test_a_draft_is_not_written_over_a_spec(tmp_path: Path) -> None:
    path = write(tmp_path / "shop.parquet", shop())
    (tmp_path / "spec.yaml").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        draft_spec(path, [], str(tmp_path / "spec.yaml"))
    assert (tmp_path / "spec.yaml").read_text() == "mine"


def test_a_label_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "shop.parquet", shop())
    assert [label.name for label in spec_of(path, "is_member").labels] == ["is_member"]
    with pytest.raises(InputError) as error:
        draft(path, ["age", "clikced"])
    assert error.value.problems == [
        f"{path}: --label clikced: no such column",
        f"{path}: --label age: a label is 0 or 1; this column is int64, 72 distinct in 2,000, 18 … 89",
    ]


def test_without_a_clear_label_it_asks(tmp_path: Path) -> None:
    columns = shop(clicked=None, outcome=[n % 3 == 0 for n in range(ROWS)])
    with pytest.raises(InputError, match=r"Use --label COLUMN \(columns of 0 and 1: is_member, outcome\)"):
        draft(write(tmp_path / "a.parquet", columns), [])
    columns = shop(clicked=None, is_member=None)
    with pytest.raises(InputError, match="no column has only 0 and 1"):
        draft(write(tmp_path / "b.parquet", columns), [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"created_at": None}, "no column looks like the row's own time"),
        ({"created_at": np.arange(ROWS)}, "a list of timestamp[us], but the row's time is int64"),
        (
            {"clicked_at": [[datetime(2020, 1, 1 + n % 9)] * (n % 3) for n in range(ROWS)]},
            "no list of ids has the same length",
        ),
        ({"created_at": [datetime(2020, 1, 1)] * ROWS}, "some are not earlier than created_at"),
    ],
)
def test_lists_that_are_no_history_are_left_out_with_the_reason(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    found = draft(write(tmp_path / "shop.parquet", shop(**change)), [])
    assert parse(found.text, "draft").sequences == []
    assert reason in found.undecided["clicked_at"]


def test_columns_whose_values_cannot_be_read_are_left_out_with_the_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "shop.parquet", shop(price=[float("inf")] + [1.0 * n for n in range(ROWS - 1)]))
    found = draft(path, [])
    assert found.undecided["price"] == f"{path}: row group 0, row 0: price: not a finite number"
    assert "price" not in {feature.name for feature in parse(found.text, "draft").dense}


def test_another_outcome_is_no_feature(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    outcomes = {"purchased": rng.integers(0, 2, ROWS), "target": rng.random(ROWS), "likes": rng.integers(0, 90, ROWS)}
    found = draft(write(tmp_path / "a.parquet", shop(**outcomes)), ["clicked"])
    assert found.undecided["purchased"] == (
        "named like an outcome: as a feature it might reveal the answer; --label makes it a label"
    )
    assert found.undecided["target"].startswith(
        "named like an outcome: as a feature it might reveal the answer; not a label"
    )
    spec = parse(found.text, "draft")
    assert "likes" in [feature.name for feature in spec.dense], "a count may be a feature"
    assert [label.name for label in spec.labels] == ["clicked"]
    both = spec_of(str(tmp_path / "a.parquet"), "clicked", "purchased")
    assert [label.name for label in both.labels] == ["clicked", "purchased"]


def test_ids_that_became_floats_are_no_number(tmp_path: Path) -> None:
    ids = [None if n % 5 == 0 else float(n % 40) for n in range(ROWS)]
    heights = [n % 40 + 0.5 for n in range(ROWS)]
    found = draft(write(tmp_path / "a.parquet", shop(brand_id=ids, height_class=heights, floor=ids)), [])
    assert found.undecided["brand_id"].startswith("named like ids, which are integers or text, but double")
    names = {feature.name for feature in parse(found.text, "draft").dense}
    assert {"height_class", "floor"} <= names
    assert "brand_id" not in names


def test_events_in_another_unit_than_their_rows_are_no_sequence(tmp_path: Path) -> None:
    rows = 50
    columns = {"ts": [1_700_000_000_000 + n for n in range(rows)], "item": [n % 7 for n in range(rows)]}
    lists = {"seen": [[n % 7] for n in range(rows)], "seen_ts": [[1_699_999_000 + n] for n in range(rows)]}
    path = write(tmp_path / "a.parquet", columns | lists | {"clicked": [n % 2 for n in range(rows)]})
    assert draft(path, []).undecided["seen_ts"] == (
        "a list of times up to 1699999049, but ts is 1.7e+12 or more: of another unit?"
    )
    lists["seen_ts"] = [[1_699_999_000_000 + n] for n in range(rows)]
    path = write(tmp_path / "b.parquet", columns | lists | {"clicked": [n % 2 for n in range(rows)]})
    assert [sequence.timestamps for sequence in spec_of(path).sequences] == ["seen_ts"]
