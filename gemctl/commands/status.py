"""`gemctl status`: one run: who runs it, its attempts and why they ended, where its ranks are, the budgets left.

gemctl status RUN
"""

import argparse
import dataclasses

from gemctl.config.compose import from_yaml
from gemctl.launch.liveness import job_of
from gemctl.recover.decide import MEANING, History
from gemctl.report.status import Budget, RunStatus, open_submission, ranks, status
from gemctl.run.conclusion import ending
from gemctl.run.directory import RunDir, cut_files, find
from gemctl.run.files import read_log, read_text
from gemctl.run.submission import newest


def run(args: argparse.Namespace) -> RunStatus:
    target = find(args.run, args.root)
    submission = open_submission(target)
    value = status(target, job_of(submission) if submission is not None else None)
    last = target.last_attempt()
    return dataclasses.replace(
        value,
        ranks=ranks(last) if last is not None else [],
        budgets=_budgets(target),
        cut=cut_files(target),
        conclusion=ending(target) if value.state != "waiting" else None,  # the command it suggests would be refused
    )


def _budgets(run: RunDir) -> list[Budget]:
    """What the newest submission's attempts have spent."""
    submission, last, source = newest(run), run.last_attempt(), run.configured()
    if last is None or source is None:
        return []
    limits = from_yaml(read_text(source.config), str(source.config)).recover.budgets
    # The supervisor counts an attempt without an end record as lost; the last one may still be running.
    lines = [
        line for line in read_log(run.supervisor_log) if last.end_file.exists() or line.get("attempt", 0) < last.number
    ]
    history = History(lines, submission.first_attempt if submission is not None else 1)
    spent = [Budget(kind, history.spent[kind], getattr(limits, kind)) for kind in MEANING]
    return [*spent, Budget("no_progress", history.stuck, limits.no_progress)]
