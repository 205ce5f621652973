"""`gemctl resume`: goes on with a run from its newest verified checkpoint, as a new attempt.

gemctl resume RUN
gemctl resume RUN train.steps=2000 checkpoint.every=100
"""

import argparse
import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.config.schema import Config
    from gemctl.run.attempt import Attempt
    from gemctl.run.directory import RunDir
    from gemctl.run.report import Report

HELP = "Go on with a run from its newest verified checkpoint."

# What may change; all else is part of what the saved state means, or of the world that it lies on.
FREE = ("train.steps", "train.eval_every", "train.log_every", "checkpoint.", "recover.")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help=f"what changes: {', '.join(FREE)}…")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> "Report":
    from gemctl.cluster.software import require
    from gemctl.commands.launching import checked_plan, launch
    from gemctl.config.compose import compose, from_yaml
    from gemctl.launchers.local import check_gpus
    from gemctl.run.directory import find
    from gemctl.run.report import build

    require()
    target = find(args.run, args.root)
    last, source = target.last_attempt(), target.configured()
    if last is None or source is None:
        raise InputError(f"{target.run_id}: was never launched, so there is nothing to go on with")
    before = from_yaml(source.config.read_text(), str(source.config))
    config = compose(str(source.config), args.changes)
    refuse_changes(before, config)
    refuse_done(target, config)
    plan = checked_plan(config)
    check_gpus(config.cluster, config.launcher)
    refuse_living(target, last)
    launch(target, last.number + 1, config, plan)
    return build(target)


def refuse_changes(before: "Config", after: "Config") -> None:
    """InputError for every key that a resumed run must keep and that differs."""
    old, new = (_flat(dataclasses.asdict(config), "") for config in (before, after))
    changed = [key for key in sorted(old | new) if old.get(key) != new.get(key) and not key.startswith(FREE)]
    free = ", ".join(key + "*" if key.endswith(".") else key for key in FREE)
    problems = [f"{key}: a resumed run keeps {old.get(key)!r}, not {new.get(key)!r}" for key in changed]
    if problems:
        raise InputError([*problems, f"what may change: {free}"])


def refuse_done(run: "RunDir", config: "Config") -> None:
    """InputError if no step is left to do."""
    from gemctl.run.manifest import checkpoints

    newest = next((found for found in checkpoints(run) if found.flaw is None), None)
    if newest is not None and newest.step >= config.train.steps:
        raise InputError(
            f"{run.run_id}: has done {newest.step} of train.steps={config.train.steps}; "
            f"to go on: gemctl resume {run.run_id} train.steps={2 * newest.step}"
        )


def refuse_living(run: "RunDir", attempt: "Attempt") -> None:
    """InputError if the attempt still beats."""
    from gemctl.run.attempt import watch_beat

    if not attempt.end_file.exists():
        sys.stderr.write(f"attempt {attempt.number} left no end; watching up to {attempt.patience:.0f} s for a beat\n")
    if watch_beat(attempt) is not None:
        age = max(0.0, time.time() - attempt.heartbeat.stat().st_mtime)
        raise InputError(
            f"{run.run_id}: attempt {attempt.number} runs on host {attempt.claim().host}, its last beat is {age:.1f} s "
            f"old; to end it: gemctl stop {run.run_id}"
        )


def _flat(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {name: item for key, nested in value.items() for name, item in _flat(nested, f"{path}{key}.").items()}
    return {path.removesuffix("."): value}
