"""`gemctl list`: all runs below a folder and what each is doing, including those that wait in a scheduler's queue.

gemctl list
gemctl list --root /shared/runs --json
"""

import argparse

from gemctl import paths
from gemctl.commands.arguments import LISTED_RUNS
from gemctl.errors import InputError
from gemctl.launch.liveness import jobs_of
from gemctl.report.status import RunList, open_submission, status
from gemctl.run.directory import closed_folders, list_runs


def run(args: argparse.Namespace) -> RunList:
    """Every run's status. A run whose files cannot be read does not hide the others."""
    if not paths.is_dir(args.root):
        raise InputError(f"--root {args.root}: no such folder, so it holds no runs")
    last = (0 if args.json else LISTED_RUNS) if args.last is None else args.last
    if last < 0:
        raise InputError(f"--last {last}: give a number of runs, or 0 for all")
    submissions, statuses, unreadable = {}, [], []
    runs = list_runs(args.root)
    older = max(0, len(runs) - last) if last else 0
    runs = runs[older:]
    for one in runs:
        try:
            submissions[one.path] = open_submission(one)
        except (InputError, OSError) as error:
            unreadable += _problems(error)
    submitted = {path: submission for path, submission in submissions.items() if submission is not None}
    jobs = dict(zip(submitted, jobs_of(list(submitted.values())), strict=True))
    for one in (one for one in runs if one.path in submissions):
        try:
            statuses.append(status(one, jobs.get(one.path)))
        except (InputError, OSError) as error:
            unreadable += _problems(error)
    if closed := closed_folders(args.root):  # most of them, where many users share a root
        folders = "1 folder" if len(closed) == 1 else f"{len(closed)} folders"
        unreadable.append(f"{args.root}: {folders} that you may not read: Permission denied")
    return RunList(args.root, statuses, unreadable, older)


def _problems(error: InputError | OSError) -> list[str]:
    return [f"{error.filename}: {error.strerror}"] if isinstance(error, OSError) else error.problems
