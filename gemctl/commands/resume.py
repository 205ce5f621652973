"""`gemctl resume`: goes on with a run from its newest verified checkpoint, as a new attempt.

gemctl resume RUN
gemctl resume RUN train.steps=2000 launcher.ranks_per_node=2 --dry-run     # what would be loaded, moved and lost
gemctl resume RUN optim.dense.lr=1e-4 --allow optim.dense.lr
"""

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.run.attempt import Attempt
    from gemctl.run.directory import RunDir

HELP = "Go on with a run from its newest verified checkpoint, on the same or another number of ranks."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="what changes; docs/reference.md says which keys may"
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="KEY", help="change this key although it changes the curve"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be loaded, moved and lost, and stop")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> Any:
    from gemctl.cluster.software import require
    from gemctl.commands.launching import checked_plan, launch
    from gemctl.config.compose import compose, from_yaml
    from gemctl.config.resuming import changes, check_changes
    from gemctl.launchers.local import check_gpus
    from gemctl.render.show import show
    from gemctl.run.directory import find
    from gemctl.run.preflight import preflight
    from gemctl.run.report import build
    from gemctl.specs import feature_spec

    require()
    target = find(args.run, args.root)
    last, source = target.last_attempt(), target.configured()
    if last is None or source is None:
        raise InputError(f"{target.run_id}: was never launched, so there is nothing to go on with")
    before = from_yaml(source.config.read_text(), str(source.config))
    config = compose(str(source.config), args.changes)
    found = changes(before, config)
    check_changes(found, args.allow)
    plan = checked_plan(config)
    if not args.dry_run:
        check_gpus(config.cluster, config.launcher)
        refuse_living(target, last)
    ahead = preflight(target, before, config, feature_spec.load(config.data.spec), plan, found)
    if args.dry_run:
        return ahead
    if not args.json:
        show(ahead)
    launch(target, last.number + 1, config, plan)
    return build(target)


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
