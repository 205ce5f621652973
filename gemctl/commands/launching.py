"""What `gemctl train` and `gemctl resume` share: from a checked configuration to a run that has ended."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl.commands.configured import planned

if TYPE_CHECKING:
    from gemctl.config.schema import Config, DataConfig
    from gemctl.plan.build import Plan
    from gemctl.run.directory import RunDir


def checked_plan(config: "Config") -> "Plan":
    """The plan of a configuration that can be launched. Raises InputError, DoesNotFit, or GemctlError for builds of
    torch and FBGEMM that do not belong together."""
    from gemctl.cluster import software
    from gemctl.launchers import local
    from gemctl.plan.build import check_fits
    from gemctl.run import inject

    inject.check()
    local.check(config.launcher)
    software.require()
    plan = planned(config)
    check_fits(plan)
    return plan


def launch(run: "RunDir", number: int, config: "Config", plan: "Plan") -> None:
    """Runs attempt `number` of `run`, and more after failures, in the foreground, with its progress on stderr.

    Raises RunFailed with the root cause, or Interrupted with the command that goes on.
    """
    from gemctl.config.compose import to_yaml
    from gemctl.launchers.local import LocalAgents
    from gemctl.plan.build import to_json
    from gemctl.recover.supervisor import Prepared, run_attempts
    from gemctl.render.progress import Progress

    launcher = config.launcher
    config = dataclasses.replace(config, data=_from_anywhere(config.data))
    prepared = Prepared(to_yaml(config), to_json(plan), launcher.nodes, launcher.ranks_per_node)
    agents = LocalAgents(run, launcher)
    with Progress(steps=config.train.steps) as progress:
        run_attempts(run, number, prepared, config.recover, agents, progress)


def _from_anywhere(data: "DataConfig") -> "DataConfig":
    """The same data with absolute paths, so that `resume` and `eval` of the run work from any folder."""

    def absolute(path: str) -> str:
        return path if "://" in path else str(Path(path).absolute())

    return dataclasses.replace(
        data, spec=absolute(data.spec), train=absolute(data.train), eval=data.eval and absolute(data.eval)
    )
