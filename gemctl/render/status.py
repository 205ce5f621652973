"""The state of runs (list, status, stop, detach, sweep), their log lines, and the checks of `gemctl doctor`."""

import json
import sys
from collections.abc import Iterable
from datetime import datetime

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gemctl import paths
from gemctl.cluster.checks import Doctor
from gemctl.launch.progress import measured
from gemctl.render.show import plain
from gemctl.report.logs import Line
from gemctl.report.status import AttemptStatus, RunList, RunStatus, SubmissionStatus
from gemctl.run.requests import StopFiled
from gemctl.run.submission import Detached, Sweep
from gemctl.terminal import shown
from gemctl.units import DASH, abbreviated

OVER = {"finished", "stopped"}
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run_list(value: RunList) -> Group:
    """One line per run, newest last."""
    runs = _runs(value.runs) if value.runs else Text(f"no runs below {value.root}")
    older = [Text(f"{value.older:,} older runs: gemctl list --last 0")] if value.older else []
    return Group(*older, runs, *(Text(f"cannot be read: {problem}") for problem in value.unreadable))


def _runs(runs: list[RunStatus]) -> Table:
    table = Table("run", "name", "state", "started", "attempts", "step", "checkpoint", box=None, header_style="bold")
    for run in runs:
        step = _known(run.attempts[-1].step if run.attempts else None)
        saved = DASH if run.checkpoint_step is None else f"step {run.checkpoint_step}"
        saved = "unusable" if run.checkpoint_step is None and run.unusable is not None else saved
        state = Text(_state(run))
        table.add_row(run.run_id, Text(run.name), state, _time(run.created), str(len(run.attempts)), step, saved)
    return table


def _state(run: RunStatus) -> str:
    job = run.submission.job if run.submission is not None else None
    return f"{run.state} ({job.detail})" if job is not None and job.state in {"waiting", "unknown"} else run.state


def run_status(value: RunStatus) -> Group:
    """One run: its state, submission, attempts and ranks, the budgets it has used, and how it ended."""
    saved = "none" if value.checkpoint is None else f"{value.checkpoint} ({value.checkpoint_step} steps)"
    head = [f"{value.run_id} ({value.name}): {value.state}", value.path, f"newest checkpoint: {saved}"]
    head += [f"not usable: {value.unusable}"] if value.unusable is not None else []
    head += [_submission(value.submission)] if value.submission is not None else []
    concluded = value.attempts[-1:] if value.conclusion is not None else []
    tail = [*_budgets(value), *value.cut]
    tail += [f"attempt {one.attempt}: {one.cause}" for one in value.attempts if one.cause and one not in concluded]
    tail += [value.conclusion] if value.conclusion is not None else []
    ranks = [_ranks(value)] if value.ranks and value.state not in OVER else []
    return Group(Text("\n".join(head)), _attempts(value), *ranks, *map(Text, tail))


def _submission(value: SubmissionStatus) -> str:
    if value.job is not None:
        by = value.job.detail
    elif value.pid is not None:
        by = f"process {value.pid} on host {value.host}"
    elif value.time is not None:
        by = ""
    else:  # a copy has attempts, but no supervisor
        by = "no supervisor of this directory" if value.started else "not started yet"
    when = "" if value.time is None else f" at {_time(value.time)}"
    return f"submission {value.number}, launcher={value.kind}{when}" + (f": {by}" if by else "")


def _attempts(value: RunStatus) -> Table:
    names = ("attempt", "state", "supervisor", "started", "from step", "stage", "step", "last heartbeat")
    table = Table(*names, box=None, header_style="bold")
    for attempt in value.attempts:
        table.add_row(*_attempt(attempt))
    return table


def _attempt(attempt: AttemptStatus) -> list[str]:
    return [
        str(attempt.attempt),
        attempt.state,
        DASH if attempt.host is None else f"{attempt.host}, process {attempt.pid}",
        DASH if attempt.started is None else _time(attempt.started),
        _known(attempt.base_step),
        attempt.stage or DASH,
        _known(attempt.step),
        DASH if attempt.beat_age is None else f"{attempt.beat_age:.1f} s ago",
    ]


def _ranks(value: RunStatus) -> Table:
    table = Table("ranks", "stage", "step", "last update", box=None, header_style="bold")
    for group in value.ranks:
        table.add_row(abbreviated(group.ranks), group.stage, _known(group.step), f"{group.idle:.1f} s ago")
    return table


def _budgets(value: RunStatus) -> list[str]:
    """The budgets of which something has been used."""
    used = [f"{one.kind} {one.spent} of {one.limit}" for one in value.budgets if one.spent]
    return [f"recover.budgets used: {', '.join(used)}"] if used else []


def stop_filed(value: StopFiled) -> str:
    """What a stop request has done so far."""
    target = value.run if value.attempt is None else f"attempt {value.attempt} of {value.run}"
    match value.outcome:
        case "withdrawn":
            return f"{value.run}: removed from the queue ({value.job})"
        case "ended":
            return f"{target} was killed (request {value.request})"
        case "ordered":
            return f"told {target} to end at once (request {value.request}); not confirmed yet"
        case _:
            return f"asked {target} to save and stop (request {value.request})"


def detached(value: Detached) -> str:
    """The run's state, and how to follow and stop it."""
    waits = value.job is not None and value.job.state == "waiting"
    state = "is running" if value.attempt is not None else "is queued" if waits else "is being started"
    by = "" if value.job is None else f": {value.job.detail}"
    run = paths.word(value.run)
    return f"run {value.run} {state}{by}\nfollow it: gemctl logs -f {run}\nstop it: gemctl stop {run}"


def sweep(value: Sweep) -> Table:
    """A row per run."""
    table = Table("run", "job", "settings", box=None, pad_edge=False)
    for one in value.runs:
        table.add_row(one.run, one.job, " ".join(one.settings))
    return table


def write_log(lines: Iterable[Line | str], as_json: bool) -> None:
    """Writes each line as it comes, or as a JSON object; plain strings say how an attempt or the run ended."""
    for line in lines:
        if line == "":
            continue
        if isinstance(line, Line):
            text = json.dumps(plain(line)) if as_json else _log_line(line)
        else:
            text = json.dumps({"conclusion": line.strip()}) if as_json else line
        sys.stdout.write(shown(text) + "\n")
        sys.stdout.flush()


def _log_line(line: Line) -> str:
    host = "" if line.host is None else f" {line.host}"
    text = line.text if line.record is None else measured(line.record)
    time = DASH * 23 if line.time == float("inf") else f"{datetime.fromtimestamp(line.time):%Y-%m-%d %H:%M:%S.%f}"[:-3]
    return f"{time} {line.source}{host} | {text}"


def doctor(value: Doctor) -> Table:
    """One row per check; the advice is below the finding."""
    table = Table("check", "", "found", box=None, pad_edge=False)
    for check in value.checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n→ {check.advice}", style=STYLES[check.status])
        table.add_row(check.name, Text(check.status, style=STYLES[check.status]), found)
    return table


def _known(number: int | None) -> str:
    return DASH if number is None else str(number)


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
