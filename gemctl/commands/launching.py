"""What `gemctl train` and `gemctl resume` share: from a checked configuration and its plan to a run that has ended."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemctl.config.schema import Config
    from gemctl.plan.build import Plan
    from gemctl.recover.supervisor import Follower, RunResult
    from gemctl.run.directory import RunDir


def launch(run: "RunDir", number: int, config: "Config", plan: "Plan", follower: "Follower") -> "RunResult":
    """Runs attempt `number` of `run`, and more after failures, in the foreground.

    Raises RunFailed with the root cause, or Interrupted with the command that goes on.
    """
    from gemctl.config.compose import to_yaml
    from gemctl.launchers.local import LocalAgents
    from gemctl.plan.build import to_json
    from gemctl.recover.supervisor import Prepared, run_attempts

    launcher = config.launcher
    prepared = Prepared(to_yaml(config), to_json(plan), launcher.nodes, launcher.ranks_per_node)
    return run_attempts(run, number, prepared, config.recover, LocalAgents(run, launcher), follower)
