"""The real thing, from the command line: Ctrl-C saves and says how to go on, whatever lies in the current folder, and
nothing listens but the ranks' gloo; a rank killed in a save is named.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemctl import process
from gemctl.run.attempt import Attempt
from gemctl.run.base import newest_verified
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log
from tests.support import hostile
from tests.support.listeners import listening
from tests.support.waiting import wait_for

SMALL = [
    "data.synthetic.users=50",
    "data.synthetic.items=200",
    "data.synthetic.rows=300",
    "data.synthetic.eval_rows=50",
    "train.global_batch=16",
    "model.dim=8",
]


def _start(folder: Path, *arguments: str, inject: str = "") -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "gemctl", *arguments]
    environment = {**os.environ, "GEMCTL_INJECT": inject}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def _pids(attempt: Attempt) -> list[int]:
    return [line["pid"] for line in read_log(attempt.agent_log(0)) if line["event"] in {"agent", "rank"}]


def test_interrupt_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    hostile.plant(tmp_path)
    train = _start(tmp_path, "train", *SMALL, "train.steps=100000")
    wait_for(lambda: any(line["stage"] == "step" for line in _rank_lines(tmp_path)))
    listeners = listening(train.pid)
    train.send_signal(signal.SIGINT)
    _, told = train.communicate(timeout=60)
    run = RunDir.open(next(tmp_path.glob("runs/synthetic/*")))
    assert train.returncode == 130, told
    assert f"gemctl resume {run.run_id}" in told
    assert [pid for pid in _pids(run.attempt(1)) if process.running(pid)] == []
    choice = newest_verified(run)
    assert choice.checkpoint is not None
    assert (choice.passed_over, choice.checkpoint.step >= 1) == ([], True)
    assert hostile.ran(tmp_path) == []
    ranks = {line["pid"] for line in read_log(run.attempt(1).agent_log(0)) if line["event"] == "rank"}
    assert {one.address for one in listeners} == {"127.0.0.1"}
    assert {one.pid for one in listeners} == ranks  # gloo's


@pytest.mark.slow
def test_rank_killed_in_a_save_is_named(tmp_path: Path) -> None:
    asked = ["train.steps=4", "checkpoint.every=2", "recover.budgets.crash=0"]
    train = _start(tmp_path, "train", *SMALL, *asked, inject="kill:rank=1,step=4,stage=save")
    _, told = train.communicate(timeout=100)
    ended = time.time()
    run = RunDir.open(next(tmp_path.glob("runs/synthetic/*")))
    attempt = run.attempt(1)
    assert train.returncode == 1, told
    for text in (
        "rank 1 failed first, in stage save, step 4",
        "killed by SIGKILL",
        "rank-1.log",
        f"gemctl resume {run.run_id}",
        "not tried again: it failed after its first step, and recover.budgets.crash=0",
    ):
        assert text in told
    assert [pid for pid in _pids(attempt) if process.running(pid)] == []
    assert ended - read_log(attempt.rank_log(1))[-1]["time"] < 10


def _rank_lines(folder: Path) -> list[dict[str, object]]:
    return [line for path in folder.glob("runs/synthetic/*/attempts/1/ranks/0.jsonl") for line in read_log(path)]
