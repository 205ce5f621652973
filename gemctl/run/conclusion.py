"""How an attempt ended, as text: the failing command, `status`, `logs` and `report` all show the same.

    conclusion(run, attempt)      # "run 2026… failed: rank 1 failed first, in stage step, step 3: killed by SIGKILL\n…"

It is read from the attempt's end.json alone.
"""

import os
from pathlib import Path
from typing import Any

from gemctl import paths
from gemctl.errors import InputError
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.manifest import checkpoints


def conclusion(run: RunDir, attempt: Attempt) -> str | None:
    """How the attempt ended, why, and how to resume; None while it runs."""
    end = attempt.end()
    return None if end is None else describe(run, end)


def ending(run: RunDir) -> str | None:
    """How the run's last attempt ended; None if it finished or is still running."""
    last = run.last_attempt()
    end = last.end() if last is not None else None
    return describe(run, end) if end is not None and end["outcome"] != "finished" else None


def cause_of(end: dict[str, Any] | None) -> str | None:
    """Why an attempt failed, in one line."""
    cause = end.get("cause") if end is not None else None
    return str(cause["text"]) if cause else None


def describe(run: RunDir, end: dict[str, Any]) -> str:
    """The same for an end that has not been written to end.json yet."""
    if (end.get("cause") or {}).get("kind") == "checkpoint":  # its text says what to do
        return str(end["cause"]["text"])
    lines = [f"run {run.run_id} {_ended(end)}", *_log(run, end)]
    if end["outcome"] == "failed" and end.get("again"):
        return "\n".join([*lines, "another attempt follows"])
    if end.get("refusal"):
        lines.append(f"{'not tried again' if end['outcome'] == 'failed' else 'not restarted'}: {end['refusal']}")
    return "\n".join(lines if end["outcome"] == "finished" else [*lines, hint(run)])


def hint(run: RunDir) -> str:
    """The command that resumes the run, and from which step."""
    try:
        found = [one for one in checkpoints(run) if one.current]
    except InputError as error:
        return f"its checkpoints cannot be read now: {error}"
    valid = [one.step for one in found if one.state == "valid"]
    if found and not valid:
        return f"none of its checkpoints can be used: gemctl checkpoint list {reference(run)}"
    start = f"step {valid[0]}" if valid else "the start (it has no checkpoint)"
    return f"to resume from {start}: gemctl resume {reference(run)}"


def saved_step(run: RunDir) -> int | None:
    """Steps in the newest valid checkpoint; None if there is none, or they cannot be read now."""
    try:
        return next((one.step for one in checkpoints(run) if one.state == "valid"), None)
    except InputError:
        return None


def reference(run: RunDir) -> str:
    """`name`, quoted as one word of a command line."""
    return paths.word(name(run))


def name(run: RunDir) -> str:
    """The run's name on a command line in the current folder: its id if it is below ./runs, else its path."""
    try:
        return run.run_id if run.path.parent.parent == Path("runs").absolute() else short(run.path)
    except FileNotFoundError:  # the current folder has been deleted
        return str(run.path)


def short(path: Path) -> str:
    """The path as one would type it in the current folder."""
    try:
        relative = os.path.relpath(path)
    except FileNotFoundError:  # the current folder has been deleted
        return str(path)
    return str(path) if relative.startswith("..") else relative


def _ended(end: dict[str, Any]) -> str:
    step, cause = end.get("step"), end.get("cause")
    match end["outcome"]:
        case "finished":
            return "has finished"
        case "killed":
            return "was killed"
        case "stopped" | "preempted" as outcome:
            why = ", as its time limit was near" if outcome == "preempted" else ""
            return "stopped before its first step" if step is None else f"stopped at step {step}, saved{why}"
        case outcome:
            return f"{outcome}: {cause['text']}" if cause else str(outcome)


def _log(run: RunDir, end: dict[str, Any]) -> list[str]:
    """What the other ranks were doing, the log's path, and its last lines."""
    cause = end.get("cause") or {}
    lines = [f"other ranks: {cause['others']}"] if cause.get("others") else []
    lines += [f"log: {short(run.path / cause['log'])}"] if cause.get("log") else []
    return lines + [f"  | {line}" for line in cause.get("lines", [])]
