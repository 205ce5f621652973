"""`gemctl doctor`: whether this machine and what is installed on it can run gemctl, and what to do where not.

    gemctl doctor --json

Exit code 1 if a check fails; a warning does not fail.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemctl.cluster.checks import Doctor

HELP = "Check this machine and what is installed on it."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> "Doctor":
    from gemctl.cluster.checks import check_machine

    return check_machine(Path(args.root))
