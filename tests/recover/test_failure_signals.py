"""Interrupts, dead agents and supervisors, takeovers, and the next attempt after a crash."""

import signal
from pathlib import Path
from typing import Any

import pytest

from gemctl import process
from gemctl.config.schema import BudgetsConfig, RecoverConfig
from gemctl.recover.context import Context, Prepared
from gemctl.recover.signals import StopSignals
from gemctl.recover.watch import Watch
from gemctl.run import requests
from gemctl.run.attempt import claim
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log
from gemctl.run.manifest import checkpoints
from tests.support.small_run import (
    STEPS,
    Case,
    Disturb,
    Disturbing,
    Ended,
    ForkedAgents,
    Job,
    only_run,
    pids,
    supervise_all,
)
from tests.support.world import run_world

LONG = Job(500)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in CASES}


@pytest.fixture(scope="module")
def ends(roots: dict[str, Path]) -> dict[str, Ended]:
    """All cases at once."""
    cases = [Case(str(roots[name]), **arguments) for name, arguments in CASES.items()]  # type: ignore[arg-type]
    return dict(zip(CASES, run_world(1, supervise_all, cases, gloo=False)[0], strict=True))


def _job(disturb: str, job: Job = LONG, **when: Any) -> dict[str, object]:
    return {"disturb": Disturb(disturb, **when), "job": job}


HUNG_IN_BUILD = "hang:rank=1,stage=build"
CASES: dict[str, dict[str, object]] = {
    "well": {},
    "interrupt": _job("interrupt"),
    "interrupt in build": {"disturb": Disturb("interrupt", at=-1), "inject": HUNG_IN_BUILD},
    "interrupt twice": _job("interrupt_twice"),
    "stop now": {**_job("file_kill"), "budgets": BudgetsConfig(crash=1)},
    "kill agent": _job("kill_agent"),
    "stop agent": {"disturb": Disturb("stop_agent"), "watchdog": 9.0},
    "stop done rank": {"fault": "linger", "watchdog": 9.0},
    "kill supervisor": _job("kill_self"),
    "stop rank": {**_job("stop_rank"), "watchdog": 9.0},
    "take over": _job("take_over"),
    "full disk": {"disturb": Disturb("fill_disk"), "inject": "kill:rank=2,step=4"},
    "full disk, hang": {"disturb": Disturb("fill_disk"), "inject": "hang:rank=2,step=4", "watchdog": 9.0},
    "crash": {"inject": "kill:rank=2,step=3", "budgets": BudgetsConfig(crash=1)},
    "crash in build": {"inject": "kill:rank=2,stage=build", "budgets": BudgetsConfig()},
    "terminate": _job("terminate_twice", Job(500, save_seconds=1.0)),
    "terminate in eval": _job("terminate", Job(500, eval_at=3), at=3, stage="eval"),
    "terminate in build": {"disturb": Disturb("terminate", at=-1), "inject": HUNG_IN_BUILD},
    "too little grace": _job("terminate", Job(500, every=2, save_seconds=1.0), at=3, grace=0.5),
    "time up": {**_job("time_up"), "budgets": BudgetsConfig(time_limit=1)},
    "time up, no budget": _job("time_up"),
}


def test_run_that_ends_well(ends: dict[str, Ended]) -> None:
    end = ends["well"]
    assert (end.error, end.exit_code, end.left) == (None, 0, [])
    assert [line["event"] for line in read_log(end.run_dir.supervisor_log)] == ["attempt", "end"]
    finish = read_log(end.run_dir.attempt(1).rank_log(0))[-1]
    assert (finish["event"], finish["result"], finish["step"]) == ("finish", "finished", STEPS)


def test_first_interrupt_lets_the_ranks_save(ends: dict[str, Ended]) -> None:
    end = ends["interrupt"]
    assert (end.error, end.exit_code, end.left) == ("Interrupted", 130, [])
    stages = [line["stage"] for line in read_log(end.run_dir.attempt(1).rank_log(1))]
    assert "save" in stages
    assert "gemctl resume" in end.message


def test_interrupt_before_the_first_step_does_not_wait_for_it(ends: dict[str, Ended]) -> None:
    end = ends["interrupt in build"]
    assert (end.error, end.exit_code, end.left) == ("Interrupted", 130, [])
    assert "before its first step" in end.message


