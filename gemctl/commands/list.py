"""`gemctl list`: all runs below a folder and what each is doing; those too that wait in a scheduler's queue.

gemctl list
gemctl list --root /shared/runs --json
"""

import argparse
from typing import TYPE_CHECKING

from gemctl import paths
from gemctl.errors import GemctlError, InputError

if TYPE_CHECKING:
    from gemctl.run.status import RunList
    from gemctl.run.submission import Job, Submission

HELP = "List all runs and what each is doing."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> "RunList":
    """Every run's status; one whose files cannot be read does not hide the others."""
    from gemctl.run.directory import list_runs
    from gemctl.run.status import RunList, open_submission, status

    if not paths.is_dir(args.root):
        raise InputError(f"--root {args.root}: no such folder, so no run is there")
    opened, runs, unreadable = {}, [], []
    found = list_runs(args.root)
    for one in found:
        try:
            opened[one.path] = open_submission(one)
        except (InputError, OSError) as error:
            unreadable += _problems(error)
    jobs = _jobs([submission for submission in opened.values() if submission is not None])
    for one in (one for one in found if one.path in opened):
        submission = opened[one.path]
        try:
            runs.append(status(one, jobs.get(submission.path) if submission is not None else None))
        except (InputError, OSError) as error:
            unreadable += _problems(error)
    return RunList(args.root, runs, unreadable)


def _problems(error: InputError | OSError) -> list[str]:
    return [f"{error.filename}: {error.strerror}"] if isinstance(error, OSError) else error.problems


def _jobs(submissions: "list[Submission]") -> "dict[object, Job | None]":
    """What the launchers say, each asked once."""
    from gemctl.commands.launching import launcher_of
    from gemctl.run.submission import Job

    found: dict[object, Job | None] = {}
    for kind in dict.fromkeys(submission.kind for submission in submissions):
        own = [submission for submission in submissions if submission.kind == kind]
        try:
            said = launcher_of(kind).jobs(own)
        except GemctlError as error:
            said = [Job("", "unknown", str(error)) for _ in own]
        found |= {submission.path: job for submission, job in zip(own, said, strict=True)}
    return found
