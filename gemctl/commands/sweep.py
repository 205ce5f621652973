"""`gemctl train -m`: one run per combination of values, all of them tasks of one array of the scheduler."""

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path

from gemctl.commands.configured import composed, is_file
from gemctl.config.overrides import expand
from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.launch.inputs import record, write_synthetic
from gemctl.launch.submit import DryRun, check_config, checked_plan, submit
from gemctl.launchers import slurm
from gemctl.launchers.api import request, to_json
from gemctl.plan.build import Plan
from gemctl.plan.job import spec_of
from gemctl.run.access import written_as
from gemctl.run.directory import RunDir, folder_of
from gemctl.run.inputs import Inputs
from gemctl.run.submission import Submission, Sweep, Swept
from gemctl.specs.data import FeatureSpec
from gemctl.terminal import note


@dataclass(frozen=True)
class _Point:
    """One combination of values. `settings`: those that differ between the runs."""

    settings: list[str]
    config: Config
    spec: FeatureSpec
    plan: Plan


def sweep(args: argparse.Namespace) -> Sweep | DryRun:
    """Checks every run before any is created; submits them as one array, or shows it with --dry-run."""
    points = _points(args)
    if args.dry_run:
        return _dry_run(points)
    first = points[0].config
    folder_of(first.run.root, first.run.name, first.run.access)
    slurm.check_here(first)
    for config in (point.config for point in points):
        write_synthetic(config.data)
    inputs = [record(point.config.data, point.spec) for point in points]
    submitted = [_submit(point, own, args) for point, own in zip(points, inputs, strict=True)]
    jobs = slurm.start_array([submission for _, submission in submitted], first)
    return Sweep(
        [Swept(run.run_id, point.settings, job) for (run, _), point, job in zip(submitted, points, jobs, strict=True)]
    )


def _points(args: argparse.Namespace) -> list[_Point]:
    """Every combination, checked and planned. InputError with the problems of all."""
    files = [word for word in args.words if is_file(word)]
    lines = expand([word for word in args.words if word not in files])
    shared = set.intersection(*map(set, lines))
    points, problems, notes = [], [], []
    for line in lines:
        one = copy.copy(args)
        one.words = [*files, *line]
        try:
            config = composed(one)
            notes += check_config(config)
            own, spec = [word for word in line if word not in shared], spec_of(config)
            points.append(_Point(own, config, spec, checked_plan(config, spec)))
        except InputError as error:
            problems += error.problems
    problems = list(dict.fromkeys(problems)) or _misfits([point.config for point in points])
    if problems:
        raise InputError(problems)
    for text in dict.fromkeys(notes):
        note(text)
    return points


def _misfits(configs: list[Config]) -> list[str]:
    """Why the runs cannot be one array."""
    problems = []
    if configs[0].launcher.kind != "slurm":
        problems.append(
            f"-m: launcher.kind={configs[0].launcher.kind}: "
            "a sweep is submitted as a job array, which needs launcher=slurm"
        )
    if any(config.launcher != configs[0].launcher for config in configs):
        problems.append("-m: launcher.* has several values: all tasks of an array request the same nodes")
    if any(config.checkpoint.warm_start is not None for config in configs):
        problems.append("-m: checkpoint.warm_start: start such runs one by one")
    return problems


def _dry_run(points: list[_Point]) -> DryRun:
    config = points[0].config
    folder = Path(config.run.root).absolute() / config.run.name
    paths = [folder / f"RUN_ID_{number}" for number in range(len(points))]
    app = request(paths[0], 1, config.launcher, config.cluster.device)
    script = slurm.array_script(app, config, [path / "submissions" / "1" for path in paths])
    return DryRun(points[0].plan, to_json(app), script, None)


def _submit(point: _Point, inputs: Inputs, args: argparse.Namespace) -> tuple[RunDir, Submission]:
    settings = point.config.run
    run = RunDir.create(settings.root, settings.name, args.command_line, settings.access)
    with written_as(run.path):
        return run, submit(run, point.config, point.plan, inputs, None)
