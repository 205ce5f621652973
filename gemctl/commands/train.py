"""`gemctl train`: compose, check, plan, show the plan, launch, and follow the run to its end.

gemctl train                                        # the synthetic job on four ranks of this machine
gemctl train experiment=ml100k optim.dense.lr=0.002
gemctl train my.yaml train.steps=50 --dry-run       # what would be launched
gemctl train -m launcher=slurm run.seed=1,2,3,4     # four runs, one array
"""

import argparse
from typing import Any

from gemctl.commands.configured import composed
from gemctl.commands.sweep import sweep
from gemctl.config.schema import Config
from gemctl.launch.inputs import record, write_synthetic
from gemctl.launch.submit import check_config, checked_plan, dry_run, launch
from gemctl.launchers.api import launcher_of
from gemctl.plan.build import Plan
from gemctl.plan.job import spec_of
from gemctl.plan.state import saved_state
from gemctl.render.show import show
from gemctl.report.report import Report, build
from gemctl.run.directory import RunDir, folder_of
from gemctl.run.submission import Detached
from gemctl.run.warm_start import WarmStart, find_source, match
from gemctl.specs.data import FeatureSpec
from gemctl.terminal import note


def run(args: argparse.Namespace) -> Any:
    if args.multirun:
        return sweep(args)
    config = composed(args)
    if args.cfg:
        return config
    for line in check_config(config):
        note(line)
    spec = spec_of(config)
    plan = checked_plan(config, spec)
    warm = _warm_start(config, spec)
    return dry_run(config, plan, warm) if args.dry_run else _train(config, spec, plan, warm, args)


def _warm_start(config: Config, spec: FeatureSpec) -> WarmStart | None:
    """What the run starts from; makes `config` name the checkpoint's folder."""
    warm = config.checkpoint.warm_start
    if warm is None:
        return None
    folder = find_source(warm, config.run.root)
    warm.source = str(folder)
    return match(warm, folder, saved_state(config, spec))


def _train(
    config: Config, spec: FeatureSpec, plan: Plan, warm: WarmStart | None, args: argparse.Namespace
) -> Report | Detached:
    folder_of(config.run.root, config.run.name, config.run.access)  # stops here if it is not writable
    launcher_of(config.launcher.kind).check_here(config)
    for value in filter(None, [plan, warm]):
        if not args.json:
            show(value)
    write_synthetic(config.data)
    inputs = record(config.data, spec)
    run = RunDir.create(config.run.root, config.run.name, args.command_line, config.run.access)
    return launch(run, config, plan, inputs, args.detach) or build(run)
