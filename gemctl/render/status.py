"""Runs and their attempts as tables."""

from datetime import datetime
from typing import TYPE_CHECKING

from gemctl import paths

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from gemctl.report.status import AttemptStatus, RunList, RunStatus, SubmissionStatus
    from gemctl.run.requests import StopFiled
    from gemctl.run.submission import Detached, Sweep


def run_list(value: "RunList") -> "Group":
    """One line a run, newest last."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    runs = _runs(value.runs) if value.runs else Text(f"no runs below {value.root}")
    older = [Text(f"{value.older:,} older runs: gemctl list --last 0")] if value.older else []
    return Group(*older, runs, *(Text(f"cannot be read: {problem}") for problem in value.unreadable))


def _runs(runs: "list[RunStatus]") -> "Table":
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table("run", "name", "state", "started", "attempts", "step", "checkpoint", box=None, header_style="bold")
    for run in runs:
        last = run.attempts[-1] if run.attempts else None
        step = "–" if last is None or last.step is None else str(last.step)
        saved = "–" if run.checkpoint_step is None else f"step {run.checkpoint_step}"
        saved = "unusable" if run.checkpoint_step is None and run.unusable is not None else saved
        state = Text(_state(run))
        table.add_row(run.run_id, Text(run.name), state, _time(run.created), str(len(run.attempts)), step, saved)
    return table


def _state(run: "RunStatus") -> str:
    job = run.submission.job if run.submission is not None else None
    told = job is not None and job.state in {"waiting", "unknown"}
    return f"{run.state} ({job.detail})" if job is not None and told else run.state


def run_status(value: "RunStatus") -> "Group":
    """One run: where it is, who runs it, its attempts, its ranks, what is spent, and how it ended."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    saved = "none" if value.checkpoint is None else f"{value.checkpoint} ({value.checkpoint_step} steps)"
    lines = [f"{value.run_id} ({value.name}): {value.state}", value.path, f"newest checkpoint: {saved}"]
    lines += [f"cannot be used: {value.unusable}"] if value.unusable is not None else []
    lines += [_submission(value.submission)] if value.submission is not None else []
    concluded = value.attempts[-1:] if value.conclusion is not None else []
    told = [f"attempt {one.attempt}: {one.cause}" for one in value.attempts if one.cause and one not in concluded]
    where = [_ranks(value)] if value.ranks and value.state not in OVER else []
    told += [value.conclusion] if value.conclusion is not None else []
    return Group(Text("\n".join(lines)), _attempts(value), *where, *map(Text, [*_budgets(value), *value.cut, *told]))


OVER = {"finished", "stopped"}


def _submission(value: "SubmissionStatus") -> str:
    if value.job is not None:
        by = value.job.detail
    elif value.pid is not None:
        by = f"process {value.pid} of host {value.host}"
    else:
        by = "nobody yet" if value.time is None else ""
    when = "" if value.time is None else f" at {_time(value.time)}"
    return f"submission {value.number}, launcher={value.kind}{when}" + (f": {by}" if by else "")


def _attempts(value: "RunStatus") -> "Table":
    from rich.table import Table  # noqa: PLC0415

    names = ("attempt", "state", "supervisor", "started", "from step", "stage", "step", "last beat")
    table = Table(*names, box=None, header_style="bold")
    for attempt in value.attempts:
        table.add_row(*_row(attempt))
    return table


def _row(attempt: "AttemptStatus") -> list[str]:
    beat = "–" if attempt.beat_age is None else f"{attempt.beat_age:.1f} s ago"
    started = "–" if attempt.started is None else _time(attempt.started)
    numbers = [None if number is None else str(number) for number in (attempt.base_step, attempt.step)]
    return [
        str(attempt.attempt),
        attempt.state,
        "–" if attempt.host is None else f"{attempt.host}, process {attempt.pid}",
        started,
        numbers[0] or "–",
        attempt.stage or "–",
        numbers[1] or "–",
        beat,
    ]


def _ranks(value: "RunStatus") -> "Table":
    from rich.table import Table  # noqa: PLC0415

    from gemctl.render.mesh import pattern  # noqa: PLC0415

    table = Table("ranks", "stage", "step", "last sign", box=None, header_style="bold")
    for group in value.ranks:
        step = "–" if group.step is None else str(group.step)
        table.add_row(pattern(group.ranks), group.stage, step, f"{group.idle:.1f} s ago")
    return table


def _budgets(value: "RunStatus") -> list[str]:
    """Those of which something is spent."""
    spent = [f"{one.kind} {one.spent} of {one.limit}" for one in value.budgets if one.spent]
    return [f"spent of recover.budgets: {', '.join(spent)}"] if spent else []


def stop_filed(value: "StopFiled") -> str:
    of = "" if value.attempt is None else f"attempt {value.attempt} of "
    match value.outcome:
        case "withdrawn":
            return f"{value.run}: taken out of the queue ({value.job})"
        case "ended":
            return f"{of}{value.run} was killed (request {value.request})"
        case "ordered":
            return f"ordered {of}{value.run} to end at once (request {value.request}); it has not said yet that it has"
        case _:
            return f"asked {of}{value.run} to save and stop (request {value.request})"


def detached(value: "Detached") -> str:
    """Whose the run is now, and how to follow and stop it."""
    waits = value.job is not None and value.job.state == "waiting"
    state = "runs" if value.attempt is not None else "waits" if waits else "is being started"
    by = "" if value.job is None else f": {value.job.detail}"
    run = paths.word(value.run)
    return f"run {value.run} {state}{by}\nfollow it: gemctl logs -f {run}\nstop it: gemctl stop {run}"


def sweep(value: "Sweep") -> "Table":
    """A row for each run."""
    from rich.table import Table  # noqa: PLC0415

    table = Table("run", "job", "settings", box=None, pad_edge=False)
    for one in value.runs:
        table.add_row(one.run, one.job, " ".join(one.settings))
    return table


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
