"""`gemctl resume`: goes on with a run from its newest verified checkpoint, as a new attempt.

gemctl resume RUN
gemctl resume RUN train.steps=2000 launcher.ranks_per_node=2 --dry-run     # what would be loaded, moved and lost
gemctl resume RUN optim.dense.lr=1e-4 --allow optim.dense.lr
gemctl resume RUN data.train=PATH                                          # the same rows, which were moved
gemctl resume RUN --from-scratch                                           # from step 0: no checkpoint can be used
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemctl.commands.configured import add_detach
from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.run.attempt import Attempt
    from gemctl.run.directory import RunDir

HELP = "Go on with a run from its newest verified checkpoint, on the same or another number of ranks."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="KEY=VALUE | GROUP=CHOICE",
        help="what changes; docs/reference.md says which keys may",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="KEY",
        help="change this key, or go on although its files have changed, even if that changes the curve",
    )
    parser.add_argument(
        "--from-scratch", action="store_true", help="start again from step 0; checkpoints that are there are kept"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="print what would be loaded, moved and lost, and stop")
    add_detach(instead)
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> Any:
    from gemctl.cluster.software import require
    from gemctl.commands.configured import check_data, host_memory, note_modules
    from gemctl.config.compose import compose, from_yaml
    from gemctl.config.resuming import changes, check_changes, refuse_choices
    from gemctl.launch.inputs import compared, noted, placed, refuse_gone, taken
    from gemctl.launch.preflight import preflight
    from gemctl.launch.submit import checked_plan, launch
    from gemctl.launchers.api import launcher_of
    from gemctl.render.show import show
    from gemctl.report.report import build
    from gemctl.run.access import check_writable
    from gemctl.run.attempt import Base
    from gemctl.run.directory import find
    from gemctl.run.files import read_text

    require()
    target = find(args.run, args.root)
    last, source = target.last_attempt(), _asked_for(target)
    before = from_yaml(read_text(source), str(source))
    refuse_choices(args.changes)
    config = placed(target, source.parent, before, compose(str(source), args.changes, replace=True))
    refuse_gone(config.data)
    inputs = taken(config.data)
    found = compared(target, source.parent, before, config, inputs, changes(before, config))
    check_changes(found, args.allow)
    note_modules(config, target)
    plan = checked_plan(config, inputs.spec)
    check_data(config.data, host_memory(config))
    if not args.dry_run:
        check_writable(target.path)
        launcher_of(config.launcher.kind).check_here(config)
        refuse_running(target, last)
    notes = noted(target, source.parent)
    ahead = preflight(target, before, config, inputs.spec, plan, found, notes, args.from_scratch)
    if args.dry_run:
        return ahead
    if not args.json:
        show(ahead)
    told = ahead.checkpoint is not None or args.from_scratch
    base = Base(ahead.checkpoint, ahead.step, left_alone=ahead.left_alone) if told else None
    return launch(target, config, plan, inputs, args.detach, base, last) or build(target)


def _asked_for(run: "RunDir") -> Path:
    """The configuration that the run goes on with: its newest attempt's, else what was submitted and never began."""
    from gemctl.run.submission import newest

    attempt, submission = run.configured(), newest(run)
    if attempt is not None:
        return attempt.config
    if submission is None:
        raise InputError(f"{run.run_id}: was never launched, so there is nothing to go on with")
    return submission.config


def refuse_running(run: "RunDir", last: "Attempt | None") -> None:
    """InputError if the run's last attempt beats, or a job waits or has begun that will make one."""
    from gemctl.launch.follow import comes_up, job_of, own_attempt
    from gemctl.launch.supervise import refuse_living
    from gemctl.report.status import open_submission
    from gemctl.run.conclusion import reference

    if last is not None:
        refuse_living(run, last)
    submission = open_submission(run)
    job = job_of(submission) if submission is not None else None
    own = own_attempt(run, submission)
    begins = job is not None and job.state == "running" and (own is None or comes_up(own))
    if job is not None and (begins or job.state == "waiting"):
        raise InputError(f"{run.run_id}: was submitted and has not ended: {job.detail}; gemctl stop {reference(run)}")
