"""`gemctl checkpoint`: which checkpoints a run has, whether their files are whole, and what two of them differ in.

gemctl checkpoint list RUN
gemctl checkpoint verify RUN
gemctl checkpoint diff RUN:300 OTHER_RUN
"""

import argparse
import json
from typing import TYPE_CHECKING

from gemctl.errors import GemctlError, InputError

if TYPE_CHECKING:
    from gemctl.run.checkpoints import Comparison, Listing, Verified

HELP = "List, verify and compare checkpoints."


def arguments(parser: argparse.ArgumentParser) -> None:
    what = "path of a checkpoint, RUN (its newest) or RUN:step"
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="all checkpoints of a run, newest first")
    listing.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    verifying = actions.add_parser("verify", help="check the files of a checkpoint, or of all that a run has, by hash")
    verifying.add_argument("checkpoint", metavar="PATH|RUN", help="path of a checkpoint, or a run")
    comparing = actions.add_parser("diff", help="compare two checkpoints bit for bit; exit code 1 if they differ")
    comparing.add_argument("a", metavar="A", help=what)
    comparing.add_argument("b", metavar="B", help=what)
    for action in (listing, verifying, comparing):
        action.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> "Listing | Verified | Comparison":
    from gemctl.run.checkpoints import list_checkpoints, verify_all

    if args.action == "list":
        return list_checkpoints(args.run, args.root)
    if args.action == "verify":
        return verify_all(args.checkpoint, args.root)
    return diff(args.a, args.b, args.root)


def diff(a: str, b: str, root: str) -> "Comparison":
    """Compares two checkpoints whose files are whole, in a process that may load torch."""
    from gemctl.run.checkpoints import Comparison, Difference, resolve
    from gemctl.run.manifest import verify
    from gemctl.run.process import run_module

    folders = [resolve(reference, root) for reference in (a, b)]
    if faults := [fault for folder in folders for fault in verify(folder)]:
        raise InputError(faults)
    done = run_module("gemctl.checkpoint.diff", *map(str, folders), capture=True)
    try:
        value = json.loads(done.stdout)
    except ValueError:
        raise GemctlError(f"comparing failed (exit code {done.returncode}):\n{done.stderr.strip()}") from None
    if "error" in value:
        raise InputError(value["error"])
    return Comparison(**{**value, "differences": [Difference(**item) for item in value["differences"]]})
