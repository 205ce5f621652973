"""Whatever a power loss leaves of a run, at any moment and in any order in which a disk may have written, its commands
work, and nothing is lost that somebody was told to be there."""

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from gemctl import durable
from gemctl.checkpoint.retention import prune
from gemctl.config.compose import compose, to_yaml
from gemctl.config.schema import Config
from gemctl.data.synthetic import ensure
from gemctl.durable import create
from gemctl.plan.build import to_json
from gemctl.plan.job import planned
from gemctl.run import requests
from gemctl.run.attempt import Attempt, Base, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, create_json
from gemctl.run.rank_records import StageRecorder
from gemctl.run.submission import submit
from tests.recover import power_real
from tests.recover.disk_record import Event, Record, load, recording
from tests.recover.disk_states import Disk, Loss
from tests.recover.power_loss import at_end, check_all, draw
from tests.support.saved_run import save, words
from tests.support.world import run_world

KEEP = 2


def tell(root: Path, record: Record) -> None:
    """A run of two attempts as its files see it: begun, saved and pruned, asked to stop, resumed, saved again."""
    config = compose(None, words(root.parent))
    run = RunDir.create(str(root), "saved", ["gemctl", "train"])
    attempt = begin(run, 1, config, Base(None, 0))
    for step in (2, 4, 6):
        go_on(run, attempt, config, step)
    requests.file(run, "stop")
    record.promise(f"saved/{run.run_id}/requests/1.json")
    log = JsonLog(run.supervisor_log)
    attempt.write_end("stopped", step=6, saved=6, kind=None)
    log.write({"event": "end", "attempt": 1, "outcome": "stopped", "time": time.time(), "saved": 6}, last=True)
    go_on(run, begin(run, 2, config, Base("step_6.a1", 6)), config, 8)


def begin(run: RunDir, number: int, config: Config, base: Base) -> Attempt:
    """A submission and its attempt, as `gemctl train` and its supervisor make them."""
    text, plan = to_yaml(config), to_json(planned(config))
    submit(run, text, plan, {"kind": "local", "app": {}}).write_process(1)
    attempt = claim(run.path, number, nodes=1, ranks_per_node=4, heartbeat=0.02)
    create(attempt.config, text)
    create(attempt.plan, plan)
    attempt.write_base(base)
    log = JsonLog(run.supervisor_log)
    log.write({"event": "attempt", "attempt": number, "time": time.time(), **asdict(base)})
    log.sync()
    create_json(attempt.request, {"app": {}})
    return attempt


def go_on(run: RunDir, attempt: Attempt, config: Config, step: int) -> None:
    """Two steps and a save."""
    stages = StageRecorder(attempt, 0)
    for done in (step - 2, step - 1):
        stages.enter("step", done)
    save(run, attempt, step, config)
    prune(run, attempt, KEEP)
    line = {"event": "saved", "step": step, "time": time.time(), "stall": 0.1, "seconds": 0.1, "staged": 100}
    JsonLog(attempt.saves).write(line, last=True)


def record(folder: Path) -> list[Event]:
    """The story's events."""
    root = folder / "runs"
    root.mkdir()
    ensure(compose(None, words(folder)).data)
    with recording(root, folder / "record") as made:
        tell(root, made)
    return load(folder / "record")


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder in memory, for many folders."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    folder = tmp_path_factory.mktemp("told")
    return folder, record(folder)


def without(events: Sequence[Event], what: str) -> list[Event]:
    """The same story told by a gemctl that forgets the fsyncs of files or folders whose name begins so."""
    return [event for event in events if event.kind != "fsync" or not event.path.split("/")[-1].startswith(what)]


def test_a_recording_shows_all_that_was_done(told: tuple[Path, list[Event]], tmp_path: Path) -> None:
    folder, events = told
    disk = Disk()
    for event in events:
        disk.do(event)
    disk.write(tmp_path, Loss("most", random.Random(0)))
    assert content(tmp_path) == content(folder / "runs")
    kinds = {event.kind for event in events}
    assert kinds == {"create", "data", "link", "rename", "unlink", "mkdir", "rmdir", "fsync", "promise"}


def test_any_power_loss_leaves_a_run_that_goes_on(told: tuple[Path, list[Event]], disk: Path) -> None:
    events = told[1]
    assert check_all(events, draw(events, 50, seed=1), disk) == []


@pytest.mark.parametrize(
    ("what", "lost"),
    [
        (".run.json.", "run.json is gone"),
        (".claim.json.", "claim.json is gone"),
        (".base.json.", "base.json is gone"),
        (".config.yaml.", "config.yaml is gone"),
        (".manifest.json.", "lost: "),
        ("__0_0.distcp", "damaged"),
        ("requests", "requests/1.json is gone"),
        ("attempts", "is gone"),
        ("checkpoints", "lost: "),
    ],
)
def test_a_missing_fsync_is_found(told: tuple[Path, list[Event]], disk: Path, what: str, lost: str) -> None:
    events = without(told[1], what)
    assert len(events) < len(told[1])
    (fault,) = check_all(events, [at_end(events)], disk)
    assert lost in fault


def test_a_mechanism_that_forgets_to_fsync_folders_is_found(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "sync_folder", lambda folder: None)
    events = record(tmp_path)
    assert check_all(events, [at_end(events)], disk) != []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recording of a real run."""
    folder = tmp_path_factory.mktemp("trained")
    run_world(1, power_real.tell, folder, gloo=False, timeout=150)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_2000_power_losses_of_a_real_run_leave_one_that_goes_on(trained: Path, disk: Path) -> None:
    events = load(trained / "record")
    told = Disk()
    for event in events:
        told.do(event)
    (disk / "all").mkdir()
    told.write(disk / "all", Loss("most", random.Random(0)))
    assert content(disk / "all") == content(trained / "runs")
    crashes = draw(events, 2000, seed=2)
    assert run_world(1, power_real.check, trained, crashes, disk, gloo=False, timeout=500)[0] == []


@pytest.mark.slow
def test_a_real_checkpoint_whose_files_are_not_fsynced_is_found(trained: Path, disk: Path) -> None:
    for what in ("__1_0.distcp", ".metadata"):
        events = without(load(trained / "record"), what)
        (fault,) = check_all(events, [at_end(events)], disk)
        assert "damaged" in fault and what in fault


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_20_power_losses_leave_of_a_real_run_is_resumed(trained: Path, tmp_path: Path) -> None:
    events = load(trained / "record")
    begun = next(number for number, event in enumerate(events) if event.path.endswith("/attempts/1")) + 1
    crashes = [crash for crash in draw(events, 100, seed=3) if crash.events > begun][:20]
    assert run_world(1, power_real.resume, trained, crashes, tmp_path, gloo=False, timeout=300)[0] == []
