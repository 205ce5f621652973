"""`gemctl checkpoint`: what a run has saved, whether it is whole, how two checkpoints differ, and copies for others.

gemctl checkpoint list RUN
gemctl checkpoint verify RUN
gemctl checkpoint diff RUN:300 OTHER_RUN
gemctl checkpoint export RUN:300 DIR
gemctl checkpoint prune RUN --unusable --dry-run
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemctl.errors import GemctlError, InputError

if TYPE_CHECKING:
    from gemctl.run.checkpoints import Comparison, Exported, Pruned

HELP = "List, verify, compare, export and prune checkpoints."


def arguments(parser: argparse.ArgumentParser) -> None:
    what = "path of a checkpoint, RUN (its newest) or RUN:step"
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="all checkpoints of a run, newest first")
    listing.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    verifying = actions.add_parser("verify", help="check the files of a checkpoint, or of all that a run has, by hash")
    verifying.add_argument("checkpoint", metavar="PATH|RUN", help="path of a checkpoint, a run, or RUN:step")
    comparing = actions.add_parser("diff", help="compare two checkpoints bit for bit; exit code 1 if they differ")
    comparing.add_argument("a", metavar="A", help=what)
    comparing.add_argument("b", metavar="B", help=what)
    exporting = actions.add_parser("export", help="write the weights, tables too, as safetensors files")
    exporting.add_argument("checkpoint", metavar="CHECKPOINT", help=what)
    exporting.add_argument("target", metavar="DIR", help="folder that is made for the files")
    exporting.add_argument("--optimizer", action="store_true", help="the optimizer state too")
    exporting.add_argument(
        "--file-gb", type=float, default=5.0, metavar="GB", help="GB of a file at most, but for a larger tensor (5)"
    )
    pruning = actions.add_parser("prune", help="delete what no attempt can start from; the run must not be alive")
    pruning.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    pruning.add_argument(
        "--unusable", action="store_true", required=True,
        help="folders that are unfinished, void, damaged, or that this gemctl or this user cannot read",
    )  # fmt: skip
    pruning.add_argument("--dry-run", action="store_true", help="say what would be deleted, and why, and stop")
    for action in (listing, verifying, comparing, exporting, pruning):
        action.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> Any:
    from gemctl.run.checkpoints import list_checkpoints, verify_all

    if args.action == "list":
        return list_checkpoints(args.run, args.root)
    if args.action == "verify":
        return verify_all(args.checkpoint, args.root)
    if args.action == "prune":
        return prune(args.run, args.root, args.dry_run)
    if args.action == "export":
        return export(args.checkpoint, Path(args.target), args.file_gb, args.optimizer, args.root)
    return diff(args.a, args.b, args.root)


def prune(reference: str, root: str, dry_run: bool) -> "Pruned":
    """Deletes the folders of a run that no attempt can start from. InputError if the run is alive."""
    from gemctl.commands.resume import refuse_running
    from gemctl.run.checkpoints import Pruned, delete, unusable
    from gemctl.run.directory import find

    run = find(reference, root)
    refuse_running(run, run.last_attempt())
    found = unusable(run)
    return Pruned(str(run.path), dry_run, found, [] if dry_run else delete(found))


def diff(a: str, b: str, root: str) -> "Comparison":
    """Compares two checkpoints whose files are whole, in a process that may load torch."""
    from gemctl.run.checkpoints import Comparison, Difference

    value = _with_torch("gemctl.checkpoint.diff", *_whole([a, b], root))
    return Comparison(**{**value, "differences": [Difference(**item) for item in value["differences"]]})


def export(checkpoint: str, target: Path, file_gb: float, optimizer: bool, root: str) -> "Exported":
    """Writes a checkpoint whose files are whole to the folder `target`."""
    from gemctl import paths
    from gemctl.run.checkpoints import Exported

    problems = [] if file_gb > 0 else [f"--file-gb {file_gb}: must be above 0"]
    if paths.exists(target):
        problems.append(f"{target}: is there already; an export makes a folder of its own")
    if run := next((folder for folder in target.absolute().parents if paths.is_file(folder / "run.json")), None):
        problems.append(f"{target}: lies in the run {run}, whose folders are the run's own; name another place")
    if problems:
        raise InputError(problems)
    with paths.writing(str(target)):
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
    (folder,) = _whole([checkpoint], root)
    size = max(1, round(file_gb * 1e9))
    extra = ["--optimizer"] if optimizer else []
    return Exported(**_with_torch("gemctl.checkpoint.export", folder, str(target.absolute()), str(size), *extra))


def _whole(references: list[str], root: str) -> list[str]:
    """The folders that are meant. InputError for what is damaged."""
    from gemctl.run.checkpoints import resolve
    from gemctl.run.manifest import verify

    folders = [resolve(reference, root) for reference in references]
    if faults := [fault for folder in folders for fault in verify(folder)]:
        raise InputError(faults)
    return [str(folder) for folder in folders]


def _with_torch(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that a module writes in a process of its own; its problems become this command's."""
    from gemctl.process import run_module

    done = run_module(module, *arguments, capture=True)
    try:
        value: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise GemctlError(f"{module} failed (exit code {done.returncode}):\n{done.stderr.strip()}") from None
    if "error" in value:
        raise InputError(value["error"]) if done.returncode == InputError.exit_code else GemctlError(value["error"][0])
    return value
