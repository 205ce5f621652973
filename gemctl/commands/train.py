"""`gemctl train`: compose, check, plan, show the plan, launch, and follow the run to its end.

gemctl train                                        # the synthetic job on four ranks of this machine
gemctl train experiment=ml100k optim.dense.lr=0.002
gemctl train my.yaml train.steps=50 --dry-run       # what would be launched
gemctl train -m launcher=slurm run.seed=1,2,3,4     # four runs, one array
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemctl.commands.configured import (
    add_configuration,
    add_detach,
    check_all,
    composed,
    make_data,
    spec_of,
)

if TYPE_CHECKING:
    from gemctl.config.schema import Config
    from gemctl.launchers.dry_run import DryRun
    from gemctl.plan.build import Plan
    from gemctl.report.report import Report
    from gemctl.run.submission import Detached
    from gemctl.run.warm_start import WarmStart
    from gemctl.specs.data import FeatureSpec

HELP = "Train a model as the configuration says."


def arguments(parser: argparse.ArgumentParser) -> None:
    add_configuration(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--cfg", action="store_true", help="print the composed configuration and start nothing")
    instead.add_argument("--dry-run", action="store_true", help="print plan and launch request and start nothing")
    add_detach(instead)
    parser.add_argument(
        "-m", "--multirun", action="store_true",
        help="KEY=A,B,…: a run for each combination of values, submitted as one array (launcher=slurm)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> Any:
    from gemctl.launch.submit import checked_plan

    if args.multirun:
        from gemctl.commands.sweep import sweep

        return sweep(args)
    config = composed(args)
    if args.cfg:
        return config
    check_all(config)
    spec = spec_of(config)
    plan = checked_plan(config, spec)
    warm = _warm_start(config, spec)
    return _dry_run(config, plan, warm) if args.dry_run else _train(config, spec, plan, warm, args)


def _warm_start(config: "Config", spec: "FeatureSpec") -> "WarmStart | None":
    """What the run begins with; `config` names the checkpoint's folder from then on."""
    if config.checkpoint.warm_start is None:
        return None
    from gemctl.plan.state import saved_state
    from gemctl.run.warm_start import find_source, match

    warm = config.checkpoint.warm_start
    folder = find_source(warm, config.run.root)
    warm.source = str(folder)
    return match(warm, folder, saved_state(config, spec))


def _dry_run(config: "Config", plan: "Plan", warm: "WarmStart | None") -> "DryRun":
    from gemctl.launchers.api import launcher_of
    from gemctl.launchers.dry_run import DryRun
    from gemctl.launchers.request import request, to_json

    run_path = Path(config.run.root).absolute() / config.run.name / "RUN_ID"
    app = request(run_path, 1, config.launcher, config.cluster.device)
    form = launcher_of(config.launcher.kind).form(app, config, run_path / "submissions" / "1")
    return DryRun(plan, to_json(app), form, warm)


def _train(
    config: "Config", spec: "FeatureSpec", plan: "Plan", warm: "WarmStart | None", args: argparse.Namespace
) -> "Report | Detached":
    from gemctl.launch.inputs import taken
    from gemctl.launch.submit import launch
    from gemctl.launchers.api import launcher_of
    from gemctl.render.show import show
    from gemctl.report.report import build
    from gemctl.run.directory import RunDir, folder_of

    folder_of(config.run.root, config.run.name, config.run.access)  # where nothing can be written, nothing begins
    launcher_of(config.launcher.kind).check_here(config)
    for value in filter(None, [plan, warm]):
        if not args.json:
            show(value)
    make_data(config.data)
    inputs = taken(config.data, spec)
    run = RunDir.create(config.run.root, config.run.name, args.command_line, config.run.access)
    return launch(run, config, plan, inputs, args.detach) or build(run)