def test_second_interrupt_ends_at_once(ends: dict[str, Ended]) -> None:
    end = ends["interrupt twice"]
    assert (end.error, end.exit_code, end.left) == ("Interrupted", 130, [])
    stages = [line["stage"] for line in read_log(end.run_dir.attempt(1).rank_log(1))]
    assert "save" not in stages


def test_a_request_to_end_at_once_is_not_taken_for_a_failure(ends: dict[str, Ended]) -> None:
    end = ends["stop now"]
    assert (end.error, end.exit_code, end.left) == ("Interrupted", 130, [])
    assert "was killed" in end.message
    (attempt,) = end.run_dir.attempts()
    assert (attempt.end() or {})["outcome"] == "killed"
    assert "save" not in [line["stage"] for line in read_log(attempt.rank_log(1))]
    assert end.seconds < 3


@pytest.mark.parametrize("case", ["terminate", "terminate in eval"])
def test_sigterm_lets_the_ranks_save_however_often_it_comes(ends: dict[str, Ended], case: str) -> None:
    end = ends[case]
    assert (end.error, end.exit_code, end.left) == ("Interrupted", 143, [])
    (checkpoint,) = checkpoints(end.run_dir)
    ended = end.run_dir.attempt(1).end()
    assert ended is not None
    assert (ended["outcome"], ended["signal"], ended["saved"]) == ("stopped", "SIGTERM", checkpoint.step)
    assert f"to resume from step {checkpoint.step}: " in end.message


def test_sigterm_before_the_first_step_does_not_wait_for_it(ends: dict[str, Ended]) -> None:
    end = ends["terminate in build"]
    assert (end.error, end.exit_code, end.left) == ("Interrupted", 143, [])
    assert "before its first step" in end.message


def test_grace_shorter_than_the_save_leaves_the_last_checkpoint(ends: dict[str, Ended], roots: dict[str, Path]) -> None:
    """SIGKILL comes while a save is under way, whose folder never becomes a checkpoint."""
    assert ends["too little grace"] is None
    run = only_run(roots["too little grace"])
    assert process.wait_until_gone(pids(run), 3) == []
    assert run.attempt(1).end() is None
    assert [(one.step, one.flaw) for one in checkpoints(run)] == [(2, None)]
    assert [wish.signal for wish in requests.pending(run, run.attempt(1))] == ["SIGTERM"]


def test_time_limit_saves_and_asks_for_another_job_within_its_budget(ends: dict[str, Ended]) -> None:
    end = ends["time up"]
    assert (end.error, end.exit_code, end.left) == ("Requeue", 143, [])
    ended = end.run_dir.attempt(1).end()
    assert ended is not None
    assert (ended["outcome"], ended["kind"], ended["saved"]) == ("preempted", "time_limit", ended["step"])
    assert "time_limit: 0 of recover.budgets.time_limit=1 left" in end.message
    end = ends["time up, no budget"]
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert "not restarted: the scheduler's time limit was reached, and recover.budgets.time_limit=0" in end.message


