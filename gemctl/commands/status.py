"""`gemctl status`: all runs below a folder, or one of them.

gemctl status
gemctl status RUN
"""

import argparse
from typing import TYPE_CHECKING

from gemctl import paths
from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.run.status import RunList, RunStatus

HELP = "Say what a run is doing."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="path of a run, its id or a unique prefix; default: all")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> "RunList | RunStatus":
    from gemctl.run.directory import find
    from gemctl.run.status import run_list, status

    if args.run is not None:
        return status(find(args.run, args.root))
    if not paths.is_dir(args.root):
        raise InputError(f"--root {args.root}: no such folder, so no run is there")
    return run_list(args.root)
