"""What a run is doing, from its directory alone: gemctl status RUN."""

import time
from dataclasses import dataclass

from gemctl.errors import InputError
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir, list_runs
from gemctl.run.files import read_log
from gemctl.run.manifest import checkpoints


@dataclass(frozen=True)
class AttemptStatus:
    """`state`: starting, running, silent (no end and no beat: it died), finished, stopped, killed or failed.

    `beat_age`: seconds since its last beat by this machine's clock; `step`: the furthest that a rank has entered.
    """

    attempt: int
    state: str
    host: str | None
    started: float | None
    beat_age: float | None
    stage: str | None
    step: int | None
    base_step: int | None
    cause: str | None


@dataclass(frozen=True)
class RunStatus:
    """One run; `attempts` oldest first; `checkpoint_step`: steps in its newest checkpoint."""

    run_id: str
    name: str
    path: str
    state: str
    created: float
    attempts: list[AttemptStatus]
    checkpoint: str | None
    checkpoint_step: int | None


@dataclass(frozen=True)
class RunList:
    """All runs below `root`, oldest first; `unreadable`: why some are not among them."""

    root: str
    runs: list[RunStatus]
    unreadable: list[str]


def run_list(root: str) -> RunList:
    """Every run's status; one whose files cannot be read does not hide the others."""
    runs, unreadable = [], []
    for run in list_runs(root):
        try:
            runs.append(status(run))
        except InputError as error:
            unreadable += error.problems
    return RunList(root, runs, unreadable)


def status(run: RunDir) -> RunStatus:
    """Reads the run's files; nothing waits, so `silent` is a judgement by file times and clocks."""
    info = run.info()
    if missing := [key for key in ("name", "created") if key not in info]:
        raise InputError(f"{run.path / 'run.json'}: {', '.join(missing)}: missing")
    attempts = [_attempt(attempt) for attempt in run.attempts()]
    newest = next((found for found in checkpoints(run) if found.flaw is None), None)
    return RunStatus(
        run_id=run.run_id,
        name=info["name"],
        path=str(run.path),
        state=attempts[-1].state if attempts else "never started",
        created=info["created"],
        attempts=attempts,
        checkpoint=None if newest is None else newest.path.name,
        checkpoint_step=None if newest is None else newest.step,
    )


def _attempt(attempt: Attempt) -> AttemptStatus:
    claim = attempt.claim() if attempt.claimed else None
    end = attempt.end()
    age = time.time() - attempt.heartbeat.stat().st_mtime if attempt.heartbeat.exists() else None
    stage, step = _progress(attempt)
    if end is not None:
        state = end["outcome"]
    elif age is None or claim is None or age > claim.patience:
        state = "silent"
    else:
        state = "running" if stage is not None else "starting"
    return AttemptStatus(
        attempt=attempt.number,
        state=state,
        host=claim.host if claim is not None else None,
        started=claim.time if claim is not None else None,
        beat_age=None if end is not None else age,
        stage=stage,
        step=step,
        base_step=attempt.base().step if attempt.base_file.exists() else None,
        cause=_cause(end),
    )


def _progress(attempt: Attempt) -> tuple[str | None, int | None]:
    """Stage and step of rank 0's last line."""
    lines = read_log(attempt.rank_log(0))
    return (lines[-1]["stage"], lines[-1]["step"]) if lines else (None, None)


def _cause(end: dict[str, object] | None) -> str | None:
    cause = end.get("cause") if end is not None else None
    return str(cause["text"]) if isinstance(cause, dict) else None