@pytest.mark.parametrize(
    ("sent", "reason", "at_once"),
    [
        (["SIGUSR1", "SIGTERM", "SIGTERM"], "SIGUSR1", False),  # the limit itself, as the save takes longer
        (["SIGTERM", "SIGUSR1"], "SIGTERM", False),
        (["SIGUSR1", "SIGINT"], "SIGINT", False),
        (["SIGUSR1", "SIGINT", "SIGINT"], "SIGINT", True),
        (["SIGTERM", "SIGINT"], "SIGINT", True),
        (["SIGHUP", "SIGHUP"], "SIGTERM", False),  # the terminal was closed
    ],
)
def test_what_several_signals_ask_for(sent: list[str], reason: str, at_once: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as asked:
        for name in sent:
            signal.raise_signal(signal.Signals[name])
    assert asked.reason is not None
    assert (asked.reason.name, asked.at_once) == (reason, at_once)
    assert signal.getsignal(signal.SIGTERM) is before


def test_hangup_that_is_ignored_asks_for_nothing() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as asked:
            signal.raise_signal(signal.SIGHUP)
        assert asked.reason is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_dead_agent_ends_the_run(ends: dict[str, Ended]) -> None:
    end = ends["kill agent"]
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert "the agent failed: killed by SIGKILL" in end.message
    assert end.seconds < 3


def test_agent_that_is_stopped_is_to_blame(ends: dict[str, Ended]) -> None:
    """Its ranks go on and finish: only their ends stay untold."""
    end = ends["stop agent"]
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert "the agent has shown no sign of life for 9 s" in end.message


def test_rank_that_is_done_and_does_not_end_is_named(ends: dict[str, Ended]) -> None:
    end = ends["stop done rank"]
    assert end.cause is not None
    assert (end.cause["kind"], end.cause["rank"], end.cause["stage"], end.left) == ("hang", 1, "close", [])


def test_start_up_has_a_limit_of_its_own(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path), "small", ["test"])
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=1, heartbeat=0.1)
    recover, case = RecoverConfig(watchdog=0.1), Case("")
    agents, follower = ForkedAgents(run, case), Disturbing(case, run)
    watch = Watch(Context(run, Prepared("", "", 1, 1), recover, agents, follower, StopSignals()), attempt)
    records = watch.records
    records.created -= 1
    records.agents[0].sign -= 1
    assert watch.hung() is None
    records.created -= 60
    end = watch.hung()
    assert end is not None
    assert end.cause is not None
    assert end.cause.text() == "not all ranks were started within 60 s"


def test_nothing_outlives_the_supervisor(ends: dict[str, Ended], roots: dict[str, Path]) -> None:
    assert ends["kill supervisor"] is None
    named = pids(only_run(roots["kill supervisor"]))
    assert len(named) > 1
    assert process.wait_until_gone(named, 3) == []


def test_rank_that_answers_nothing_is_the_one_that_hangs(ends: dict[str, Ended]) -> None:
    end = ends["stop rank"]
    assert end.cause is not None
    assert (end.cause["kind"], end.cause["rank"], end.left) == ("hang", 1, [])
    assert "did not answer" in end.message


def test_taken_over_attempt_ends(ends: dict[str, Ended]) -> None:
    end = ends["take over"]
    assert (end.error, end.left) == ("RunFailed", [])
    events = [line["event"] for line in read_log(end.run_dir.attempt(1).agent_log(0))]
    assert events[-1] == "superseded"
    assert "attempt 2 owns the run now" in end.message


def test_full_disk_does_not_hide_the_cause(ends: dict[str, Ended]) -> None:
    end = ends["full disk"]
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert "rank 2 failed first, in stage step, step 4: killed by SIGKILL" in end.message
    assert end.notes == [f"cannot be written: {end.run_dir.attempt(1).end_file}: No space left on device"]
    end = ends["full disk, hang"]
    assert (end.error, end.left) == ("RunFailed", [])
    assert "no progress for 9 s" in end.message


def test_crash_within_budget_goes_on_in_the_living_agent(ends: dict[str, Ended]) -> None:
    end = ends["crash"]
    assert (end.error, end.exit_code, end.left) == (None, 0, [])
    first, second = (read_log(attempt.agent_log(0)) for attempt in end.run_dir.attempts())
    assert first[0]["pid"] == second[0]["pid"]
    detected = next(line["time"] for line in first if line["event"] == "end")
    begun = next(line["time"] for line in second if line["event"] == "rank")
    assert begun - detected < 10, "beside a dozen other runs; alone .3 s"
    left = "trying again (crash: 0 of recover.budgets.crash=1 left; no newer checkpoint: 1 of"
    assert any("killed by SIGKILL" in note and left in note for note in end.notes)
    assert [line["event"] for line in read_log(end.run_dir.supervisor_log)] == ["attempt", "end"] * 2


def test_crash_before_the_first_step_is_not_tried_again(ends: dict[str, Ended]) -> None:
    end = ends["crash in build"]
    assert (end.error, len(end.run_dir.attempts())) == ("RunFailed", 1)
    assert "not tried again: it failed before its first step, and recover.budgets.startup=0" in end.message
    assert end.cause is not None
    assert (end.cause["rank"], end.cause["stage"], end.cause["detail"]) == (
        2,
        "build",
        f"killed by {signal.SIGKILL.name}",
    )
