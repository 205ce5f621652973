"""`gemctl resume` and `eval` of runs that were moved or copied, and of runs whose spec or data have changed since."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gemctl.cli import main
from gemctl.commands import eval as eval_command
from gemctl.config.compose import compose, from_yaml
from gemctl.data.fingerprint import changed, fingerprint
from gemctl.errors import InputError
from gemctl.launch.inputs import record
from gemctl.ranks.worker import Worker
from gemctl.run.directory import RunDir
from gemctl.run.inputs import FILE, SPEC, FileMark, Inputs, Source, data_differences, read, texts, write
from gemctl.run.manifest import checkpoints
from gemctl.specs import feature_spec
from gemctl.train.ledger import Ledger
from tests.support.saved_run import saved

TEXT = """name: clicks
tables: [{name: user, rows: 51}, {name: item, rows: 201}]
categorical: [{name: user, table: user}, {name: item, table: item}]
dense: [{name: price, log: true}]
sequences: [{name: seen, timestamps: seen_time, ids: [{name: item, table: item, column: seen_item}]}]
timestamp: time
labels: [{name: clicked}]
"""
ROWS = 60  # of each file


def write_rows(path: Path, seed: int, rows: int = ROWS) -> None:
    values = [(seed * 7919 + 31 * row) % 50 for row in range(rows)]
    columns = {
        "user": values,
        "item": values,
        "price": [value + 0.5 for value in values],
        "time": list(range(rows)),
        "seen_item": [[value, 1] for value in values],
        "seen_time": [[row - 2, row - 1] for row in range(rows)],
        "clicked": [0, 1] * (rows // 2),
    }
    pq.write_table(pa.table(columns), path, row_group_size=20)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with spec.yaml, train/b.parquet and train/d.parquet, eval.parquet, and a run that was saved at step 2 of
    batches of 40 rows, in the order of the files."""
    folder = tmp_path_factory.mktemp("made") / "job"
    (folder / "train").mkdir(parents=True)
    (folder / "spec.yaml").write_text(TEXT)
    for seed, name in enumerate(("train/b", "train/d", "eval")):
        write_rows(folder / f"{name}.parquet", seed)
    places = [f"data.{key}={folder / name}" for key, name in PLACES.items()]
    settings = [
        "data.order=time",
        "train.global_batch=40",
        "train.steps=9",
        "launcher.ranks_per_node=1",
        "topology.dp_replicate=1",
    ]
    words = ["experiment=parquet", "model=hstu_nano", "model.dim=8", *places, *settings]
    saved(compose(None, [*words, f"run.root={folder}/runs"]), [2], reached=2)
    return folder


PLACES = {"spec": "spec.yaml", "train": "train", "eval": "eval.parquet"}


@pytest.fixture
def job(made: Path, tmp_path: Path) -> Path:
    """The folder, as if it had been made for each test."""
    job = tmp_path / "job"
    shutil.copytree(made, job)
    attempt = run_of(job).attempt(1)
    for file in (attempt.config, attempt.path / FILE):
        file.write_text(file.read_text().replace(str(made), str(job)))
    return job


def run_of(folder: Path) -> RunDir:
    (path,) = (folder / "runs").glob("*/*")
    return RunDir.open(path)


