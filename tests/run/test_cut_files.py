"""Runs whose newest files a power loss has emptied or cut, as it did where they were not fsynced: what they left counts
as nothing, and the run goes on from its checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemctl.cli import main
from gemctl.run.attempt import Base, claim
from gemctl.run.conclusion import ending
from gemctl.run.directory import RunDir
from gemctl.run.manifest import number_after
from gemctl.run.submission import newest, submit
from tests.support.saved_run import saved_run

LOSSES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "zeros": lambda data: b"\0" * len(data),
    "cut": lambda data: data[: len(data) // 2],
}
ATTEMPT = ["claim.json", "base.json", "plan.json", "request.json", "config.yaml"]
SUBMISSION = ["config.yaml", "plan.json", "request.json", "submitted.json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Attempt 1 died at step 6 with checkpoints at 2 and 4; attempt 2 has just begun, from step 4."""
    run = saved_run(tmp_path_factory.mktemp("made"), [2, 4], reached=6)
    config, plan = (file.read_text() for file in (run.attempt(1).config, run.attempt(1).plan))
    for first in (1, 2):
        submission = submit(run, config, plan, {"kind": "local", "app": {}, "base": None, "first_attempt": first})
        submission.write_submitted(pid=1, started=0.0)
    attempt = claim(run.path, 2, nodes=1, ranks_per_node=4, heartbeat=0.02)
    attempt.config.write_text(config)
    attempt.plan.write_text(plan)
    attempt.write_base(Base("step_4.a1", 4))
    attempt.request.write_text('{"format": 1}')
    return run


@pytest.fixture
def run(made: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(made.path, tmp_path / "saved" / made.run_id)))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def lose(path: Path, loss: str) -> None:
    path.write_bytes(LOSSES[loss](path.read_bytes()))


@pytest.mark.parametrize("loss", LOSSES)
def test_an_attempt_and_a_submission_of_which_nothing_is_left_are_passed_over_and_said(
    run: RunDir, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ATTEMPT:
        if name != "config.yaml" or loss != "cut":  # half of a configuration is one that is not whole to nobody
            lose(run.attempt(2).path / name, loss)
    for name in SUBMISSION:
        if name != "config.yaml" or loss != "cut":
            lose(run.submissions / "2" / name, loss)
    assert main(["checkpoint", "verify", str(run.path)]) == 0
    capsys.readouterr()
    (listed,) = said(capsys, "list", "--root", str(run.path.parent.parent))["runs"]
    assert (listed["checkpoint"], listed["state"]) == ("step_4.a1", "silent")
    status = said(capsys, "status", str(run.path))
    assert [one["attempt"] for one in status["attempts"]] == [1, 2]
    assert status["submission"]["number"] == 1
    assert [line.split(":")[0] for line in status["cut"]] == ["submission 2", "attempt 2"]
    assert "claim.json" in status["cut"][1]
    ahead = said(capsys, "resume", str(run.path), "--dry-run")
    assert (ahead["attempt"], ahead["checkpoint"]) == (3, "step_4.a1")
    assert ahead["cut"] == status["cut"]
    assert said(capsys, "report", str(run.path))["attempts"]


@pytest.mark.parametrize("name", ATTEMPT)
def test_each_file_of_an_attempt_may_be_empty(run: RunDir, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lose(run.attempt(2).path / name, "empty")
    assert f"attempt 2: {name}: empty or truncated" in said(capsys, "status", str(run.path))["cut"][0]
    assert said(capsys, "resume", str(run.path), "--dry-run")["attempt"] == 3
    assert main(["logs", str(run.path)]) == 0


def test_a_submission_whose_configuration_is_empty_is_none(run: RunDir) -> None:
    lose(run.submissions / "2" / "config.yaml", "empty")
    found = newest(run)
    assert found is not None and found.number == 1
    third = submit(run, "config", "plan", {"kind": "local", "app": {}})
    assert third.number == 3


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_whose_identity_is_lost_is_known_by_its_folder(
    run: RunDir, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(run.path / "run.json", loss)
    (listed,) = said(capsys, "list", "--root", str(run.path.parent.parent))["runs"]
    assert (listed["run_id"], listed["name"]) == (run.run_id, "saved")
    assert said(capsys, "resume", str(run.path), "--dry-run")["step"] == 4
    assert said(capsys, "status", run.run_id, "--root", str(run.path.parent.parent))["cut"][0].startswith("run.json")


def test_an_end_that_was_cut_is_none(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.attempt(2).path)
    lose(run.attempt(1).end_file, "cut")
    assert ending(run) is None
    assert said(capsys, "status", str(run.path))["cut"][0].startswith("attempt 1: end.json: empty or truncated")
    assert said(capsys, "resume", str(run.path), "--dry-run")["attempt"] == 2


def test_a_number_whose_attempt_is_lost_and_whose_checkpoint_is_not_is_not_used_again(run: RunDir) -> None:
    shutil.copytree(run.checkpoints / "step_4.a1", run.checkpoints / "step_6.a3")
    assert number_after(run, run.last_attempt()) == 4
    # Where another process has just made attempt 3, its checkpoint does not lead past it: claiming 3 must fail.
    run.attempt(3).path.mkdir()
    assert number_after(run, run.attempt(2)) == 3
