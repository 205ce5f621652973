"""How often a run is brought back: counted from its records by what ended each attempt, also by another supervisor."""

from pathlib import Path
from typing import Any

import pytest

from gemctl.config.schema import BudgetsConfig
from gemctl.recover.decide import History
from gemctl.run.files import read_log
from tests.support.small_run import STEPS, Case, Disturb, Ended, Job, only_run, supervise_all
from tests.support.world import run_world

AGAIN = "kill:step=3,attempt=1;kill:step=3,attempt=2;kill:step=3,attempt=3;kill:step=3,attempt=4"
LATER = "kill:step=3,attempt=1;kill:step=3,attempt=2;kill:step=5,attempt=3;kill:step=5,attempt=4"
CASES: dict[str, dict[str, object]] = {
    "no checkpoint": {"inject": AGAIN, "budgets": BudgetsConfig()},
    "checkpoints between": {"inject": LATER, "job": Job(every=2), "budgets": BudgetsConfig()},
    "crash spent": {"inject": LATER, "job": Job(every=2), "budgets": BudgetsConfig(crash=2)},
    "damaged": {
        "disturb": Disturb("damage", at=5, stage="step"),
        "job": Job(every=2),
        "budgets": BudgetsConfig(crash=2),
    },
    "supervisor killed": {"disturb": Disturb("kill_self", at=3), "job": Job(500)},
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp("runs") for name in CASES}


@pytest.fixture(scope="module")
def ends(roots: dict[str, Path]) -> dict[str, Ended]:
    """All cases at once."""
    cases = [Case(str(roots[name]), **arguments) for name, arguments in CASES.items()]  # type: ignore[arg-type]
    return dict(zip(CASES, run_world(1, supervise_all, cases, gloo=False)[0], strict=True))


def _bases(end: Ended) -> list[int]:
    return [attempt.base().step for attempt in end.run_dir.attempts()]


def test_failures_that_leave_no_newer_checkpoint_end_the_run(ends: dict[str, Ended]) -> None:
    end = ends["no checkpoint"]
    assert (end.error, end.exit_code, end.left, _bases(end)) == ("RunFailed", 1, [], [0, 0, 0])
    assert "not tried again: 3 failures in a row left no newer checkpoint, and recover.budgets.no_progress=2" in (
        end.message
    )


def test_newer_checkpoint_gives_new_tries(ends: dict[str, Ended]) -> None:
    """Without progress in attempts 2 and 4 only."""
    end = ends["checkpoints between"]
    assert (end.error, end.left, _bases(end)) == (None, [], [0, 2, 2, 4, 4])
    left = [note.rpartition("(")[2] for note in end.notes if "trying again" in note]
    assert left == [
        "crash: 9 of recover.budgets.crash=10 left)",
        "crash: 8 of recover.budgets.crash=10 left; no newer checkpoint: 1 of recover.budgets.no_progress=2 left)",
        "crash: 7 of recover.budgets.crash=10 left)",
        "crash: 6 of recover.budgets.crash=10 left; no newer checkpoint: 1 of recover.budgets.no_progress=2 left)",
    ]


def test_spent_budget_is_named(ends: dict[str, Ended]) -> None:
    end = ends["crash spent"]
    assert (end.error, _bases(end)) == ("RunFailed", [0, 2, 2])
    assert "not tried again: it failed after its first step, for the 3rd time, and recover.budgets.crash=2" in (
        end.message
    )


def test_checkpoint_that_the_ranks_refuse_is_passed_over_by_the_next_attempt(ends: dict[str, Ended]) -> None:
    """A flipped bit leaves the size as it was: only who reads the file can tell."""
    end = ends["damaged"]
    first, damaged, older = _bases(end)
    assert (end.error, end.left, first, older) == (None, [], 0, damaged - 2)
    assert [line.get("kind") for line in read_log(end.run_dir.supervisor_log) if line["event"] == "end"] == [
        "crash",
        "crash",
        None,
    ]
    assert any(f"step_{damaged}.a1/data: damaged" in note and "passed over" in note for note in end.notes)


def test_supervisor_that_is_brought_back_counts_the_lost_attempt(
    ends: dict[str, Ended], roots: dict[str, Path]
) -> None:
    assert ends["supervisor killed"] is None
    again = {"one": BudgetsConfig(preemption=1, crash=0), "none": BudgetsConfig(preemption=0)}
    root = str(roots["supervisor killed"])
    none, one = (
        run_world(1, supervise_all, [Case(root, budgets=again[name])], gloo=False)[0][0] for name in ("none", "one")
    )
    assert none.error == "RunFailed"
    assert "is not restarted: its hosts were preempted or lost, and recover.budgets.preemption=0" in none.message
    assert len(only_run(Path(root)).attempts()) == 2
    assert (one.error, one.left) == (None, [])
    assert one.notes == [
        "attempt 1 died with its supervisor; continuing (preemption: 0 of recover.budgets.preemption=1 left)"
    ]
    assert one.run_dir.attempt(2).end() is not None
    assert read_log(one.run_dir.attempt(2).rank_log(0))[-1]["step"] == STEPS


def _attempt(number: int, step: int = 0) -> dict[str, Any]:
    return {"event": "attempt", "attempt": number, "step": step}


def _end(number: int, kind: str | None, saved: int = 0, **facts: str) -> dict[str, Any]:
    return {"event": "end", "attempt": number, "kind": kind, "saved": saved, **facts}


def test_preemptions_and_time_limits_leave_the_other_budgets_alone() -> None:
    kinds = ["preemption"] * 5 + ["time_limit"] * 3 + ["crash"]
    lines = [line for number, kind in enumerate(kinds, 1) for line in (_attempt(number), _end(number, kind))]
    history = History(lines, first=1)
    assert (history.spent["preemption"], history.spent["time_limit"], history.spent["crash"]) == (5, 3, 1)
    assert history.stuck == 1
    assert history.refusal("crash", BudgetsConfig(preemption=0, time_limit=0)) is None
    assert history.refusal("preemption", BudgetsConfig(preemption=4)) is not None


def test_earlier_submissions_count_nothing() -> None:
    lines = [_attempt(1), _end(1, "crash"), _attempt(2), _end(2, "crash", distrusts="step_4.a1"), _attempt(3)]
    history = History(lines, first=3)
    assert (history.spent["crash"], history.stuck, history.lost, history.distrusted) == (0, 0, [3], {})


def test_progress_is_a_step_that_was_never_saved_before() -> None:
    """A fall back to an older checkpoint that only comes as far as the one before makes no progress."""
    history = History([_attempt(1), _end(1, "crash", 8), _attempt(2, 8), _end(2, "crash", 8)], first=1)
    assert history.stuck == 1
    for line in (_attempt(3, 4), _end(3, "crash", 8)):
        history.add(line)
    assert history.stuck == 2
    for line in (_attempt(4, 8), _end(4, "preemption", 12), _attempt(5, 12), _end(5, "crash", 12)):
        history.add(line)
    assert history.stuck == 1


def test_awake_old_supervisor_does_not_count_twice() -> None:
    lines = [_attempt(1), _attempt(2), _end(1, "preemption"), _end(1, "preemption")]
    history = History(lines, first=1)
    assert (history.spent["preemption"], history.lost) == (2, [2])
