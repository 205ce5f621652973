"""Who may read and write a run: the mode of every file and folder, and a colleague of the group who goes on with it."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemctl.launchers import slurm, slurm_client
from gemctl.run.access import Access, written_as
from gemctl.run.attempt import Heartbeat, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog
from gemctl.run.rank_records import StageRecorder
from gemctl.run.submission import submit
from tests.launch.test_launch import SMALL
from tests.support.other_user import User, run_as
from tests.support.waiting import wait_for

TINY = [*SMALL, "launcher.ranks_per_node=1", "topology.dp_replicate=1", "train.steps=2", "train.log_every=1"]
MODES: dict[Access, tuple[int, int]] = {"private": (0o700, 0o600), "group": (0o2770, 0o660)}  # of folders, of files
SECRET = "open-sesame-7c1d"


def wrong_modes(run: Path, access: Access) -> list[str]:
    """Every file and folder of the run, itself too, that is not as open as it should be. An attempt's secret is its
    maker's alone."""
    folder_mode, file_mode = MODES[access]
    found = []
    for path in [run, *run.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode != (folder_mode if path.is_dir() else 0o600 if path.name == "secret" else file_mode):
            found.append(f"{mode:o} {path.relative_to(run)}")
    return found


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which everyone may make things, below folders that everyone gets to."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_a_folder_that_another_user_has_put_where_a_run_would_be_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter(["taken", "free"])
    monkeypatch.setattr("gemctl.run.directory.new_run_id", lambda: next(drawn))
    (tmp_path / "gem" / "taken").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert RunDir.create(str(tmp_path), "gem", []).run_id == "free"
    assert list((tmp_path / "gem" / "taken").iterdir()) == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("access", ["private", "group"])
def test_what_is_written_to_a_run_is_as_open_as_its_folder_whatever_the_umask(
    tmp_path: Path, umask: int, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_client, "submit", lambda script: "17")
    monkeypatch.setattr(slurm, "script", lambda *_: "#!/bin/bash\n")
    monkeypatch.setattr(slurm, "from_json", lambda value: None)
    before = os.umask(umask)
    try:
        run = RunDir.create(str(tmp_path / "runs"), "gem", ["gemctl"], access)
        above = [stat.S_IMODE(folder.stat().st_mode) for folder in (run.path.parent, run.path.parent.parent)]
        assert above == [0o2770 if access == "group" else 0o777 & ~umask & ~0o002] * 2
        with written_as(run.path):
            submission = submit(run, "", "{}", {"app": {}})
            slurm.start(run, submission, None)  # type: ignore[arg-type]
            attempt = claim(run.path, 1, nodes=1, ranks_per_node=1, heartbeat=0.01)
            with Heartbeat(attempt, 0.01, node=1):
                wait_for(attempt.agent_beat(1).exists)
            StageRecorder(attempt, 0).enter("build")
            JsonLog(run.supervisor_log).write({"event": "attempt"})
        assert os.umask(umask) == umask
        (tmp_path / "own").touch()
    finally:
        os.umask(before)
    assert len(list(run.path.rglob("*"))) > 15
    assert wrong_modes(run.path, access) == []
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o666 & ~umask


def test_a_run_that_was_opened_by_hand_stays_as_open_but_never_writable_by_everyone(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path), "gem", ["gemctl"])
    for given, taken in {0o755: 0o644, 0o777: 0o664, 0o750: 0o640, 0o2770: 0o660}.items():
        run.path.chmod(given)
        with written_as(run.path):
            (tmp_path / f"{given:o}").touch()
        assert stat.S_IMODE((tmp_path / f"{given:o}").stat().st_mode) == taken


