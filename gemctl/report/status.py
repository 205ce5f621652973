"""The state of a run, from its directory and from its launcher's job: gemctl status RUN, gemctl list."""

import time
from dataclasses import dataclass, field
from typing import Any

from gemctl.errors import InputError, Unreadable
from gemctl.run import requests
from gemctl.run.attempt import Attempt, may_go_on
from gemctl.run.conclusion import cause_of
from gemctl.run.directory import RunDir
from gemctl.run.files import last_line
from gemctl.run.manifest import Checkpoint, checkpoints
from gemctl.run.submission import Job, Submission, newest


@dataclass(frozen=True)
class AttemptStatus:
    """`state`: starting, running, silent (no end record and no heartbeat: it died), or how it ended: finished, stopped,
    preempted, killed, failed.

    `host`, `pid`: of its supervisor; `beat_age`: seconds since the last heartbeat by this machine's clock; `step`: the
    last step that rank 0 has entered.
    """

    attempt: int
    state: str
    host: str | None
    pid: int | None
    started: float | None
    beat_age: float | None
    stage: str | None
    step: int | None
    base_step: int | None
    cause: str | None


@dataclass(frozen=True)
class SubmissionStatus:
    """The newest submission: when and for which launcher; `host`, `pid`, `job`: what runs it; `started`: whether it has
    made an attempt."""

    number: int
    kind: str
    time: float | None
    host: str | None
    pid: int | None
    job: Job | None
    started: bool


@dataclass(frozen=True)
class Ranks:
    """Ranks of the newest attempt in the same stage and step; `idle`: seconds since the oldest last update."""

    ranks: list[int]
    stage: str
    step: int | None
    idle: float


@dataclass(frozen=True)
class Budget:
    """How much of a budget in recover.budgets the attempts of the newest submission have used."""

    kind: str
    spent: int
    limit: int


@dataclass(frozen=True)
class RunStatus:
    """One run; `attempts` oldest first; `checkpoint_step`: steps in its newest valid checkpoint; `unusable`: why a
    newer one is not usable.

    `state`: the last attempt's, or waiting (in a queue), starting, restarting, stopping, withdrawn (stopped before it
    began), not started, never started.
    """

    run_id: str
    name: str
    path: str
    state: str
    created: float
    submission: SubmissionStatus | None
    attempts: list[AttemptStatus]
    checkpoint: str | None
    checkpoint_step: int | None
    unusable: str | None = None
    ranks: list[Ranks] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)
    conclusion: str | None = None
    cut: list[str] = field(default_factory=list)  # files lost in a power loss


@dataclass(frozen=True)
class RunList:
    """Runs below `root`, oldest first; `unreadable`: problems of those left out; `older`: how many more there are."""

    root: str
    runs: list[RunStatus]
    unreadable: list[str]
    older: int = 0


def open_submission(run: RunDir) -> Submission | None:
    """The run's newest submission, unless its last attempt has ended for good."""
    submission = newest(run)
    last = run.last_attempt()
    if submission is None or last is None or not submission.made(last):
        return submission
    end = last.end()
    return submission if end is None or may_go_on(end) else None


def status(run: RunDir, job: Job | None = None) -> RunStatus:
    """Reads the run's files without waiting, so `silent` is judged by file times and this machine's clock.

    `job`: the launcher's state of the open submission.
    """
    info = run.info()
    if missing := [key for key in ("name", "created") if key not in info]:
        raise InputError(f"{run.path / 'run.json'}: {', '.join(missing)}: missing")
    found = run.attempts()
    attempts = [_attempt(attempt) for attempt in found]
    saved, unusable = _newest_saved(run)
    submission = newest(run)
    return RunStatus(
        run_id=run.run_id,
        name=info["name"],
        path=str(run.path),
        state=_state(run, submission, found[-1] if found else None, attempts, job),
        created=info["created"],
        submission=_submission(submission, job, found) if submission is not None else None,
        attempts=attempts,
        checkpoint=None if saved is None else saved.path.name,
        checkpoint_step=None if saved is None else saved.step,
        unusable=unusable,
    )


def _newest_saved(run: RunDir) -> tuple[Checkpoint | None, str | None]:
    """The newest valid checkpoint, and why a newer one, or all of them, are not usable."""
    try:
        published = [one for one in checkpoints(run) if one.current]
    except Unreadable as error:
        return None, str(error)
    saved = next((one for one in published if one.state == "valid"), None)
    return saved, published[0].reason if published and published[0] is not saved else None


def ranks(attempt: Attempt) -> list[Ranks]:
    """The stage and step of the attempt's ranks, grouped, the least advanced first."""
    groups: dict[tuple[str, int | None], list[tuple[int, float]]] = {}
    for path in attempt.ranks.glob("*.jsonl"):
        line = last_line(path)
        if line is not None:
            stage = line["event"] if line["event"] in {"fail", "finish"} else line["stage"]
            groups.setdefault((stage, line["step"]), []).append((int(path.stem), line["time"]))
    return [
        Ranks(sorted(rank for rank, _ in signs), stage, step, max(0.0, time.time() - min(at for _, at in signs)))
        for (stage, step), signs in sorted(groups.items(), key=lambda group: (group[0][1] or 0, group[0][0]))
    ]


def _state(
    run: RunDir, submission: Submission | None, last: Attempt | None, attempts: list[AttemptStatus], job: Job | None
) -> str:
    if submission is not None and (last is None or not submission.made(last)):
        return _unstarted(run, submission, job)
    if last is None:
        return "never started"
    state, end = attempts[-1].state, last.end()
    if job is not None and job.state == "waiting":
        return "waiting"
    if end is not None:
        goes_on = end.get("again") and job is not None and job.state == "running"
        return "restarting" if goes_on else state
    if state == "running" and last.claimed and any(wish.ends for wish in requests.pending(run, last)):
        return "stopping"
    return state


def _unstarted(run: RunDir, submission: Submission, job: Job | None) -> str:
    """The state of a submission that has no attempt yet."""
    if job is None:
        return "never started"
    if job.state != "ended":
        return "waiting" if job.state == "waiting" else "starting"
    withdrawn = any(wish.ends for wish in requests.filed(run, submission.first_request))
    return "withdrawn" if withdrawn else "not started"


def _submission(submission: Submission, job: Job | None, attempts: list[Attempt]) -> SubmissionStatus:
    facts: dict[str, Any] = submission.submitted() or {}
    number, kind = submission.number, submission.kind
    started = any(map(submission.made, attempts))
    return SubmissionStatus(number, kind, facts.get("time"), facts.get("host"), facts.get("pid"), job, started)


def _attempt(attempt: Attempt) -> AttemptStatus:
    claim = attempt.claim() if attempt.claimed else None
    end = attempt.end()
    age = time.time() - attempt.heartbeat.stat().st_mtime if attempt.heartbeat.exists() else None
    line = last_line(attempt.rank_log(0)) or {"stage": None, "step": None}
    if end is not None:
        state = end["outcome"]
    elif age is None or claim is None or age > claim.patience:
        state = "silent"
    else:
        state = "running" if line["stage"] is not None else "starting"
    return AttemptStatus(
        attempt=attempt.number,
        state=state,
        host=claim.host if claim is not None else None,
        pid=claim.pid if claim is not None else None,
        started=claim.time if claim is not None else None,
        beat_age=None if end is not None else age,
        stage=line["stage"],
        step=line["step"],
        base_step=base.step if (base := attempt.started_from()) is not None else None,
        cause=cause_of(end),
    )
