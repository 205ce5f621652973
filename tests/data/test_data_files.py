"""What a data path means: files, folders with partitions, globs, lists; what is passed over and what is said."""

from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gemctl.config.compose import compose
from gemctl.config.schema import Config, DataConfig
from gemctl.data import parquet
from gemctl.data.files import find_files
from gemctl.data.parquet import READ_BYTES, ParquetSource
from gemctl.errors import InputError
from gemctl.launch.inputs import absolute_paths
from gemctl.plan.build import build
from gemctl.plan.data_facts import data_facts
from gemctl.plan.job import check_data
from gemctl.specs.feature_spec import load, parse

SPEC = "{name: s, tables: [], dense: [{name: x}], labels: [{name: y}]}"


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def found(root: Path, *paths: str) -> list[str]:
    """Paths below root, each a file of the data set."""
    files = find_files([str(root / path) for path in paths]).files
    return [str(Path(file.path).relative_to(root)) for file in files]


@pytest.mark.parametrize("url", ["generic://x", "zip://*.parquet::{}", "tar://*.parquet::{}", "jupyter://h/x"])
def test_what_a_file_system_raises_is_told_as_a_problem_of_the_path(url: str, tmp_path: Path) -> None:
    (tmp_path / "no_archive").write_text("x")
    url = url.format(tmp_path / "no_archive")
    for read in (find_files, load):
        with pytest.raises(InputError) as refused:
            read(url)
        assert str(refused.value).startswith(f"{url}: ") and "can't be read: " in str(refused.value)


def rows(path: Path, *values: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": list(values), "y": [0] * len(values)}), path)
    return path


def test_a_folder_is_read_with_all_below_it_folder_by_folder(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "top.parquet", "dt=2026-03-01/b.PARQUET", "dt=2026-03-01/a.pq", "dt=2026-03-01-late/c.parq", "_dt=9/d.parquet",
        "_SUCCESS", "_temporary/0/x.parquet", ".top.parquet.crc", ".hidden/x.parquet", "dt=2026-03-01/_committed",
    )  # fmt: skip
    expected = [
        "_dt=9/d.parquet", "dt=2026-03-01/a.pq", "dt=2026-03-01/b.PARQUET", "dt=2026-03-01-late/c.parq", "top.parquet",
    ]  # fmt: skip
    assert found(tmp_path, "") == expected
    assert find_files(str(tmp_path)).ignored == []


def test_a_glob_matches_files_and_folders_over_any_number_of_folders(tmp_path: Path) -> None:
    touch(
        tmp_path, "dt=1/h=1/a.parquet", "dt=1/h=2/a.parquet", "dt=2/a.parquet", "dt=2/_tmp/b.parquet", "dt=2/c.csv",
        "_staging/a.parquet",
    )  # fmt: skip
    assert found(tmp_path, "dt=[12]/h=*/a.parquet") == ["dt=1/h=1/a.parquet", "dt=1/h=2/a.parquet"]
    assert found(tmp_path, "dt=2*") == ["dt=2/a.parquet"]
    everything = ["dt=1/h=1/a.parquet", "dt=1/h=2/a.parquet", "dt=2/a.parquet"]
    assert found(tmp_path, "**") == found(tmp_path, "**/*.parquet") == found(tmp_path, "*") == everything
    assert found(tmp_path, "_*/*.parquet") == ["_staging/a.parquet"]


def test_a_path_that_exists_is_no_glob(tmp_path: Path) -> None:
    touch(tmp_path, "a[1]*?.parquet", "a1.parquet", "run[1]/x.parquet", "odd name::%#@&.data")
    for name in ("a[1]*?.parquet", "odd name::%#@&.data"):
        assert found(tmp_path, name) == [name]
    assert found(tmp_path, "run[1]") == ["run[1]/x.parquet"]


def test_a_list_keeps_its_order_and_names_no_file_twice(tmp_path: Path) -> None:
    touch(tmp_path, "new/b.parquet", "new/a.parquet", "base.parquet")
    assert found(tmp_path, "new", "base.parquet") == ["new/a.parquet", "new/b.parquet", "base.parquet"]
    with pytest.raises(InputError) as caught:
        find_files([str(tmp_path / "new"), str(tmp_path / "new/a.*"), str(tmp_path / "gone")])
    assert caught.value.problems == [
        f"{tmp_path}/gone: no such file or folder",
        f"{tmp_path}/new/a.parquet: is listed 2 times: its rows would be read 2 times",
    ]


def test_a_file_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "dt=1/a.parquet", "dt=2/a.parquet")
    (tmp_path / "latest").symlink_to("dt=2")
    (tmp_path / "b.parquet").symlink_to("dt=2/a.parquet")
    monkeypatch.chdir(tmp_path)
    absolute = f"{tmp_path}/dt=1/a.parquet"
    for paths, first, others in (
        (["dt=1/a.parquet", absolute], "dt=1/a.parquet", absolute),
        (["dt=1", "./dt=1", "dt=1"], "dt=1/a.parquet", "./dt=1/a.parquet"),
        (["dt=2/../dt=1", f"file://{absolute}"], "dt=2/../dt=1/a.parquet", absolute),
        (["*"], "b.parquet", "dt=2/a.parquet, latest/a.parquet"),
        (["."], "./b.parquet", "./dt=2/a.parquet, ./latest/a.parquet"),
    ):
        with pytest.raises(InputError) as caught:
            find_files(paths)
        times = 3 if len(paths) != 2 else 2
        problem = f"{first}: is listed {times} times (also as {others}): its rows would be read {times} times"
        assert caught.value.problems == [problem]


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    touch(tmp_path, "lake/dt=1/a.parquet", "set/own.parquet", "other.parquet")
    (tmp_path / "set/linked").symlink_to(tmp_path / "lake")
    (tmp_path / "set/one.parquet").symlink_to(tmp_path / "other.parquet")
    (tmp_path / "lake/dt=1/up").symlink_to(tmp_path / "lake")
    expected = ["set/linked/dt=1/a.parquet", "set/one.parquet", "set/own.parquet"]
    assert found(tmp_path, "set") == sorted(found(tmp_path, "set/**/*.parquet")) == expected


