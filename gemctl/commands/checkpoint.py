"""`gemctl checkpoint`: what a run has saved, whether it is intact, how two checkpoints differ, and exports.

gemctl checkpoint list RUN
gemctl checkpoint verify RUN
gemctl checkpoint diff RUN:300 OTHER_RUN
gemctl checkpoint export RUN:300 DIR
gemctl checkpoint prune RUN --unusable --dry-run
"""

import argparse
import errno
import os
from pathlib import Path
from typing import Any

from gemctl import paths, torch_call
from gemctl.errors import InputError
from gemctl.launch.liveness import refuse_running
from gemctl.run.checkpoints import (
    Comparison,
    Exported,
    Pruned,
    delete,
    list_checkpoints,
    resolve,
    unusable,
    verify_all,
)
from gemctl.run.directory import find
from gemctl.run.manifest import verify


def run(args: argparse.Namespace) -> Any:
    match args.action:
        case "list":
            return list_checkpoints(args.run, args.root)
        case "verify":
            return verify_all(args.checkpoint, args.root)
        case "prune":
            return prune(args.run, args.root, args.dry_run)
        case "export":
            return export(args.checkpoint, Path(args.target), args.file_gb, args.optimizer, args.root)
        case _:
            return diff(args.a, args.b, args.root)


def prune(reference: str, root: str, dry_run: bool) -> Pruned:
    """Deletes the folders of a run that no attempt can start from. InputError if the run is running."""
    run = find(reference, root)
    refuse_running(run, run.last_attempt())
    found = unusable(run)
    return Pruned(str(run.path), dry_run, found, [] if dry_run else delete(found))


def diff(a: str, b: str, root: str) -> Comparison:
    """Compares two checkpoints whose files are intact."""
    first, second = _intact([a, b], root)
    return torch_call.call("gemctl.checkpoint.diff:compare", Comparison, a=first, b=second)


def export(checkpoint: str, target: Path, file_gb: float, optimizer: bool, root: str) -> Exported:
    """Writes a checkpoint whose files are intact to the folder `target`."""
    problems = [] if file_gb > 0 else [f"--file-gb {file_gb}: must be above 0"]
    if paths.exists(target):
        problems.append(f"{target}: exists already; an export creates a folder of its own")
    if run := next((folder for folder in target.absolute().parents if paths.is_file(folder / "run.json")), None):
        problems.append(f"{target}: is inside the run {run}, whose folders are managed by gemctl; name another place")
    if problems:
        raise InputError(problems)
    with paths.writing(str(target)):
        parent = target.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    (folder,) = _intact([checkpoint], root)
    return torch_call.call(
        "gemctl.checkpoint.export:export",
        Exported,
        checkpoint=folder,
        target=target.absolute(),
        largest=max(1, round(file_gb * 1e9)),
        optimizer=optimizer,
    )


def _intact(references: list[str], root: str) -> list[Path]:
    """The folders of the checkpoints. InputError if files are damaged."""
    folders = [resolve(reference, root) for reference in references]
    if faults := [fault for folder in folders for fault in verify(folder)]:
        raise InputError(faults)
    return folders
