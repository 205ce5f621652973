"""Runs and their attempts as tables."""

from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from gemctl.run.requests import StopFiled
    from gemctl.run.status import AttemptStatus, RunList, RunStatus
    from gemctl.run.submission import Detached


def run_list(value: "RunList") -> "Group":
    """One line a run, newest last."""
    from rich.console import Group

    runs = _runs(value.runs) if value.runs else f"no runs below {value.root}"
    return Group(runs, *(f"cannot be read: {problem}" for problem in value.unreadable))


def _runs(runs: "list[RunStatus]") -> "Table":
    from rich.table import Table

    table = Table("run", "name", "state", "started", "attempts", "step", "checkpoint", box=None, header_style="bold")
    for run in runs:
        last = run.attempts[-1] if run.attempts else None
        step = "–" if last is None or last.step is None else str(last.step)
        saved = "–" if run.checkpoint_step is None else f"step {run.checkpoint_step}"
        table.add_row(run.run_id, run.name, run.state, _time(run.created), str(len(run.attempts)), step, saved)
    return table


def run_status(value: "RunStatus") -> "Group":
    """One run: where it is, and each of its attempts."""
    from rich.console import Group
    from rich.table import Table

    table = Table(
        "attempt", "state", "host", "started", "from step", "stage", "step", "last beat", box=None, header_style="bold"
    )
    for attempt in value.attempts:
        table.add_row(*_row(attempt))
    causes = [f"attempt {attempt.attempt}: {attempt.cause}" for attempt in value.attempts if attempt.cause]
    saved = "none" if value.checkpoint is None else f"{value.checkpoint} ({value.checkpoint_step} steps)"
    head = f"{value.run_id} ({value.name}): {value.state}\n{value.path}\nnewest checkpoint: {saved}"
    return Group(head, table, *causes)


def _row(attempt: "AttemptStatus") -> list[str]:
    beat = "–" if attempt.beat_age is None else f"{attempt.beat_age:.1f} s ago"
    started = "–" if attempt.started is None else _time(attempt.started)
    numbers = [None if number is None else str(number) for number in (attempt.base_step, attempt.step)]
    return [
        str(attempt.attempt),
        attempt.state,
        attempt.host or "–",
        started,
        numbers[0] or "–",
        attempt.stage or "–",
        numbers[1] or "–",
        beat,
    ]


def detached(value: "Detached") -> str:
    """Whose the run is now, and how to follow and stop it."""
    state = "runs" if value.attempt is not None else "waits" if _waits(value) else "is being started"
    by = "" if value.job is None else f": {value.job.detail}"
    return f"run {value.run} {state}{by}\nfollow it: gemctl logs -f {value.run}\nstop it: gemctl stop {value.run}"


def _waits(value: "Detached") -> bool:
    return value.job is not None and value.job.state == "waiting"


def stop_filed(value: "StopFiled") -> str:
    return f"asked attempt {value.attempt} of {value.run} to save and stop (request {value.request})"


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
