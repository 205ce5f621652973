"""`gemctl resume`: goes on with a run from its newest verified checkpoint, as a new attempt.

gemctl resume RUN
gemctl resume RUN train.steps=2000 launcher.ranks_per_node=2 --dry-run     # what would be loaded, moved and lost
gemctl resume RUN optim.dense.lr=1e-4 --allow optim.dense.lr
"""

import argparse
from typing import Any

from gemctl.commands.configured import add_detach
from gemctl.errors import InputError

HELP = "Go on with a run from its newest verified checkpoint, on the same or another number of ranks."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="what changes; docs/reference.md says which keys may"
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="KEY", help="change this key although it changes the curve"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="print what would be loaded, moved and lost, and stop")
    add_detach(instead)
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> Any:
    from gemctl.cluster.software import require
    from gemctl.commands.launching import checked_plan, launch, launcher_of
    from gemctl.commands.supervise import refuse_living
    from gemctl.config.compose import compose, from_yaml
    from gemctl.config.resuming import changes, check_changes
    from gemctl.render.show import show
    from gemctl.run.attempt import Base
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
        launcher_of(config.launcher.kind).check_here(config)
        refuse_living(target, last)
    ahead = preflight(target, before, config, feature_spec.load(config.data.spec), plan, found)
    if args.dry_run:
        return ahead
    if not args.json:
        show(ahead)
    base = Base(ahead.checkpoint, ahead.step) if ahead.checkpoint is not None else None
    return launch(target, config, plan, args.detach, base) or build(target)