def test_urls_mean_what_paths_mean() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("dt=1/b.PQ", "dt=1/a.parquet", "dt=0/x.parquet", "_tmp/x.parquet", "dt=1/.x.parquet", "note.txt"):
        memory.pipe(f"/lake/{name}", b"")
    try:
        expected = [f"/lake/{name}" for name in ("dt=0/x.parquet", "dt=1/a.parquet", "dt=1/b.PQ")]
        for url in ("memory://lake", "memory://lake/*", "memory://lake/**"):
            files = find_files(url)
            assert [file.path for file in files.files] == expected
            assert files.ignored == ["/lake/note.txt"]
        assert [file.path for file in find_files("memory://lake/dt=*/*.parquet").files] == expected[:2]
    finally:
        memory.rm("/lake", recursive=True)


def test_ignored_files_are_noted(tmp_path: Path) -> None:
    rows(tmp_path / "logs/dt=1/a.parquet", 1.0)
    touch(tmp_path, "logs/dt=1/part-1.csv", "logs/b.orc", "logs/c", "logs/d.gz", "logs/_SUCCESS", "text/e.csv")
    (tmp_path / "spec.yaml").write_text(SPEC)
    (line,) = check_data(DataConfig(spec=str(tmp_path / "spec.yaml"), train=str(tmp_path / "logs")))
    assert "data.train: 4 files are not read, as their names do not end in .parquet, .pq, .parq" in line
    assert "b.orc" in line and "and 1 more" in line and "_SUCCESS" not in line
    for path in ("text", "text/*"):
        with pytest.raises(
            InputError, match=r"no Parquet file \(\.parquet, \.pq, \.parq\) .*; not read: .*/text/e\.csv"
        ):
            find_files(str(tmp_path / path))


def test_evaluating_rows_that_are_trained_on_is_noted(tmp_path: Path) -> None:
    for day in (1, 2):
        rows(tmp_path / f"dt={day}/a.parquet", 1.0)
    (tmp_path / "later").symlink_to("dt=2")
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec, both = str(tmp_path / "spec.yaml"), [str(tmp_path / f"dt={day}") for day in (1, 2)]
    assert check_data(DataConfig(spec=spec, train=both[0], eval=both[1])) == []
    (line,) = check_data(DataConfig(spec=spec, train=both, eval=str(tmp_path / "later")))
    assert f"data.eval: {tmp_path}/later/a.parquet: also in data.train, so the evaluation is of rows" in line