def ahead(capsys: pytest.CaptureFixture[str], run: RunDir, *arguments: str, code: int = 0) -> Any:
    """What a dry run says: its JSON, or the lines of its error."""
    capsys.readouterr()
    assert main(["resume", str(run.path), "train.steps=12", *arguments, "--dry-run", "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out) if code == 0 else [line.removeprefix("error: ") for line in said.err.splitlines()]


def data_changes(found: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: one["rule"]["reason"] for one in found["changes"] if one["key"].startswith("data.")}


def test_a_run_that_was_moved_with_its_data_is_resumed(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.rename(job.with_name("elsewhere"))
    found = ahead(capsys, run_of(job.with_name("elsewhere")))
    assert found["checkpoint"] == "step_2.a1" and found["notes"] == []
    assert data_changes(found) == dict.fromkeys(
        ["data.spec", "data.train", "data.eval"], "the same content in another place"
    )
    after = {one["key"]: one["after"] for one in found["changes"]}
    assert after["data.train"] == str(job.with_name("elsewhere") / "train")
    assert after["data.spec"] == str(job.with_name("elsewhere") / "spec.yaml")


def test_a_run_that_was_moved_away_from_its_data_finds_them(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = job.parent / "away" / "x" / "one"
    away.parent.mkdir(parents=True)
    run_of(job).path.rename(away)
    assert data_changes(ahead(capsys, RunDir.open(away))) == {}


def test_a_copied_run_reads_the_copied_data(job: Path) -> None:
    copy = job.with_name("copy")
    shutil.copytree(job, copy)
    inputs = read(run_of(copy).attempt(1).path, run_of(copy).path)
    assert inputs is not None and inputs.train[0].path == str(copy / "train") and inputs.spec_path == str(copy / SPEC)
    write_rows(copy / "train" / "d.parquet", 9, rows=58)  # no copy any more: the data at the old place are the run's
    inputs = read(run_of(copy).attempt(1).path, run_of(copy).path)
    assert inputs is not None and inputs.train[0].path == str(job / "train")


def test_data_that_were_moved_and_changed_count_as_changed(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.rename(job.with_name("elsewhere"))
    rewritten("train/d.parquet", 40)(job.with_name("elsewhere"))
    lines = ahead(capsys, run_of(job.with_name("elsewhere")), code=2)
    assert lines[0].startswith(f"data.train: '{job}/train' → '{job.with_name('elsewhere')}/train': different rows")
    assert lines[1].startswith("data.train: d.parquet: 60 → 40 rows, ")


def test_data_that_are_gone_are_asked_for_by_key(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(job)
    for name in PLACES.values():
        (job / name).rename(job.with_name(name))
    assert ahead(capsys, run, code=2) == [
        f"data.train: {job}/train no longer exists; say where it is now: data.train=PATH",
        f"data.eval: {job}/eval.parquet no longer exists; say where it is now: data.eval=PATH",
    ]
    places = [f"data.{key}={job.with_name(name)}" for key, name in (("train", "train"), ("eval", "eval.parquet"))]
    found = ahead(capsys, run, *places)
    assert set(data_changes(found).values()) == {"the same content in another place"}
    assert {one["key"]: one["after"] for one in found["changes"]}["data.spec"] == str(run.attempt(1).path / SPEC)


def edited(before: str, after: str) -> Callable[[Path], None]:
    def edit(job: Path) -> None:
        text = (job / SPEC).read_text()
        assert before in text
        (job / SPEC).write_text(text.replace(before, after))

    return edit


def rewritten(name: str, rows: int = ROWS) -> Callable[[Path], None]:
    return lambda job: write_rows(job / name, 5, rows)


CHANGED: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("other rows", rewritten("train/b.parquet"), "data.train", "b.parquet: 7,427 → "),
    ("fewer rows", rewritten("train/b.parquet", 40), "data.train", "b.parquet: 60 → 40 rows, "),
    ("a file before the others", rewritten("train/a.parquet"), "data.train", "a.parquet was added (60 rows)"),
    ("a file between", rewritten("train/c.parquet"), "data.train", "c.parquet was added (60 rows)"),
    ("a file is gone", lambda job: (job / "train/b.parquet").unlink(), "data.train", "b.parquet is gone"),
    ("a transformation", edited("log: true", "log: false"), "data.spec", "dense.price.log: True → False"),
    (
        "another column",
        edited("{name: item, table: item}]", "{name: item, table: item, column: user}]"),
        "data.spec",
        "categorical.item.column: None → 'user'",
    ),
    (
        "another order",
        edited(
            "[{name: user, rows: 51}, {name: item, rows: 201}]", "[{name: item, rows: 201}, {name: user, rows: 51}]"
        ),
        "data.spec",
        "the same features in another order",
    ),
]


@pytest.mark.parametrize(("edit", "key", "detail"), [case[1:] for case in CHANGED], ids=[case[0] for case in CHANGED])
def test_changed_inputs_are_refused_unless_allowed_by_name(
    job: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Path], None], key: str, detail: str
) -> None:
    edit(job)
    first, *details = ahead(capsys, run_of(job), code=2)
    assert first.startswith(f"{key}: '{job / PLACES[key.removeprefix('data.')]}' has changed: ")
    assert first.endswith(f"; to change it anyway: --allow {key}") and details[0].startswith(f"{key}: {detail}")
    found = ahead(capsys, run_of(job), "--allow", key)
    (change,) = (one for one in found["changes"] if one["key"] == key)
    assert change["details"][0].startswith(detail)


def test_files_after_the_ones_read_so_far_are_taken_in_file_order(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten("train/e.parquet")(job)
    found = ahead(capsys, run_of(job))
    assert data_changes(found) == {"data.train": "the rows up to here are the same; more follow them"}
    assert found["changes"][-1]["details"] == ["e.parquet was added (60 rows)"]
    (first, *_) = ahead(capsys, run_of(job), "data.order=shuffled", "--allow", "data.order", code=2)
    assert first.endswith("--allow data.train")


def test_files_after_a_whole_pass_over_the_data_shift_its_rows(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_of(job).attempt(1).config
    rewritten("train/e.parquet")(job)
    for batch, code in ((60, 0), (61, 2)):  # two steps of them have read 120 and 122 of 120 rows
        config.write_text(config.read_text().replace("global_batch: 40", f"global_batch: {batch}"))
        ahead(capsys, run_of(job), code=code)
        config.write_text(config.read_text().replace(f"global_batch: {batch}", "global_batch: 40"))


def test_changed_evaluation_data_are_noted(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewritten("eval.parquet", 40)(job)
    (change,) = (one for one in ahead(capsys, run_of(job))["changes"] if one["key"] == "data.eval")
    assert change["rule"]["reason"] == "evaluation does not change the state"
    assert change["details"][0].startswith(f"{job}/eval.parquet: 60 → 40 rows, ")


def test_the_same_content_in_other_words_or_names_is_no_change(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited("labels:", "# the answer\nlabels:")(job)
    (job / "train/b.parquet").rename(job / "train/a.parquet")
    assert data_changes(ahead(capsys, run_of(job))) == {}
    (job / "train/d.parquet").rename(job / "train/0.parquet")  # which is the first file now
    lines = ahead(capsys, run_of(job), code=2)
    assert lines[0].startswith("data.train: ") and lines[1] == "data.train: b.parquet is gone"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (edited("column: seen_item", "column: seen_item2"), "no column 'seen_item2', needed as sequence 'seen'"),
        (edited("name: price", "name: clicks, column: seen_item"), "column 'seen_item' is list<element: int64>"),
    ],
)
def test_a_column_that_is_not_there_or_of_another_type_is_found_before_a_launch(
    job: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Path], None], said: str
) -> None:
    edit(job)
    lines = ahead(capsys, run_of(job), "--allow", "data.spec", code=2)
    assert lines and all(said in line for line in lines)


def test_a_run_of_an_older_gemctl_is_resumed_with_a_note_that_nothing_was_compared(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(job)
    for name in (FILE, SPEC):
        (run.attempt(1).path / name).unlink()
    rewritten("train/b.parquet")(job)
    (note,) = ahead(capsys, run)["notes"]
    assert note.startswith("whether spec or data have changed is unknown: ")
    (job / SPEC).rename(job / "other.yaml")
    assert ahead(capsys, run, code=2) == [
        f"data.spec: {job / SPEC} no longer exists; say where it is now: data.spec=PATH"
    ]


def test_a_spec_with_other_tables_is_refused_whatever_is_allowed(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited("name: user, rows: 51", "name: user, rows: 52")(job)
    lines = ahead(capsys, run_of(job), "--allow", "data.spec", code=2)
    assert any(line.endswith(".user.weight is [51, 8], the model needs [52, 8]") for line in lines)


def test_evaluation_is_turned_off_and_on(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (change,) = (one for one in ahead(capsys, run_of(job), "data.eval=null")["changes"] if one["key"] == "data.eval")
    assert (change["after"], change["details"]) == (None, [])


def test_a_spec_that_changes_while_the_run_is_planned_is_noticed(job: Path) -> None:
    config = from_yaml((file := run_of(job).attempt(1).config).read_text(), str(file))
    planned = feature_spec.load(config.data.spec)
    assert record(config.data, planned).spec == planned
    edited("log: true", "log: false")(job)
    with pytest.raises(InputError, match=r"data\.spec: .* was changed while the run was being planned"):
        record(config.data, planned)


def test_an_edited_copy_of_the_spec_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = run_of(job).attempt(1).path / SPEC
    copy.write_text(copy.read_text().replace("log: true", "log: false"))
    assert ahead(capsys, run_of(job), code=2) == [f"{copy}: was changed: its hash is not the one in inputs.json"]


@pytest.mark.parametrize(
    ("before", "after"),
    [('"files": [', '"files": 3, "x": ['), ('"from_run": "', '"from_run": 3, "x": "'), ('"train"', '"t"')],
)
def test_a_file_that_gemctl_has_not_written_is_refused(job: Path, before: str, after: str) -> None:
    file = run_of(job).attempt(1).path / FILE
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises(InputError, match="^" + re.escape(f"{file}: ")):
        read(file.parent, run_of(job).path)


def test_a_folder_or_another_spec_at_the_place_near_the_run_does_not_count(job: Path) -> None:
    copy = job.with_name("copy")
    shutil.copytree(job, copy)
    edited("log: true", "log: false")(copy)
    inputs = read(run_of(copy).attempt(1).path, run_of(copy).path)
    assert inputs is not None and inputs.spec_path == str(job / SPEC)
    (copy / SPEC).unlink()
    (copy / SPEC).mkdir()
    inputs = read(run_of(copy).attempt(1).path, run_of(copy).path)
    assert inputs is not None and inputs.spec_path == str(job / SPEC)


def test_a_rank_whose_host_has_other_files_names_host_and_file(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(job)
    known = read(run.attempt(1).path, run.path)
    assert known is not None and known.eval is not None
    other: list[Any] = ["b6", []]  # the first rank of another host
    as_rank(monkeypatch, rank=2, local=0)
    monkeypatch.setattr("socket.gethostname", lambda: "b7")
    monkeypatch.setattr("gemctl.ranks.worker.all_gather_json", lambda own: [other, own, ["b7", None]])
    assert Worker(run, run.attempt(1), Ledger())._spec().name == "clicks"

    rewritten("eval.parquet", 40)(job)
    start = f"host b7: data.eval: {job}/eval.parquet: changed since the run was submitted: 60 → 40 rows, "
    with pytest.raises(InputError, match="^" + re.escape(start)):
        Worker(run, run.attempt(1), Ledger())._spec()
    other[1] = changed("data.eval", known.eval)
    as_rank(monkeypatch, rank=0, local=0)
    Worker(run, run.attempt(1), Ledger())._spec()
    assert capsys.readouterr().err.startswith(start.removeprefix("host b7: "))
    (job / "eval.parquet").unlink()
    other[1] = changed("data.eval", known.eval)
    with pytest.raises(InputError, match=r"eval\.parquet: no such file or folder"):
        Worker(run, run.attempt(1), Ledger())._spec()

    rewritten("train/d.parquet", 40)(job)
    with pytest.raises(InputError) as error:
        Worker(run, run.attempt(1), Ledger())._spec()
    (said,) = error.value.problems
    assert said.startswith(f"host b7: data.train: {job}/train/d.parquet: changed since the run was submitted: ")
    as_rank(monkeypatch, rank=1, local=1)  # which leaves that to the first rank of its host
    other[1] = None
    assert Worker(run, run.attempt(1), Ledger())._spec().name == "clicks"


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, local: int) -> None:
    for key, value in {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(key, str(value))


def test_ranks_read_the_files_that_were_there_and_the_spec_of_then(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(job)
    rewritten("train/a.parquet")(job)
    edited("log: true", "log: false")(job)
    as_rank(monkeypatch, rank=0, local=0)
    monkeypatch.setattr("gemctl.ranks.worker.all_gather_json", lambda own: [own])
    worker = Worker(run, run.attempt(1), Ledger())
    assert worker.config.data.train == [f"{job}/train/b.parquet", f"{job}/train/d.parquet"]
    assert worker.config.data.eval == [f"{job}/eval.parquet"]
    assert worker._spec().dense[0].log is True


def test_eval_names_new_places_and_says_what_has_changed(job: Path) -> None:
    run = run_of(job)
    (checkpoint,) = checkpoints(run)

    def configured(*places: str, data: list[str] | None = None) -> Any:
        return eval_command._configured(run, checkpoint, list(places), data)

    (job / "eval.parquet").rename(job / "elsewhere.parquet")
    with pytest.raises(InputError, match=r"data\.eval: .* no longer exists; say where it is now: data\.eval=PATH"):
        configured()
    config, notes = configured(f"data.eval={job}/elsewhere.parquet")
    assert config.data.eval == f"{job}/elsewhere.parquet" and notes == []
    rewritten("train/b.parquet", 40)(job)
    edited("log: true", "log: false")(job)
    config, notes = configured(data=["other.parquet"])
    assert config.data.spec == str(run.attempt(1).path / SPEC)
    assert [note.split(" rows")[0] for note in notes] == [
        "data.train has changed since the run read it: b.parquet: 60 → 40"
    ]
    with pytest.raises(
        InputError, match=r"differs from the spec that the checkpoint was trained with: dense\.price\.log: True"
    ):
        configured(f"data.spec={job / SPEC}", data=["other.parquet"])
    with pytest.raises(InputError, match=r"train\.steps=3: only data\.spec, data\.train, data\.eval can be named here"):
        configured("train.steps=3")


def test_fingerprints_of_globs_lists_and_long_footers(tmp_path: Path) -> None:
    for seed, name in enumerate(("dt=1", "dt=2", "dt=3")):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "part-0.parquet", seed)
    whole = fingerprint(str(tmp_path))
    (matched,) = fingerprint(f"{tmp_path}/dt=[12]/*.parquet")
    assert [file.name for file in matched.files] == ["dt=1/part-0.parquet", "dt=2/part-0.parquet"]
    assert (matched.base, matched.path) == (str(tmp_path), f"{tmp_path}/dt=[12]/*.parquet")
    several = fingerprint([f"{tmp_path}/dt=1", f"{tmp_path}/dt=2/part-0.parquet", f"{tmp_path}/dt=3"])
    assert data_differences(whole, several) == [] and changed("data.train", several) == []
    assert data_differences(whole, [matched]) == ["dt=3/part-0.parquet is gone"]
    write_rows(tmp_path / "dt=2" / "part-0.parquet", 7, rows=20)
    changed_one = fingerprint([f"{tmp_path}/dt=1", f"{tmp_path}/dt=2/part-0.parquet", f"{tmp_path}/dt=3"])
    (line,) = data_differences(several, changed_one)
    assert line.startswith(f"{tmp_path}/dt=2/part-0.parquet: 60 → 20 rows, ")
    assert changed("data.eval", several)[0].startswith(
        f"data.eval: {tmp_path}/dt=2/part-0.parquet: changed since the run was submitted: 60 → 20 rows"
    )
    assert data_differences(several, changed_one[:2])[0] == f"{tmp_path}/dt=3/part-0.parquet is gone"
    swapped = [several[1], several[0], several[2]]
    assert data_differences(several, swapped) == ["the same files in another order"]
    table = pa.table({f"a_column_with_a_long_name_{n}": [n] for n in range(2000)})
    pq.write_table(table, tmp_path / "wide.parquet")
    (wide,) = fingerprint(str(tmp_path / "wide.parquet"))
    assert (tmp_path / "wide.parquet").stat().st_size == wide.files[0].bytes > 64 << 10
    assert (wide.files[0].rows, wide.files[0].groups) == (1, 1)
    (tmp_path / "wide.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(InputError, match=r"wide\.parquet: not a readable Parquet file"):
        fingerprint(str(tmp_path / "wide.parquet"))


def test_many_changed_files_are_counted() -> None:
    def source(count: int, footer: str) -> Source:
        return Source("/log", "", [FileMark(f"{n}.parquet", 1, 1, 1, "", footer) for n in range(count)])

    for count, said in ((8, 8), (9, 9), (10, 9)):
        lines = data_differences([source(count, "a")], [source(count, "b")])
        assert (len(lines), lines[7]) == (said, "7.parquet: other rows, by its footer")
    assert lines[8] == "and 2 more files"


def test_rows_on_an_object_store_have_one_place(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for seed, name in enumerate(("a", "b")):
        write_rows(tmp_path / f"{name}.parquet", seed)
        store.pipe(f"/bucket/log/{name}.parquet", (tmp_path / f"{name}.parquet").read_bytes())
    (source,) = fingerprint("memory://bucket/log/")
    assert source.path == "memory://bucket/log" and [file.name for file in source.files] == ["a.parquet", "b.parquet"]
    (matched,) = fingerprint("memory://bucket/*/[b].parquet")
    assert (matched.base, matched.glob, matched.files[0].name) == ("memory://bucket", "*/[b].parquet", "log/b.parquet")
    assert data_differences([source], fingerprint(str(tmp_path))) == [] == changed("data.train", [source, matched])
    own = "gemctl:feature_specs/gem_xl.yaml"
    inputs = Inputs(own, TEXT, [source], None)
    write(inputs, tmp_path, tmp_path / "run")
    assert read(tmp_path, tmp_path / "run") == inputs == read(tmp_path, tmp_path / "moved")
    assert texts(tmp_path) == {name: (tmp_path / name).read_text() for name in (SPEC, FILE)}
    (tmp_path / FILE).write_text("")  # by a power loss
    assert read(tmp_path, tmp_path / "run") is None
    store.rm("/bucket", recursive=True)
