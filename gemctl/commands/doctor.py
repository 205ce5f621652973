"""`gemctl doctor`: whether this machine and what is installed on it can run gemctl, and what to do where not.

    gemctl doctor --json

With --node it asks whether a node of a cluster can serve a run; a launcher asks every node so before it starts agents.
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
    parser.add_argument(
        "--node", metavar="DIR", help="check instead that this node can serve a run; DIR, in the run, gets the report"
    )
    parser.add_argument("--memory", type=int, default=0, metavar="BYTES", help="with --node: memory that must be free")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="with --node: GPUs that must be there")


def run(args: argparse.Namespace) -> "Doctor":
    from gemctl.cluster.checks import Doctor, check_machine

    if args.node is not None:
        from gemctl import paths
        from gemctl.cluster.node import check_node
        from gemctl.run.access import written_as

        with paths.writing(f"--node {args.node}"), written_as(Path(args.node)):
            return Doctor(check_node(Path(args.node), args.memory, args.gpus).checks)
    return check_machine(Path(args.root))
