"""`gemctl train -m`: one run for each combination of values, all of them tasks of one array of the scheduler."""

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl.commands.configured import check_all, composed, is_file, make_data, spec_of
from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.config.schema import Config
    from gemctl.launchers.dry_run import DryRun
    from gemctl.plan.build import Plan
    from gemctl.run.directory import RunDir
    from gemctl.run.inputs import Inputs
    from gemctl.run.submission import Submission, Sweep
    from gemctl.specs.data import FeatureSpec


@dataclass(frozen=True)
class _Point:
    """A combination of values: its settings that not all runs have, and what they come to."""

    settings: list[str]
    config: "Config"
    spec: "FeatureSpec"
    plan: "Plan"


def sweep(args: argparse.Namespace) -> "Sweep | DryRun":
    """Checks every run before any is made; submits them as one array, or shows it with --dry-run."""
    points = _points(args)
    if args.dry_run:
        return _dry_run(points)
    from gemctl.launch.inputs import taken
    from gemctl.launchers import slurm
    from gemctl.run.directory import folder_of
    from gemctl.run.submission import Sweep, Swept

    first = points[0].config
    folder_of(first.run.root, first.run.name, first.run.access)
    slurm.check_here(first)
    for config in (point.config for point in points):
        make_data(config.data)
    inputs = [taken(point.config.data, point.spec) for point in points]
    made = [_submitted(point, read, args) for point, read in zip(points, inputs, strict=True)]
    jobs = slurm.start_array([submission for _, submission in made], first)
    return Sweep(
        [Swept(run.run_id, point.settings, job) for (run, _), point, job in zip(made, points, jobs, strict=True)]
    )


def _points(args: argparse.Namespace) -> list[_Point]:
    """Every combination, checked and planned. InputError with the problems of all."""
    from gemctl.config.sweep import expand
    from gemctl.launch.submit import checked_plan

    files = [word for word in args.words if is_file(word)]
    lines = expand([word for word in args.words if word not in files])
    shared = set.intersection(*map(set, lines))
    points, problems = [], []
    for line in lines:
        one = copy.copy(args)
        one.words = [*files, *line]
        try:
            config = composed(one)
            check_all(config)
            own, spec = [word for word in line if word not in shared], spec_of(config)
            points.append(_Point(own, config, spec, checked_plan(config, spec)))
        except InputError as error:
            problems += error.problems
    problems = list(dict.fromkeys(problems)) or _misfits([point.config for point in points])
    if problems:
        raise InputError(problems)
    return points


def _misfits(configs: "list[Config]") -> list[str]:
    """Why the runs cannot be one array."""
    problems = []
    if configs[0].launcher.kind != "slurm":
        problems.append(f"-m: launcher.kind={configs[0].launcher.kind}: a sweep is an array of launcher=slurm")
    if any(config.launcher != configs[0].launcher for config in configs):
        problems.append("-m: launcher.* has several values: all tasks of an array ask for the same nodes")
    if any(config.checkpoint.warm_start is not None for config in configs):
        problems.append("-m: checkpoint.warm_start: start such runs one by one")
    return problems


def _dry_run(points: list[_Point]) -> "DryRun":
    from gemctl.launchers import slurm
    from gemctl.launchers.dry_run import DryRun
    from gemctl.launchers.request import request, to_json

    config = points[0].config
    folder = Path(config.run.root).absolute() / config.run.name
    paths = [folder / f"RUN_ID_{number}" for number in range(len(points))]
    app = request(paths[0], 1, config.launcher, config.cluster.device)
    form = slurm.array_form(app, config, [path / "submissions" / "1" for path in paths])
    return DryRun(points[0].plan, to_json(app), form, None)


def _submitted(point: _Point, inputs: "Inputs", args: argparse.Namespace) -> "tuple[RunDir, Submission]":
    from gemctl.launch.submit import submitted
    from gemctl.run.access import written_as
    from gemctl.run.directory import RunDir

    asked = point.config.run
    run = RunDir.create(asked.root, asked.name, args.command_line, asked.access)
    with written_as(run.path):
        return run, submitted(run, point.config, point.plan, inputs, None)
