"""`gemctl resume`: resumes a run from its newest verified checkpoint, as a new attempt.

gemctl resume RUN
gemctl resume RUN train.steps=2000 launcher.ranks_per_node=2 --dry-run     # what would be loaded, moved and lost
gemctl resume RUN optim.dense.lr=1e-4 --allow optim.dense.lr
gemctl resume RUN data.train=PATH                                          # the same rows, which were moved
gemctl resume RUN --from-scratch                                           # from step 0: no checkpoint is usable
"""

import argparse
from pathlib import Path
from typing import Any

from gemctl.cluster.software import require
from gemctl.config.compose import compose, from_yaml
from gemctl.config.resuming import changes, check_changes, refuse_choices
from gemctl.errors import InputError
from gemctl.launch.inputs import fingerprint_notes, record, relocated, require_present, with_input_changes
from gemctl.launch.liveness import refuse_running
from gemctl.launch.preflight import preflight
from gemctl.launch.submit import checked_plan, launch
from gemctl.launchers.api import launcher_of
from gemctl.plan.fit import cluster_memory
from gemctl.plan.job import check_data, module_notes
from gemctl.render.show import show
from gemctl.report.report import build
from gemctl.run.access import check_writable
from gemctl.run.attempt import Base
from gemctl.run.directory import RunDir, find
from gemctl.run.files import read_text
from gemctl.run.submission import newest
from gemctl.terminal import note


def run(args: argparse.Namespace) -> Any:
    require()
    target = find(args.run, args.root)
    last, source = target.last_attempt(), _newest_config(target)
    before = from_yaml(read_text(source), str(source))
    refuse_choices(args.changes)
    config = relocated(target, source.parent, before, compose(str(source), args.changes, replace=True))
    require_present(config.data)
    inputs = record(config.data)
    changed = with_input_changes(target, source.parent, before, config, inputs, changes(before, config))
    check_changes(changed, args.allow)
    for line in module_notes(config, target.run_id):
        note(line)
    plan = checked_plan(config, inputs.spec)
    for line in check_data(config.data, cluster_memory(config).host):
        note(line)
    if not args.dry_run:
        check_writable(target.path)
        launcher_of(config.launcher.kind).check_here(config)
        refuse_running(target, last)
    notes = fingerprint_notes(target, source.parent)
    ahead = preflight(target, before, config, inputs.spec, plan, changed, notes, args.from_scratch)
    if args.dry_run:
        return ahead
    if not args.json:
        show(ahead)
    decided = ahead.checkpoint is not None or args.from_scratch
    base = Base(ahead.checkpoint, ahead.step, left_alone=ahead.left_alone) if decided else None
    return launch(target, config, plan, inputs, args.detach, base, last) or build(target)


def _newest_config(run: RunDir) -> Path:
    """The configuration to resume: its newest attempt's, else that of a submission that never started one."""
    attempt, submission = run.configured(), newest(run)
    if attempt is not None:
        return attempt.config
    if submission is None:
        raise InputError(f"{run.run_id}: was never launched, so there is nothing to resume")
    return submission.config
