"""What follows each end of an attempt, as a table: no process, file or clock takes part."""

from dataclasses import replace
from typing import Any

import pytest

from gemctl.config.schema import BudgetsConfig
from gemctl.errors import InputError, TooFewHosts
from gemctl.recover.cause import Cause
from gemctl.recover.decide import Decision, End, History, Kind, decide, failure_kind
from gemctl.recover.watch import stop_end
from gemctl.run.requests import Request

BUDGETS = BudgetsConfig(preemption=1, time_limit=1, crash=3, startup=0, no_progress=1)
SPENT = "recover.budgets"


def _cause(kind: str = "signal", stage: str | None = "step") -> Cause:
    return Cause(kind, 1, stage, 3, "detail", None)


def _history(*kinds: Kind, saved: int = 0) -> History:
    """Attempts that ended by `kinds`, each from step 0; only the last one saved something."""
    lines: list[dict[str, Any]] = []
    for number, kind in enumerate(kinds, 1):
        end = {"event": "end", "attempt": number, "kind": kind, "saved": saved if number == len(kinds) else 0}
        lines += [{"event": "attempt", "attempt": number, "step": 0}, end]
    return History(lines, first=1)


FAILED = End("failed", 3, _cause(), "crash")
RESTART = Decision("restart")


@pytest.mark.parametrize(
    ("end", "before", "saved", "decision"),
    [
        (End("finished", 6), [], 6, Decision("stop")),
        (End("stopped", 3), [], 3, Decision("stop")),
        (End("stopped", 3, kind="preemption", signal="SIGTERM"), [], 3, Decision("stop")),
        (End("killed", 3, signal="SIGINT"), [], 0, Decision("stop")),
        (FAILED, [], 0, RESTART),
        (FAILED, ["crash"], 2, RESTART),
        (replace(FAILED, cause=_cause(stage="load")), [], 0, Decision("restart", check_hashes=True)),
        (replace(FAILED, cause=_cause(stage=None)), [], 0, RESTART),
        (replace(FAILED, kind="preemption", cause=_cause("host", None)), [], 0, RESTART),
        (End("preempted", 3, kind="time_limit", signal="SIGUSR1"), [], 3, Decision("requeue")),
        (
            End("preempted", 3, kind="time_limit", signal="SIGUSR1"), ["time_limit"], 3,
            Decision("give_up", f"the scheduler's time limit was reached, for the 2nd time, and {SPENT}.time_limit=1"),
        ),
        (
            replace(FAILED, kind="startup"), [], 0,
            Decision("give_up", f"it failed before its first step, and {SPENT}.startup=0"),
        ),
        (
            FAILED, ["crash"] * 3, 2,
            Decision("give_up", f"it failed after its first step, for the 4th time, and {SPENT}.crash=3"),
        ),
        (
            FAILED, ["crash"], 0,
            Decision("give_up", f"2 failures in a row left no newer checkpoint, and {SPENT}.no_progress=1"),
        ),
        (replace(FAILED, cause=_cause("policy")), [], 9, Decision("give_up", "train.nan=stop")),
        (replace(FAILED, cause=_cause("rows")), [], 9, Decision("give_up", "another attempt would see the same rows")),
    ],
)  # fmt: skip
def test_decision_follows_the_end_and_the_budgets(end: End, before: list[Kind], saved: int, decision: Decision) -> None:
    kinds = [*before, end.kind] if end.kind is not None else before
    assert decide(end, _history(*kinds, saved=saved), BUDGETS) == decision
    assert decision.again is (decision.action in {"restart", "requeue"})


def test_only_lost_hosts_are_waited_for_when_an_attempt_cannot_start() -> None:
    """Whatever budget is left: the supervisor that is started again checks it."""
    cause, history = _cause("host", None), _history("preemption", "preemption")
    lost = End("failed", None, cause, "preemption", error=TooFewHosts("1 of 2", lost=True))
    few = End("failed", None, cause, "startup", error=TooFewHosts("1 of 2", lost=False))
    unusable = End("failed", None, _cause("checkpoint", None), error=InputError("none can be used"))
    assert [decide(end, history, BUDGETS).action for end in (lost, few, unusable)] == ["requeue", "give_up", "give_up"]
    assert decide(few, history, BUDGETS).refusal is None


def test_a_stop_request_ends_a_failed_run_and_not_one_whose_time_is_up() -> None:
    history = _history("crash")
    assert decide(FAILED, history, BUDGETS, stop_requested=True) == Decision("give_up", "it was asked to stop")
    preempted = End("preempted", 3, kind="time_limit", signal="SIGUSR1")
    assert decide(preempted, history, BUDGETS, stop_requested=True) == Decision("requeue")


def test_an_attempt_that_lost_the_run_is_never_followed() -> None:
    refused = Decision("give_up", "another attempt owns the run")
    for end in (FAILED, End("preempted", 3, kind="time_limit", signal="SIGUSR1")):
        assert decide(end, _history("crash"), BUDGETS, superseded=True, stop_requested=True) == refused
    assert decide(End("finished", 6), _history(), BUDGETS, superseded=True) == Decision("stop")


@pytest.mark.parametrize(
    ("cause", "trained", "kind"),
    [
        (_cause(stage="build"), False, "startup"),
        (_cause(stage="load"), False, "crash"),
        (_cause(stage="build"), True, "crash"),
        (_cause("takeover", None), True, "preemption"),
        (_cause("agent", None), False, "startup"),
    ],
)
def test_a_failure_is_charged_by_how_far_the_attempt_came(cause: Cause, trained: bool, kind: str) -> None:
    assert failure_kind(cause, trained) == kind


USER, AGENT = Request(1, "stop"), Request(1, "stop", "SIGTERM")


@pytest.mark.parametrize(
    ("wishes", "signal", "end"),
    [
        ([USER], None, End("stopped", 3)),
        ([Request(1, "save")], "SIGINT", End("stopped", 3, signal="SIGINT")),
        ([AGENT], None, End("stopped", 3, kind="preemption", signal="SIGTERM")),
        ([], "SIGTERM", End("stopped", 3, kind="preemption", signal="SIGTERM")),
        ([USER], "SIGTERM", End("stopped", 3, signal="SIGTERM")),
        ([USER, AGENT], None, End("stopped", 3)),
        ([AGENT, USER], None, End("stopped", 3, signal="SIGTERM")),
        ([], "SIGUSR1", End("preempted", 3, kind="time_limit", signal="SIGUSR1")),
        ([USER], "SIGUSR1", End("stopped", 3)),
        ([Request(1, "stop", "SIGUSR1")], "SIGTERM", End("stopped", 3, kind="preemption", signal="SIGTERM")),
    ],
)
def test_a_stop_by_a_user_is_no_preemption(wishes: list[Request], signal: str | None, end: End) -> None:
    assert stop_end(wishes, signal, 3) == end


@pytest.mark.parametrize(
    ("limit", "ordinal"),
    [(1, "2nd"), (2, "3rd"), (3, "4th"), (10, "11th"), (11, "12th"), (12, "13th"), (20, "21st"), (110, "111th")],
)
def test_the_exhausted_budget_is_named_with_its_count(limit: int, ordinal: str) -> None:
    kinds: list[Kind] = ["preemption"] * (limit + 1)
    history = _history(*kinds)
    told = f"its hosts were preempted or lost, for the {ordinal} time, and recover.budgets.preemption={limit}"
    assert history.refusal("preemption", BudgetsConfig(preemption=limit)) == told
