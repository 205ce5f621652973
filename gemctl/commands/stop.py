"""`gemctl stop`: asks a run to save and end; its ranks agree on it at the end of their step.

gemctl stop RUN
"""

import argparse
from typing import TYPE_CHECKING

from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.run.requests import StopFiled

HELP = "Ask a run to save and end."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> "StopFiled":
    from gemctl.run import requests
    from gemctl.run.attempt import watch_beat
    from gemctl.run.directory import find

    target = find(args.run, args.root)
    attempt = target.last_attempt()
    if attempt is None or watch_beat(attempt) is None:
        raise InputError(f"{target.run_id}: does not run, so there is nothing to stop (see gemctl status {args.run})")
    return requests.StopFiled(str(target.path), attempt.number, requests.file(target, "stop").number)
