"""The foreground of a run that a scheduler's job supervises: it ends as the run does, and Ctrl-C means stop."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gemctl.errors import GemctlError, Interrupted
from gemctl.launch import follow, liveness
from gemctl.launch.follow import Follower
from gemctl.launch.progress import Progress
from gemctl.launchers import api
from gemctl.run import requests
from gemctl.run.attempt import Attempt, Base, claim
from gemctl.run.directory import RunDir
from gemctl.run.submission import Job, Submission, submit

CAUSE = {"text": "rank 1 failed first", "rank": 1}


class Scheduler:
    """It knows one job, whose state a test sets."""

    def __init__(self) -> None:
        self.state: Any = "waiting"
        self.cancelled = False

    def jobs(self, submissions: Sequence[Submission]) -> list[Job | None]:
        return [Job("17", self.state, f"job 17: {self.state}") for _ in submissions]

    def cancel(self, submission: Submission) -> None:
        self.cancelled, self.state = True, "ended"


class Case:
    """A submitted run and what follows it; `told`: what the terminal has shown."""

    def __init__(self, root: Path) -> None:
        self.run = RunDir.create(str(root), "gem", ["gemctl", "train"])
        self.submission = submit(self.run, "{}", "{}", {"kind": "slurm", "app": {}})
        self.scheduler: Any = Scheduler()
        self.out = io.StringIO()

    def follow(self, *events: Callable[[], object]) -> str:
        """Follows to the end while `events` happen, 0.15 s apart."""
        thread = threading.Thread(target=self._happen, args=(events,))
        thread.start()
        try:
            with Progress(steps=10, out=self.out) as progress:
                Follower(self.run, self.submission, self.scheduler, progress).follow()
        finally:
            thread.join()
        return self.out.getvalue()

    def _happen(self, events: tuple[Callable[[], object], ...]) -> None:
        for event in events:
            time.sleep(0.15)
            event()

    def begin(self, number: int = 1) -> Attempt:
        self.scheduler.state = "running"
        attempt = claim(self.run.path, number, nodes=1, ranks_per_node=1, heartbeat=0.02)
        attempt.write_base(Base(None, 0))
        return attempt

    def end(self, number: int, outcome: str, **facts: Any) -> None:
        self.run.attempt(number).write_end(outcome, step=3, **facts)

    def set(self, state: str) -> None:
        self.scheduler.state = state


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    made = Case(tmp_path / "runs")
    for module in api.LAUNCHERS.values():
        monkeypatch.setitem(sys.modules, module, made.scheduler)
    monkeypatch.setattr(follow, "POLL", 0.01)
    monkeypatch.setattr(liveness, "JOB_POLL", 0.02)
    return made


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_waits_in_the_queue_and_follows_attempts_to_the_end(case: Case) -> None:
    told = case.follow(
        case.begin,
        lambda: case.end(1, "failed", cause=CAUSE, again=True),
        lambda: case.begin(2),
        lambda: case.end(2, "preempted", again=True, signal="SIGUSR1"),
        lambda: case.set("waiting"),
        lambda: case.begin(3),
        lambda: case.end(3, "finished"),
    )
    assert told.count("job 17: waiting") == 2


@pytest.mark.parametrize(
    ("outcome", "facts", "error", "code", "message"),
    [
        ("failed", {"cause": CAUSE, "again": False, "refusal": "enough"}, GemctlError, 1, "not tried again: enough"),
        ("stopped", {"signal": "SIGTERM"}, Interrupted, 143, "stopped at step 3, saved"),
        ("killed", {}, Interrupted, 130, "was killed"),
    ],
)
def test_it_ends_as_the_supervisor_has(
    case: Case, outcome: str, facts: dict[str, Any], error: type[GemctlError], code: int, message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        case.follow(case.begin, lambda: case.end(1, outcome, **facts))
    assert raised.value.exit_code == code


def test_a_stop_request_of_somebody_else_ends_it_well(case: Case) -> None:
    assert "stopped at step 3, saved" in case.follow(case.begin, lambda: case.end(1, "stopped"))


def test_a_job_that_ends_without_an_end_record_is_an_error(case: Case) -> None:
    with pytest.raises(
        GemctlError, match=r"its supervisor is gone \(job 17: ended\); attempt 1 has no end record\nto resume"
    ):
        case.follow(case.begin, lambda: case.set("ended"))


def test_a_job_that_never_began_an_attempt_is_an_error(case: Case) -> None:
    case.submission.output.write_text("no module named gemctl\n")
    with pytest.raises(GemctlError, match=r"it has no attempt \(job 17: ended\)\nno module named gemctl\nto resume"):
        case.follow(lambda: case.set("ended"))


def test_an_interrupt_is_a_stop_request(case: Case) -> None:
    with pytest.raises(Interrupted, match="stopped at step 3, saved"):
        case.follow(case.begin, _interrupt, lambda: case.end(1, "stopped"))
    assert requests.filed(case.run, 1) == [requests.Request(1, "stop")]


def test_a_second_interrupt_leaves_the_run_alone(case: Case) -> None:
    with pytest.raises(Interrupted, match="continues without this terminal"):
        case.follow(case.begin, _interrupt, _interrupt)
    assert len(requests.filed(case.run, 1)) == 1


def test_an_interrupt_takes_a_job_out_of_the_queue(case: Case) -> None:
    with pytest.raises(Interrupted, match="its job was removed from the queue"):
        case.follow(_interrupt)
    assert case.scheduler.cancelled
