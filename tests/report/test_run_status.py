"""What `status`, `stop` and `resume` say of runs that beat, have ended or died, from files alone."""

import argparse
import os
import time
from pathlib import Path

import pytest

from gemctl.commands import list as listing
from gemctl.commands import resume, status, stop
from gemctl.errors import InputError
from gemctl.launch.liveness import refuse_beating
from gemctl.report.status import RunStatus
from gemctl.run import requests
from gemctl.run.attempt import Attempt, Base, Heartbeat, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import create_json
from gemctl.run.rank_records import StageRecorder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(str(tmp_path / "runs"), "gem", ["gemctl", "train"])


def _start(run: RunDir, number: int) -> Attempt:
    attempt = claim(run.path, number, nodes=1, ranks_per_node=1, heartbeat=0.02)
    attempt.write_base(Base(None, 0))
    return attempt


def _args(run: RunDir, **more: object) -> argparse.Namespace:
    return argparse.Namespace(**{"run": run.run_id, "root": str(run.path.parent.parent), "now": False, **more})


def _status(run: RunDir) -> RunStatus:
    return status.run(_args(run))


def test_status_follows_a_run_to_its_end(run: RunDir) -> None:
    assert _status(run).state == "never started"
    attempt = _start(run, 1)
    assert _status(run).state == "starting"
    StageRecorder(attempt, 0).enter("step", 7)
    shown = _status(run).attempts[0]
    assert (shown.state, shown.stage, shown.step, shown.base_step) == ("running", "step", 7, 0)
    long_ago = time.time() - 60
    os.utime(attempt.heartbeat, (long_ago, long_ago))
    assert _status(run).state == "silent"
    attempt.write_end("failed", step=7, cause={"text": "rank 1 failed first"})
    shown = _status(run).attempts[0]
    assert (shown.state, shown.cause, shown.beat_age) == ("failed", "rank 1 failed first", None)


def test_list_has_every_run(run: RunDir) -> None:
    value = listing.run(argparse.Namespace(root=str(run.path.parent.parent), last=None, json=False))
    assert [found.run_id for found in value.runs] == [run.run_id]


@pytest.mark.parametrize(("closed", "said"), [(1, "1 folder"), (2, "2 folders")])
def test_list_counts_the_folders_that_are_closed(
    closed: int, said: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "closed_folders", lambda _: [Path("x")] * closed)
    root = str(run.path.parent.parent)
    value = listing.run(argparse.Namespace(root=root, last=None, json=False))
    assert value.unreadable == [f"{root}: {said} that you may not read: Permission denied"]


def test_list_shows_the_newest_and_counts_the_others(tmp_path: Path) -> None:
    for number in range(60):
        folder = tmp_path / "demo" / f"20261130-0000{number:02}-abcd"
        folder.mkdir(parents=True)
        create_json(folder / "run.json", {"name": "demo", "created": float(number)})

    def shown(last: int | None, json: bool = False) -> tuple[list[float], int]:
        value = listing.run(argparse.Namespace(root=str(tmp_path), last=last, json=json))
        return [found.created for found in value.runs], value.older

    assert shown(None) == (list(range(10, 60)), 10)
    assert shown(None, json=True) == shown(0) == shown(60) == shown(99) == (list(range(60)), 0)
    assert shown(2) == ([58.0, 59.0], 58)
    with pytest.raises(InputError, match="--last -1"):
        shown(-1)


def test_stop_is_filed_for_a_run_that_beats_and_refused_else(run: RunDir) -> None:
    with pytest.raises(InputError, match="is not running"):
        stop.run(_args(run))
    attempt = _start(run, 1)
    with Heartbeat(attempt, 0.02):
        filed = stop.run(_args(run))
    assert (filed.attempt, filed.request) == (1, 1)
    assert requests.pending(run, attempt) == [requests.Request(1, "stop")]
    attempt.write_end("stopped", step=3)
    with pytest.raises(InputError, match="is not running"):
        stop.run(_args(run))


def test_resume_of_a_run_that_beats_is_refused_with_host_and_age(run: RunDir) -> None:
    attempt = _start(run, 1)
    with (
        Heartbeat(attempt, 0.02),
        pytest.raises(InputError, match=rf"runs on host {attempt.claim().host}, its last heartbeat is 0\.\d s old"),
    ):
        refuse_beating(run, attempt)
    attempt.write_end("stopped", step=3)
    refuse_beating(run, attempt)


def test_resume_of_a_run_that_was_never_launched_is_refused(run: RunDir) -> None:
    with pytest.raises(InputError, match="never launched"):
        resume.run(_args(run, changes=[]))


def test_folder_whose_maker_died_before_its_claim_is_a_dead_attempt(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start(run, 1).write_end("failed", step=1)
    (run.path / "attempts" / "9").mkdir()
    monkeypatch.setattr("gemctl.run.attempt.PATIENCE", 0.1)
    assert _status(run).state == "silent"
    with pytest.raises(InputError, match="is not running"):
        stop.run(_args(run))
    last = run.last_attempt()
    assert last is not None
    refuse_beating(run, last)
    assert _start(run, last.number + 1).number == 10


def test_run_that_cannot_be_read_is_named_and_hides_no_other(run: RunDir) -> None:
    for name, text in (("empty", ""), ("no-name", "{}")):
        folder = run.path.parent / name
        folder.mkdir()
        (folder / "run.json").write_text(text)
    other = RunDir.create(str(run.path.parent.parent), "gem", ["gemctl", "train"])
    _start(other, 1).end_file.mkdir()
    value = listing.run(argparse.Namespace(root=str(run.path.parent.parent), last=None, json=False))
    assert [found.run_id for found in value.runs] == [run.run_id]
    (strange,) = [problem for problem in value.unreadable if other.run_id in problem]
    assert strange.endswith("attempts/1/end.json: Is a directory")
    empty, unnamed = [problem for problem in value.unreadable if other.run_id not in problem]
    assert "empty/run.json: empty" in empty
    assert "no-name/run.json: name, created: missing" in unnamed
