"""A run is stopped whole in a save, another supervisor takes it over, the old one wakes up: what it does is void."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gemctl import process
from gemctl.config.schema import BudgetsConfig
from gemctl.recover.records import Records
from gemctl.run.attempt import watch_beat
from gemctl.run.base import newest_verified
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log
from gemctl.run.manifest import checkpoints
from tests.support.small_run import Case, Ended, Job, _send, only_run, pids, supervise
from tests.support.waiting import wait_for
from tests.support.world import run_world

STEPS, SAVED, SAVING = 16, 4, 8


def _reach_save(root: Path) -> RunDir:
    """Waits until all ranks are in the save of step SAVING."""

    def saving() -> bool:
        if not list(root.glob("small/*/attempts/1/base.json")):
            return False
        records = Records(only_run(root).attempt(1))
        records.update()
        return all((record.stage, record.step) == ("save", SAVING) for record in records.ranks)

    wait_for(saving, 60, "the run's second save")
    return only_run(root)


def _stop_take_over_wake(root: str) -> tuple[Ended, Ended, list[int]]:
    """How the new and the old supervisor ended, and which processes are left."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    old = context.Process(target=_send, args=(Case(root, job=Job(500, every=4, save_seconds=1.0)), theirs))
    old.start()
    run = _reach_save(Path(root))
    named = pids(run)
    for pid in [old.pid or 0, *named]:
        os.kill(pid, signal.SIGSTOP)
    assert watch_beat(run.attempt(1)) is None
    new = supervise(Case(root, job=Job(STEPS, every=4), budgets=BudgetsConfig()))
    for pid in [*named, old.pid or 0]:
        os.kill(pid, signal.SIGCONT)
    told: Any = ours.recv()
    old.join()
    return new, told, process.wait_until_gone(named, 5)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_a_run_does_that_was_stopped_and_taken_over_is_void(tmp_path: Path) -> None:
    new, old, left = run_world(1, _stop_take_over_wake, str(tmp_path), gloo=False, timeout=120)[0]
    assert (new.error, left) == (None, [])
    run = new.run_dir
    assert run.attempt(2).base().step == SAVED
    assert (old.error, old.exit_code) == ("RunFailed", 1)
    assert "attempt 2 owns the run now; this one has ended" in old.message
    assert "not tried again: another attempt owns the run" in old.message
    valid = [(one.step, one.attempt) for one in checkpoints(run) if one.flaw is None]
    assert valid == [(STEPS, 2), (12, 2), (SAVING, 2), (SAVED, 1)]
    newest = newest_verified(run).checkpoint
    assert newest is not None
    assert newest.attempt == 2
    for one in checkpoints(run):
        if one.attempt == 1 and one.step > SAVED:
            assert one.flaw in {"void: attempt 2 started from step 4", "unfinished: it has no manifest.json"}
    assert read_log(run.attempt(2).rank_log(0))[-1]["result"] == "finished"
