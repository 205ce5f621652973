"""`gemctl list`: all runs below a folder and what each is doing; those too that wait in a scheduler's queue.

gemctl list
gemctl list --root /shared/runs --json
"""

import argparse
from typing import TYPE_CHECKING

from gemctl import paths
from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.report.status import RunList

HELP = "List runs and what each is doing."
NEWEST = 50


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")
    parser.add_argument(
        "--last", type=int, metavar="N", help=f"the newest N runs, 0 for all (default: {NEWEST}; all with --json)"
    )


def run(args: argparse.Namespace) -> "RunList":
    """Every run's status; one whose files cannot be read does not hide the others."""
    from gemctl.launch.follow import jobs_of
    from gemctl.report.status import RunList, open_submission, status
    from gemctl.run.directory import closed_folders, list_runs

    if not paths.is_dir(args.root):
        raise InputError(f"--root {args.root}: no such folder, so no run is there")
    last = (0 if args.json else NEWEST) if args.last is None else args.last
    if last < 0:
        raise InputError(f"--last {last}: give a number of runs, or 0 for all")
    opened, runs, unreadable = {}, [], []
    found = list_runs(args.root)
    older = max(0, len(found) - last) if last else 0
    found = found[older:]
    for one in found:
        try:
            opened[one.path] = open_submission(one)
        except (InputError, OSError) as error:
            unreadable += _problems(error)
    asked = {path: submission for path, submission in opened.items() if submission is not None}
    jobs = dict(zip(asked, jobs_of(list(asked.values())), strict=True))
    for one in (one for one in found if one.path in opened):
        try:
            runs.append(status(one, jobs.get(one.path)))
        except (InputError, OSError) as error:
            unreadable += _problems(error)
    if closed := closed_folders(args.root):  # where many share a root, most of them
        unreadable.append(f"{args.root}: {len(closed)} folders of others: Permission denied")
    return RunList(args.root, runs, unreadable, older)


def _problems(error: InputError | OSError) -> list[str]:
    return [f"{error.filename}: {error.strerror}"] if isinstance(error, OSError) else error.problems
