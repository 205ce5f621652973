"""`gemctl status`: one run: who runs it, its attempts and why they ended, where its ranks are, what is left to spend.

gemctl status RUN
"""

import argparse
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemctl.report.status import Budget, RunStatus
    from gemctl.run.directory import RunDir

HELP = "Say what a run is doing."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> "RunStatus":
    from gemctl.launch.follow import job_of
    from gemctl.report.status import open_submission, ranks, status
    from gemctl.run.conclusion import ending
    from gemctl.run.cut import cut_files
    from gemctl.run.directory import find

    target = find(args.run, args.root)
    submission = open_submission(target)
    value = status(target, job_of(submission) if submission is not None else None)
    last = target.last_attempt()
    return dataclasses.replace(
        value,
        ranks=ranks(last) if last is not None else [],
        budgets=_budgets(target),
        cut=cut_files(target),
        conclusion=ending(target) if value.state != "waiting" else None,  # its hint would be refused
    )


def _budgets(run: "RunDir") -> "list[Budget]":
    """What the newest submission's attempts have spent."""
    from gemctl.config.compose import from_yaml
    from gemctl.recover.decide import MEANING, History
    from gemctl.report.status import Budget
    from gemctl.run.files import read_log, read_text
    from gemctl.run.submission import newest

    submission, last, source = newest(run), run.last_attempt(), run.configured()
    if last is None or source is None:
        return []
    limits = from_yaml(read_text(source.config), str(source.config)).recover.budgets
    # The supervisor counts an attempt without an end as lost; the last one may still run.
    lines = [
        line for line in read_log(run.supervisor_log) if last.end_file.exists() or line.get("attempt", 0) < last.number
    ]
    history = History(lines, submission.first_attempt if submission is not None else 1)
    spent = [Budget(kind, history.spent[kind], getattr(limits, kind)) for kind in MEANING]
    return [*spent, Budget("no_progress", history.stuck, limits.no_progress)]
