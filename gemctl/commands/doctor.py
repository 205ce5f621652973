"""`gemctl doctor`: whether this machine and what is installed on it can run gemctl, and what to do if not.

    gemctl doctor --json

With --node it checks whether a node of a cluster can serve a run; a launcher runs it on every node before it starts
agents. Exit code 1 if a check fails; a warning does not fail.
"""

import argparse
from pathlib import Path

from gemctl import paths
from gemctl.cluster.checks import Doctor, check_machine
from gemctl.cluster.node import check_node
from gemctl.run.access import written_as


def run(args: argparse.Namespace) -> Doctor:
    if args.node is None:
        return check_machine(Path(args.root))
    with paths.writing(f"--node {args.node}"), written_as(Path(args.node)):
        return Doctor(check_node(Path(args.node), args.memory, args.gpus).checks)