def test_rows_come_file_by_file_and_the_plan_counts_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More files than may be open at once, too."""
    monkeypatch.setattr(parquet, "MOST_OPEN", 2)
    for day in range(6):
        rows(tmp_path / f"dt={day}/part.parquet", *[day + 0.5] * (day + 1))
    spec = parse(SPEC, "spec")
    source = ParquetSource(str(tmp_path), spec)
    for _ in range(2):
        values = source.read(np.arange(source.row_count)).fixed["dense"][:, 0]
        assert values.tolist() == [day + 0.5 for day in range(6) for _ in range(day + 1)]
    source.close()
    facts = data_facts(DataConfig(spec="", train=[str(tmp_path / "dt=5"), str(tmp_path / "dt=[0-3]")]), spec)
    assert (facts.source, facts.groups, facts.group_rows) == ("Parquet footers", 5, 6)


def test_a_partition_key_is_no_column(tmp_path: Path) -> None:
    rows(tmp_path / "x=1/part.parquet", 1.0)
    pq.write_table(pa.table({"y": [0]}), tmp_path / "x=1/part.parquet")
    with pytest.raises(InputError, match="no column 'x', needed as dense 'x': it is a key in folder names"):
        ParquetSource(str(tmp_path), parse(SPEC, "spec"))


def test_the_configuration_takes_a_list(tmp_path: Path) -> None:
    words = ["experiment=parquet", "data.spec=s.yaml"]
    data = compose(None, [*words, "data.train=[a,b]", "data.eval=[c]"]).data
    assert (data.train, data.eval) == (["a", "b"], ["c"])
    assert absolute_paths(data).train == [str(Path("a").absolute()), str(Path("b").absolute())]
    for elsewhere in ("gemctl:feature_specs/gem_xl.yaml", "s3://logs/spec.yaml"):
        data.spec = elsewhere
        assert absolute_paths(data).spec == elsewhere
    for wrong in ("[]", "3", "[a,3]", "''"):
        with pytest.raises(InputError, match=r"data\.train"):
            compose(None, [*words, f"data.train={wrong}"])


BOMB_SPEC = """
{name: s, tables: [{name: item, rows: 9}], timestamp: time, dense: [{name: x}], labels: [{name: y}],
 sequences: [{name: h, timestamps: h_time, max_length: 5, ids: [{name: i, table: item, column: h_item}]}]}
"""


def bomb(path: Path, events: int) -> Path:
    """A small file, with `events` in the last of its four rows."""
    offsets = pa.array([0, 1, 2, 3, 3 + events], pa.int32())
    lists = {name: pa.ListArray.from_arrays(offsets, pa.array(np.ones(3 + events, np.int64)))
             for name in ("h_item", "h_time")}  # fmt: skip
    table = pa.table({**lists, "h.time": [1] * 4, "time": [9] * 4, "x": [1.0] * 4, "y": [0, 1, 0, 1]})
    pq.write_table(table, path, compression="zstd")
    return path


def test_a_row_of_more_events_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb.parquet", 1_000_000)
    assert path.stat().st_size < 10_000
    (tmp_path / "spec.yaml").write_text(BOMB_SPEC)
    data = DataConfig(spec=str(tmp_path / "spec.yaml"), train=str(path), eval=str(path))
    values = 2 * 1_000_003 + 3 * 4
    facts = data_facts(data, parse(BOMB_SPEC, "spec"))
    assert facts.largest_read == values and facts.mean_events == {"h": 5.0}
    assert data_facts(replace(data, histories="empty"), parse(BOMB_SPEC, "spec")).largest_read == 2 * 4
    plan = build(Config(data=data), parse(BOMB_SPEC, "spec"))
    (read,) = [item for item in plan.objects if item.name == "row groups read"]
    assert read.largest == values * READ_BYTES and f"{values} values of the largest row group" in read.formula
    check_data(data, memory=values * READ_BYTES)
    with pytest.raises(InputError) as caught:
        check_data(data, memory=values * READ_BYTES - 1)
    assert len(caught.value.problems) == 2
    for problem in caught.value.problems:
        assert problem.startswith(f"{path}: row group 0: 4 rows with 2,000,018 values in the needed columns")
