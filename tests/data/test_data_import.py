"""RecBole atomic files → Parquet, against a plain Python reading of the same files."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gemctl import env
from gemctl.commands.data import import_log
from gemctl.data.importing import import_recbole
from gemctl.data.parquet import ParquetSource
from gemctl.errors import InputError
from gemctl.specs.feature_spec import load

GENRES = ["Drama", "Comedy", "Film-Noir", "War"]


def write_log(folder: Path, rows: int = 400, seed: int = 0) -> Path:
    """A tiny data set: few users, many ties in time, users and items that come late or have no side line."""
    draw = random.Random(seed)
    folder.mkdir()
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for row in range(rows):
        user, item = f"u{draw.randrange(5 + row // 60)}", f"i{draw.randrange(20 + row // 10)}"
        lines.append(f"{user}\t{item}\t{draw.randint(1, 5)}\t{1000 + (row + draw.randrange(20)) // 4}")
    (folder / "tiny.inter").write_text("\n".join(lines) + "\n")
    lines = ["user_id:token\tage:token\tgender:token\tscore:float\tvector:float_seq"]
    lines += [f"u{n}\t{20 + n}\t{'MF'[n % 2] if n else ''}\t{n / 4}\t0 1" for n in range(9)]
    (folder / "tiny.user").write_text("\n".join(lines) + "\n")
    lines = ["item_id:token\ttitle:token_seq\tyear:token\tclass:token_seq"]
    for n in range(55):
        lines.append(f"i{n}\ttitle {n}\t{1950 + n}\t{' '.join(GENRES[: n % 4])}")
    (folder / "tiny.item").write_text("\n".join(lines) + "\n")
    return folder


def plain_rows(path: Path) -> list[dict[str, Any]]:
    """The interactions in order of time, ties in order of the file."""
    lines = path.read_text().splitlines()[1:]
    rows = [dict(zip(("user", "item", "rating", "time"), line.split("\t"), strict=True)) for line in lines]
    found = [{**row, "rating": float(row["rating"]), "time": int(row["time"])} for row in rows]
    return sorted(found, key=lambda row: row["time"])


def check_rows(rows: list[dict[str, Any]], table: Any, numbers: list[int], limit: int) -> None:
    """Row n of the import says what plain Python finds among the strictly earlier rows."""
    for n in numbers:
        row, found = rows[n], table[n]
        before = [other for other in rows[:n] if other["time"] < row["time"]]
        mine = [other for other in before if other["user"] == row["user"]]
        items = [other for other in before if other["item"] == row["item"]]
        assert (found["time"], found["user_token"], found["item_token"]) == (row["time"], row["user"], row["item"])
        assert (found["label_liked"], found["label_loved"]) == (row["rating"] >= 4, row["rating"] == 5)
        assert found["history_time"] == [other["time"] for other in mine][-limit:]
        assert len(found["history_item"]) == len(found["history_rating"]) == min(len(mine), limit)
        assert (found["earlier_user_rows"], found["earlier_item_rows"]) == (len(mine), len(items))
        prior = (sum(other["rating"] >= 4 for other in before) + 1) / (len(before) + 2)
        liked = (sum(other["rating"] >= 4 for other in mine) + 10 * prior) / (len(mine) + 10)
        assert found["earlier_user_liked"] == pytest.approx(liked, rel=1e-5)


def read_all(folder: Path) -> list[dict[str, Any]]:
    return [row for part in ("train", "valid", "test") for row in pq.read_table(folder / f"{part}.parquet").to_pylist()]


def test_every_row_knows_only_what_came_strictly_before(tmp_path: Path) -> None:
    source = write_log(tmp_path / "raw")
    result = import_recbole(source, tmp_path / "out", history=7)
    rows = plain_rows(source / "tiny.inter")
    table = read_all(tmp_path / "out")
    assert sum(result.rows.values()) == len(rows) == len(table)
    check_rows(rows, table, list(range(len(rows))), limit=7)
    # the same items and ratings, by the vocabularies of the training part
    known = json.loads((tmp_path / "out" / "vocabularies.json").read_text())["tables"]
    for row, found in zip(rows, table, strict=True):
        index = known["item"].index(row["item"]) if row["item"] in known["item"] else -1
        assert found["item"] == index
        events = [r for r in rows if r["user"] == row["user"] and r["time"] < row["time"]][-7:]
        assert found["history_rating"] == [known["event_rating"].index(f"{r['rating']:g}") for r in events]


def test_parts_are_cut_by_time_and_vocabularies_come_from_training(tmp_path: Path) -> None:
    source = write_log(tmp_path / "raw")
    result = import_recbole(source, tmp_path / "out")
    rows = plain_rows(source / "tiny.inter")
    times = {part: [row["time"] for row in pq.read_table(tmp_path / "out" / f"{part}.parquet").to_pylist()]
             for part in ("train", "valid", "test")}  # fmt: skip
    assert max(times["train"]) < min(times["valid"]) <= max(times["valid"]) < min(times["test"])
    assert result.rows == {part: len(found) for part, found in times.items()}
    assert abs(result.rows["train"] - 320) <= 12
    train = rows[: result.rows["train"]]
    known = json.loads((tmp_path / "out" / "vocabularies.json").read_text())["tables"]
    assert set(known["user"]) == {row["user"] for row in train}
    assert result.tables["user"] == len(known["user"]) + 1
    spec = load(tmp_path / "out" / "spec.yaml")
    block = ParquetSource(str(tmp_path / "out" / "test.parquet"), spec).read(np.arange(result.rows["test"]))
    new = [row["user"] not in known["user"] for row in rows[-result.rows["test"] :]]
    assert (block.fixed["categorical/user"] == len(known["user"])).tolist() == new
    assert any(new)
    assert result.labels["liked"] == pytest.approx(sum(row["rating"] >= 4 for row in train) / len(train))


def test_side_columns_get_roles_and_what_gets_none_is_said(tmp_path: Path) -> None:
    result = import_recbole(write_log(tmp_path / "raw"), tmp_path / "out")
    spec = load(tmp_path / "out" / "spec.yaml")
    assert [feature.name for feature in spec.categorical] == [
        "user", "item", "user_age", "user_gender", "item_year", "item_class",
    ]  # fmt: skip
    assert {feature.name for feature in spec.categorical if feature.multi} == {"item_class"}
    assert "user_score" in [feature.name for feature in spec.dense]
    assert result.notes == [
        "tiny.user: vector left out: float_seq has no role",
        "tiny.item: title left out: 56 distinct tokens in 55 lines, in effect an id",
    ]
    table = read_all(tmp_path / "out")
    known = json.loads((tmp_path / "out" / "vocabularies.json").read_text())["tables"]
    for row in table:
        number = int(row["item_token"][1:])
        genres = [known["item_class"][index] for index in row["item_class"]]
        assert genres == (GENRES[: number % 4] if number < 55 else [])
        user = int(row["user_token"][1:])
        assert row["user_gender"] == (known["user_gender"].index("MF"[user % 2]) if 0 < user < 9 else -1)
    assert result.tables["item_year"] <= 17  # 55 years became buckets of equal share
    buckets = sorted((int(row["item_token"][1:]), row["item_year"]) for row in table if int(row["item_token"][1:]) < 55)
    order = [known["item_year"][index] for _, index in buckets]
    assert [int(bucket) for bucket in order] == sorted(int(bucket) for bucket in order)


def test_labels_can_be_chosen(tmp_path: Path) -> None:
    source = write_log(tmp_path / "raw")
    result = import_log(str(source), str(tmp_path / "out"), ["bad=rating<3", "five = rating == 5"], 10)
    rows = plain_rows(source / "tiny.inter")
    assert [row["label_bad"] for row in read_all(tmp_path / "out")] == [row["rating"] < 3 for row in rows]
    assert [label.name for label in load(tmp_path / "out" / "spec.yaml").labels] == ["bad", "five"]
    assert set(result.labels) == {"bad", "five"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "rating:float",
            "rating:flaot",
            "tiny.inter:1: header cell 'rating:flaot' is not name:type; did you mean float?",
        ),
        ("timestamp:float", "timestep:float", "tiny.inter:1: no column timestamp:float"),
        ("item_id:token\trating:float", "item_id:float\trating:float", "needs two token columns"),
        ("rating:float", "user_id:float", "tiny.inter:1: column 'user_id' occurs twice"),
        ("u0\t", "u0\tmore\t", "tiny.inter:6: 5 cells, but the header has 4"),
        ("\t1001\n", "\t1_0\n", "tiny.inter:5: column 'timestamp': '1_0' is not a number"),
        ("u0\t", "\t", "tiny.inter: column 'user_id': 1 empty cells"),
        ("\t1001\n", "\tinf\n", "tiny.inter: column 'timestamp': 1 times are not finite numbers"),
        ("\t1001\n", "\tnan\n", "tiny.inter: column 'timestamp': 1 times are not finite numbers"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = write_log(tmp_path / "raw") / "tiny.inter"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InputError) as error:
        import_recbole(path, tmp_path / "out")
    assert len(error.value.problems) == 1
    assert expected in error.value.problems[0]


def test_times_beyond_integers_stay_floats(tmp_path: Path) -> None:
    path = write_log(tmp_path / "raw") / "tiny.inter"
    path.write_text(path.read_text().replace("\t1001\n", "\t-1e19\n", 1))
    import_recbole(path, tmp_path / "out")
    assert pq.read_table(tmp_path / "out/train.parquet")["time"][0].as_py() == -1e19


def test_wrong_labels_are_named_all_at_once(tmp_path: Path) -> None:
    source = write_log(tmp_path / "raw")
    with pytest.raises(InputError) as error:
        import_recbole(source, tmp_path / "out", labels=["rating>3", "a=stars>3", "b=rating>3", "b=rating>4"])
    assert [problem.split(": ", 1)[1] for problem in error.value.problems] == [
        "expected NAME=COLUMN>=NUMBER (or >, <=, <, ==)",
        "tiny.inter has no float column 'stars'",
        "a second label with this name",
    ]


@pytest.mark.skipif(env.test_data() is None, reason="GEMCTL_TEST_DATA is not set: no real data set here")
def test_ml_100k(tmp_path: Path) -> None:
    source = Path(env.test_data() or "") / "ml-100k"
    result = import_recbole(source, tmp_path / "out")
    assert sum(result.rows.values()) == 100_000
    assert result.rows["train"] == pytest.approx(80_000, abs=50)
    rows = plain_rows(source / "ml-100k.inter")
    chosen = [*sorted(random.Random(0).sample(range(99_999), 3)), 99_999]
    table = read_all_of(tmp_path / "out", chosen)
    check_rows(rows, table, chosen, limit=100)
    spec = load(tmp_path / "out" / "spec.yaml")
    assert {"user_age", "user_gender", "user_occupation", "item_class"} <= {f.name for f in spec.categorical}
    ParquetSource(str(tmp_path / "out" / "train.parquet"), spec).read(np.arange(result.rows["train"]))


def read_all_of(folder: Path, numbers: list[int]) -> dict[int, dict[str, Any]]:

    table = pa.concat_tables([pq.read_table(folder / f"{part}.parquet") for part in ("train", "valid", "test")])
    return dict(zip(numbers, table.take(numbers).to_pylist(), strict=True))
