"""A detached run, for real: it outlives its terminal, is followed and stopped from another shell, and is resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemctl import process
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log
from gemctl.run.submission import newest
from tests.launch.test_launch import SMALL
from tests.support.waiting import wait_for

GEMCTL = [sys.executable, "-P", "-m", "gemctl"]
TWO = [*SMALL, "launcher.ranks_per_node=2", "topology.dp_replicate=1"]


def _json(folder: Path, *words: str) -> Any:
    done = subprocess.run([*GEMCTL, *words, "--json"], cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _in_a_terminal_that_closes(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    """Runs the command in a shell on a terminal of its own, which is closed once the command is done."""
    pid, terminal = os.forkpty()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(environment)
        os.execvp("sh", ["sh", "-c", '"$@" > told.json; touch done; exec sleep 600', "sh", *words])
    wait_for((folder / "done").exists)
    os.close(terminal)  # the shell and all that has this terminal get SIGHUP
    os.waitpid(pid, 0)


@pytest.mark.slow
def test_a_detached_run_outlives_its_terminal_and_is_followed_and_stopped_from_elsewhere(tmp_path: Path) -> None:
    words = [*GEMCTL, "train", *TWO, "train.steps=100000", "--detach", "--json"]
    _in_a_terminal_that_closes(tmp_path, words, {"GEMCTL_INJECT": "raise:rank=1,step=4,stage=step,attempt=1"})
    told = json.loads((tmp_path / "told.json").read_text())
    run = RunDir.open(tmp_path / "runs" / "synthetic" / told["run"])
    submission = newest(run)
    assert submission is not None and told["attempt"] == 1
    facts = submission.submitted() or {}
    assert process.running(facts["pid"]) and os.getsid(facts["pid"]) == facts["pid"]

    follow = subprocess.Popen(
        [*GEMCTL, "logs", "-f", run.run_id, "--merged", "--json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    wait_for(lambda: any(line["stage"] == "step" for line in read_log(run.attempt(2).rank_log(0))))
    shown = _json(tmp_path, "status", run.run_id)
    assert (shown["state"], shown["submission"]["job"]["state"]) == ("running", "running")
    assert {budget["kind"]: budget["spent"] for budget in shown["budgets"]}["crash"] == 1
    assert [one["run_id"] for one in _json(tmp_path, "list")["runs"]] == [run.run_id]
    assert "planted in rank 1" in _json(tmp_path, "status", run.run_id)["attempts"][0]["cause"]
    assert _json(tmp_path, "stop", run.run_id)["outcome"] == "asked"

    out, _ = follow.communicate(timeout=60)
    lines = [json.loads(line) for line in out.splitlines()]
    assert follow.returncode == 0
    assert "stopped at step" in lines[-1]["conclusion"]
    first_end = next(at for at, line in enumerate(lines) if "another attempt follows" in line.get("conclusion", ""))
    assert {line["attempt"] for line in lines[:first_end]} == {1}
    assert any("InjectedError" in line["text"] and line["source"] == "rank 1" for line in lines[:first_end])
    assert {line["source"] for line in lines[first_end + 1 : -1]} >= {"rank 0", "rank 1", "training", "supervisor"}
    wait_for(lambda: not process.running(facts["pid"]))
    assert [pid for pid in _pids(run) if process.running(pid)] == []

    step = (run.attempt(2).end() or {})["step"]
    told = _json(tmp_path, "resume", run.run_id, f"train.steps={step + 2}", "--detach")
    assert told["attempt"] == 3
    wait_for(run.attempt(3).end_file.exists)
    assert (run.attempt(3).end() or {})["outcome"] == "finished"
    again = subprocess.run([*GEMCTL, "stop", run.run_id], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (again.returncode, "is not running: attempt 3 finished" in again.stderr) == (2, True)


def _pids(run: RunDir) -> list[int]:
    logs = [attempt.agent_log(0) for attempt in run.attempts()]
    return [line["pid"] for log in logs for line in read_log(log) if line["event"] in {"agent", "rank"}]
