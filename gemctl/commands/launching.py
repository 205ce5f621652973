"""What `train`, `resume` and `supervise` share: launchers, plans that can be launched, submissions.

A launcher is a module of launchers/ with the functions of `Launcher`; launcher.kind picks it.
"""

import dataclasses
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from gemctl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchx.specs import AppDef

    from gemctl.config.schema import Config
    from gemctl.plan.build import Plan
    from gemctl.recover.supervisor import Agents
    from gemctl.run.attempt import Attempt, Base
    from gemctl.run.directory import RunDir
    from gemctl.run.inputs import Inputs
    from gemctl.run.submission import Detached, Job, Submission
    from gemctl.specs.data import FeatureSpec

LAUNCHERS = {"local": "gemctl.launchers.local", "slurm": "gemctl.launchers.slurm"}


class Launcher(Protocol):
    """What a module of launchers/ offers. Every call of a scheduler's client ends after a time-out."""

    IN_PROCESS: bool  # the supervisor of a run in the foreground is the command's own process

    def check(self, config: "Config") -> None:
        """InputError for what it cannot launch anywhere."""

    def check_here(self, config: "Config") -> None:
        """InputError where this machine, now, cannot launch it."""

    def form(self, app: "AppDef", config: "Config", submission: Path) -> str | None:
        """The scheduler's own form of the request, which the folder `submission` will hold; None if it has none."""

    def start(self, run: "RunDir", submission: "Submission", config: "Config") -> None:
        """Has `gemctl supervise` started for the submission, apart from this process, and writes submitted.json."""

    def jobs(self, submissions: "Sequence[Submission]") -> "list[Job | None]":
        """What became of what `start` started for each, by one question to a scheduler; None where nothing was."""

    def cancel(self, submission: "Submission") -> None:
        """Takes a job that waits out of its queue."""

    def bring_back(self, config: "Config", why: "Literal['due', 'lost', 'told']") -> bool:
        """Has the scheduler start this process, the supervisor, again in another job: as the time is up (`due`), as it
        has lost hosts, or, where it was told to end, if its hosts are taken away just now. False if it does not."""

    def takes_over(self, submission: "Submission") -> bool:
        """True where the scheduler has started this process in place of an earlier supervisor of the submission, which
        it has ended: an attempt that still beats is out of its reach, and not to be waited for."""

    def agents(self, run: "RunDir", config: "Config") -> "Agents":
        """What starts the agents of the run's attempts, in the supervisor's process."""


def launcher_of(kind: str) -> Launcher:
    """The launcher of a launcher.kind. InputError for one that this gemctl does not have."""
    if kind not in LAUNCHERS:
        raise InputError(f"launcher.kind={kind}: unknown to this gemctl (it has {', '.join(LAUNCHERS)})")
    return cast("Launcher", importlib.import_module(LAUNCHERS[kind]))


def checked_plan(config: "Config", spec: "FeatureSpec") -> "Plan":
    """The plan of a configuration that can be launched. Raises InputError, DoesNotFit, or GemctlError for builds of
    torch and FBGEMM that do not belong together."""
    from gemctl.cluster import software
    from gemctl.plan.build import build, check_fits
    from gemctl.render.show import note
    from gemctl.run import inject

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
    from gemctl.commands.inputs import absolute
    from gemctl.config.compose import to_yaml
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

    Raises as gemctl.commands.supervise.supervise does; GemctlError if it does not start.
    """
    from gemctl.run.access import written_as

    with written_as(run.path):
        return _begin(run, submitted(run, config, plan, inputs, base), config, detach, last)


def _begin(
    run: "RunDir", submission: "Submission", config: "Config", detach: bool, last: "Attempt | None"
) -> "Detached | None":
    from gemctl.commands.following import Following, wait_for_start
    from gemctl.commands.supervise import supervise
    from gemctl.render.progress import Progress

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
