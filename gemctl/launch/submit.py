"""Submitting a run: the plan that can be launched, the submission's record, its start."""

import dataclasses
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemctl.config.schema import Config
    from gemctl.plan.build import Plan
    from gemctl.run.attempt import Attempt, Base
    from gemctl.run.directory import RunDir
    from gemctl.run.inputs import Inputs
    from gemctl.run.submission import Detached, Submission
    from gemctl.specs.data import FeatureSpec


def checked_plan(config: "Config", spec: "FeatureSpec") -> "Plan":
    """The plan of a configuration that can be launched. Raises InputError, DoesNotFit, or GemctlError for builds of
    torch and FBGEMM that do not belong together."""
    from gemctl.cluster import software
    from gemctl.launchers.api import launcher_of
    from gemctl.plan.build import build, check_fits
    from gemctl.run import inject
    from gemctl.terminal import note

    inject.check(config.launcher.nodes * config.launcher.ranks_per_node)
    launcher_of(config.launcher.kind).check(config)
    if config.launcher.kind != "slurm" and config.launcher.slurm is not None:
        note(f"launcher.slurm is not used: launcher.kind={config.launcher.kind}")
    software.require()
    plan = build(config, spec)
    check_fits(plan)
    return plan


def submitted(run: "RunDir", config: "Config", plan: "Plan", inputs: "Inputs", base: "Base | None") -> "Submission":
    """Writes down what is asked for, as the run's newest submission. `inputs`: what it reads; `base`: what has been
    verified to start from."""
    from gemctl.config.compose import to_yaml
    from gemctl.launch.inputs import absolute
    from gemctl.launchers.request import request, to_json
    from gemctl.plan.build import to_json as plan_json
    from gemctl.run.manifest import number_after
    from gemctl.run.submission import submit

    config = dataclasses.replace(config, data=absolute(config.data))
    app = request(run.path, number_after(run, run.last_attempt()), config.launcher, config.cluster.device)
    start = dataclasses.asdict(base) if base is not None else None
    facts = {"kind": config.launcher.kind, "app": to_json(app), "base": start}
    return submit(run, to_yaml(config), plan_json(plan), facts, inputs)


def launch(
    run: "RunDir",
    config: "Config",
    plan: "Plan",
    inputs: "Inputs",
    detach: bool,
    base: "Base | None" = None,
    last: "Attempt | None" = None,
) -> "Detached | None":
    """Submits the run and follows it to its end, which is raised unless it is a good one; with `detach`, to its start.

    `last`: the run's last attempt, which the caller knows to be dead.

    Raises as gemctl.launch.supervise.supervise does; GemctlError if it does not start.
    """
    from gemctl.run.access import written_as

    with written_as(run.path):
        return _begin(run, submitted(run, config, plan, inputs, base), config, detach, last)


def _begin(
    run: "RunDir", submission: "Submission", config: "Config", detach: bool, last: "Attempt | None"
) -> "Detached | None":
    from gemctl.launch.follow import Following, wait_for_start
    from gemctl.launch.progress import Progress
    from gemctl.launch.supervise import supervise
    from gemctl.launchers.api import launcher_of

    launcher = launcher_of(config.launcher.kind)
    if launcher.IN_PROCESS and not detach:
        submission.write_process(os.getpid())
        supervise(run, submission, last)
        return None
    launcher.start(run, submission, config)
    if detach:
        return wait_for_start(run, submission, launcher)
    with Progress(steps=config.train.steps) as progress:
        Following(run, submission, launcher, progress).follow()
    return None