def test_folders_made_for_a_run_of_the_group_let_it_in(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        run = RunDir.create(str(tmp_path / "all" / "runs"), "gem", ["gemctl"], "group")
        other = RunDir.create(str(tmp_path / "own"), "gem", ["gemctl"])
    finally:
        os.umask(before)
    made = [run.path.parent, run.path.parent.parent, run.path.parent.parent.parent]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o2770] * 3
    assert stat.S_IMODE(other.path.parent.stat().st_mode) == 0o700


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("access", ["private", "group"])
def test_every_file_of_a_real_run_has_its_mode_and_no_variable_of_the_environment_is_in_one(
    tmp_path: Path, umask: int, access: Access
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gemctl", "train", *TINY, f"run.access={access}"],
        cwd=tmp_path, capture_output=True, text=True, check=False, umask=umask,
        env={**os.environ, "SOME_TOKEN": SECRET},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.glob("runs/synthetic/*")
    assert wrong_modes(run, access) == []
    names = {path.name.split(".")[0] for path in run.rglob("*") if path.is_file()}
    assert names >= {
        "manifest",
        "__0_0",
        "",
        "events",
        "config",
        "heartbeat",
        "rank-0",
        "stdout",
        "supervisor",
        "claim",
    }
    telling = [str(path) for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert telling == [] and SECRET not in done.stdout + done.stderr
    data = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data").rglob("*.parquet")]
    assert data == [0o666 & ~umask] * 2  # it is not the run's


@pytest.mark.slow
def test_a_colleague_of_the_group_goes_on_with_a_run_and_others_see_nothing_of_it(shared: Path) -> None:
    ann, bob, eve = User(2001, 3000), User(2002, 4000, (3000,)), User(2003, 5000)
    train = run_as(ann, ["gemctl", "train", *TINY, "run.access=group"], umask=0o077, cwd=shared)
    assert train.returncode == 0, train.stderr
    (run,) = shared.glob("runs/synthetic/*")
    for path in [shared / "data", *(shared / "data").rglob("*")]:
        path.chmod(0o755)  # the data's own modes are not the run's

    words = ["gemctl", "resume", str(run), "train.steps=4", "checkpoint.keep=1", "--json"]
    resumed = run_as(bob, words, umask=0o022, cwd=shared)
    assert resumed.returncode == 0, resumed.stderr
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_4.a2"]  # ann's older one went
    again = run_as(ann, [*words[:3], "train.steps=6", "--json"], umask=0o000, cwd=shared)
    assert again.returncode == 0, again.stderr
    assert wrong_modes(run, "group") == []
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in run.rglob("*")}
    assert owners == {(2001, 3000), (2002, 3000)}

    refused = run_as(eve, ["gemctl", "status", str(run)], umask=0o022, cwd=shared)
    assert refused.returncode == 2 and "Permission denied" in refused.stderr, refused.stderr


@pytest.mark.slow
def test_a_private_run_is_closed_to_the_group_in_one_line(shared: Path) -> None:
    ann, bob = User(2001, 3000), User(2002, 3000)
    train = run_as(ann, ["gemctl", "train", *TINY], umask=0o002, cwd=shared)
    assert train.returncode == 0, train.stderr
    (run,) = shared.glob("runs/synthetic/*")
    assert wrong_modes(run, "private") == []
    for words in (["status", str(run)], ["resume", str(run)], ["list"], ["status", run.name]):
        refused = run_as(bob, ["gemctl", *words], umask=0o022, cwd=shared)
        assert "Traceback" not in refused.stderr
        assert refused.returncode == 2 or words == ["list"]
        assert "Permission denied" in refused.stderr + refused.stdout, refused.stdout + refused.stderr

    for path in [run, *run.rglob("*"), *shared.glob("data/**/*")]:  # opened to be read
        path.chmod(path.stat().st_mode | (0o050 if path.is_dir() else 0o040))
    ahead = run_as(bob, ["gemctl", "resume", str(run), "train.steps=4", "--dry-run"], umask=0o022, cwd=shared)
    assert ahead.returncode == 0, ahead.stderr
    refused = run_as(bob, ["gemctl", "resume", str(run), "train.steps=4"], umask=0o022, cwd=shared)
    assert refused.returncode == 2 and f"error: {run}: you cannot write to it" in refused.stderr, refused.stderr
    assert len(list((run / "submissions").iterdir())) == 1
