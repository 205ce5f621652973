"""Submitting a run: its configuration is checked and planned, recorded as a submission, and started.

for line in check_config(config): note(line)
plan = checked_plan(config, spec)
launch(run, config, plan, inputs, detach=False)
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemctl import failpoints
from gemctl.cluster import software
from gemctl.config.compose import to_yaml
from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.launch.follow import Follower, wait_for_start
from gemctl.launch.inputs import absolute_paths
from gemctl.launch.progress import Progress
from gemctl.launch.supervise import supervise
from gemctl.launchers.api import launcher_of, request, to_json
from gemctl.plan import job
from gemctl.plan.build import Plan, build, check_fits
from gemctl.plan.build import to_json as plan_json
from gemctl.run.access import written_as
from gemctl.run.attempt import Attempt, Base
from gemctl.run.directory import RunDir
from gemctl.run.inputs import Inputs
from gemctl.run.manifest import number_after
from gemctl.run.submission import Detached, Submission
from gemctl.run.submission import submit as write_submission
from gemctl.run.warm_start import WarmStart
from gemctl.specs.data import FeatureSpec
from gemctl.terminal import note


@dataclass
class DryRun:
    """`plan` and launch `request` of a first submission; `form`: the batch script, if the launcher has one;
    `warm_start`: the checkpoint that the run would start from."""

    plan: Plan
    request: dict[str, Any]
    form: str | None
    warm_start: WarmStart | None


def check_config(config: Config) -> list[str]:
    """Notes on the data of a configuration that can be launched.

    Raises InputError with every problem of launcher, topology, model, feature spec, tables and data.
    """
    problems: list[str] = []
    try:
        launcher_of(config.launcher.kind).check(config)
    except InputError as error:
        problems += error.problems
    try:
        notes = job.check(config)
    except InputError as error:
        raise InputError(problems + error.problems) from error
    if problems:
        raise InputError(problems)
    return notes


def checked_plan(config: Config, spec: FeatureSpec) -> Plan:
    """The plan of a configuration that can be launched. Raises InputError, DoesNotFit, or GemctlError for builds of
    torch and FBGEMM that do not belong together."""
    failpoints.check(config.launcher.nodes * config.launcher.ranks_per_node)
    launcher_of(config.launcher.kind).check(config)
    if config.launcher.kind != "slurm" and config.launcher.slurm is not None:
        note(f"launcher.slurm is ignored: launcher.kind={config.launcher.kind}")
    software.require()
    plan = build(config, spec)
    check_fits(plan)
    return plan


def dry_run(config: Config, plan: Plan, warm: WarmStart | None) -> DryRun:
    """What `launch` would submit for a new run."""
    run_path = Path(config.run.root).absolute() / config.run.name / "RUN_ID"
    app = request(run_path, 1, config.launcher, config.cluster.device)
    script = launcher_of(config.launcher.kind).script(app, config, run_path / "submissions" / "1")
    return DryRun(plan, to_json(app), script, warm)


def submit(run: RunDir, config: Config, plan: Plan, inputs: Inputs, base: Base | None) -> Submission:
    """Writes the run's newest submission. `base`: the verified checkpoint to start from."""
    config = dataclasses.replace(config, data=absolute_paths(config.data))
    app = request(run.path, number_after(run, run.last_attempt()), config.launcher, config.cluster.device)
    start = dataclasses.asdict(base) if base is not None else None
    facts = {"kind": config.launcher.kind, "app": to_json(app), "base": start}
    return write_submission(run, to_yaml(config), plan_json(plan), facts, inputs)


def launch(
    run: RunDir,
    config: Config,
    plan: Plan,
    inputs: Inputs,
    detach: bool,
    base: Base | None = None,
    last: Attempt | None = None,
) -> Detached | None:
    """Submits the run and follows it to its end or, with `detach`, to its start. Raises if it ends badly.

    `last`: the run's last attempt, which the caller knows to be dead.

    Raises as gemctl.launch.supervise.supervise does; GemctlError if it does not start.
    """
    with written_as(run.path):
        submission = submit(run, config, plan, inputs, base)
        launcher = launcher_of(config.launcher.kind)
        if launcher.IN_PROCESS and not detach:
            submission.write_process(os.getpid())
            supervise(run, submission, last)
            return None
        launcher.start(run, submission, config)
        if detach:
            return wait_for_start(run, submission, launcher)
        with Progress(steps=config.train.steps) as progress:
            Follower(run, submission, launcher, progress).follow()
        return None
