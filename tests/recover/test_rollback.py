"""What is not finite: a loss is skipped, a gradient takes the run back past its batch, a bad checkpoint is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemctl.checkpoint.diff import compare
from gemctl.report.report import build
from gemctl.run.attempt import Base
from gemctl.run.base import RolledBack, distrusts, passed_over, record_rollback, rolled_back
from gemctl.run.files import read_log
from gemctl.run.manifest import checkpoints, read
from tests.checkpoint.checkpoint_world import make_run
from tests.support.real_run import poisoned, real_run, train
from tests.support.small_run import Ended
from tests.support.world import run_world

FAST = ["train.log_every=1", "recover.heartbeat=0.1"]


def go(folder: Path, inject: str, *overrides: str, worker: Callable[[str, int], None] = train) -> Ended:
    asked = [*FAST, *overrides]
    ended: Ended = run_world(1, real_run, str(folder), 2, inject, asked, worker, gloo=False, timeout=120)[0]
    assert ended.left == []
    return ended


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_goes_back_and_passes_over_its_batch(tmp_path: Path) -> None:
    ended = go(tmp_path, "grad_nan:rank=1,step=5;nan:step=1", "checkpoint.every=2", "train.spike=1000")
    assert ended.error is None, ended.message
    first, second = ended.run_dir.attempts()
    end = first.end()
    assert end is not None and end["outcome"] == "failed"
    assert "rank 1 failed first, in stage step, step 5: RollBack: rank 1: step 5: a gradient" in end["cause"]["text"]
    assert rolled_back(first) == RolledBack(5, "gradient", [1])
    base = second.base()
    assert base.step in {2, 4} and base.passed_over == [5]  # 2 if the save of step 4 was still under way
    assert any("steps 5" in note and "passed over" in note for note in ended.notes), ended.notes
    newest = read(checkpoints(ended.run_dir)[0].path)
    assert newest.step == 9 and newest.position["applied_updates"] == 7  # 9 but the skipped and the passed over
    assert len(newest.position["losses"]) == 7, "those before the checkpoint are known to the next attempt"
    assert [line["passed_over"] for line in read_log(second.metrics) if line["step"] == 6] == [1]
    report = build(ended.run_dir)
    assert (report.skipped, report.passed_over, report.outcome) == (1, [5], "finished")


@pytest.mark.slow
def test_steps_dropped_in_a_row_are_counted_over_attempts(tmp_path: Path) -> None:
    """A state that gives no finite loss ends the run, however often it is saved on the way."""
    planted = ";".join(f"nan:step={step},attempt={attempt}" for step in range(1, 20) for attempt in range(1, 9))
    ended = go(tmp_path, planted, "checkpoint.every=2", "train.steps=20", "recover.budgets.no_progress=1")
    assert ended.error == "RunFailed", ended.message
    assert "step 10: the loss was not finite, or a spike, in 10 steps in a row" in ended.message
    for attempt in ended.run_dir.attempts():
        assert max(line["step"] for line in read_log(attempt.rank_log(0)) if line["stage"] == "step") == 10


@pytest.mark.slow
def test_where_the_run_goes_back_to_does_not_matter(tmp_path: Path) -> None:
    """Back to step 4 or to the start: bit for bit the same state in the end."""
    near, far = (tmp_path / name for name in ("near", "far"))
    ends = [
        go(near, "grad_nan:step=5", "checkpoint.every=1"),
        go(far, "grad_nan:step=5", "checkpoint.every=0"),
    ]
    newest = [checkpoints(ended.run_dir)[0].path for ended in ends]
    assert ends[1].run_dir.attempts()[1].base() == Base(None, 0, [5])
    assert compare(*newest).differences == []


@pytest.mark.slow
def test_batches_that_are_never_finite_end_the_run_within_its_budget(tmp_path: Path) -> None:
    events = [f"grad_nan:step={3 + attempt},attempt={attempt}" for attempt in range(1, 9)]
    ended = go(tmp_path, ";".join(events), "checkpoint.every=0", "recover.budgets.no_progress=2")
    assert ended.error == "RunFailed" and "no_progress" in ended.message
    bases = [attempt.base().passed_over for attempt in ended.run_dir.attempts()]
    assert bases == [[], [4], [4, 5]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nan", "grad_nan"])
def test_train_nan_stop_is_not_tried_again(kind: str, tmp_path: Path) -> None:
    ended = go(tmp_path, f"{kind}:rank=1,step=3", "train.nan=stop", "recover.budgets.crash=5")
    assert ended.error == "RunFailed" and "train.nan=stop" in ended.message
    assert len(ended.run_dir.attempts()) == 1


@pytest.mark.slow
def test_a_checkpoint_that_is_not_finite_is_left_for_an_older_one(tmp_path: Path) -> None:
    ended = go(tmp_path, "", "checkpoint.every=2", "checkpoint.keep=4", worker=poisoned)
    assert ended.error is None, ended.message
    bases = [attempt.base().step for attempt in ended.run_dir.attempts()]
    assert bases == [0, 4, 2]
    assert any("step_4.a1: attempt 2 started from it and was not finite" in note for note in ended.notes), ended.notes
    assert build(ended.run_dir).outcome == "finished"


def found(step: int, what: Any) -> RolledBack:
    return RolledBack(step, what, [0])


def test_which_checkpoint_is_distrusted_and_what_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path, 4)
    attempts = run.attempts()
    for attempt, base in zip(attempts[1:], [Base("step_3.a1", 3)] * 3, strict=True):
        attempt.base_file.unlink()
        attempt.write_base(base)
    record_rollback(attempts[0], found(7, "gradient"))
    assert distrusts(attempts[:1]) is None and passed_over(attempts, 3) == [7] and passed_over(attempts, 8) == []
    record_rollback(attempts[1], found(9, "state"))
    assert distrusts(attempts[:2]) is None, "a later step's state: the checkpoint may be good"
    record_rollback(attempts[2], found(9, "state"))
    assert distrusts(attempts[:3]) == "step_3.a1", "again"
    record_rollback(attempts[3], found(3, "state"))
    assert distrusts([attempts[0], attempts[3]]) == "step_3.a1", "its first step already"
    assert passed_over(attempts, 0) == [7]
