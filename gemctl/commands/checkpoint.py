"""`gemctl checkpoint`: which checkpoints a run has, whether their files are whole, and what two of them differ in.

gemctl checkpoint list RUN
gemctl checkpoint verify RUN
gemctl checkpoint diff RUN:300 OTHER_RUN
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl.errors import GemctlError, InputError

if TYPE_CHECKING:
    from gemctl.run.difference import Comparison
    from gemctl.run.manifest import Checkpoint

HELP = "List, verify and compare checkpoints."


@dataclass(frozen=True)
class Listed:
    """One checkpoint folder. `flaw`: why it does not count. The rest is None without a manifest; `bytes`: all files."""

    name: str
    step: int
    attempt: int
    flaw: str | None
    world: int | None = None
    tensors: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Listing:
    run: str
    checkpoints: list[Listed]


@dataclass(frozen=True)
class Verified:
    """`faults` of each verified checkpoint folder, by path; no faults: its files are whole."""

    faults: dict[str, list[str]]

    @property
    def exit_code(self) -> int:
        """1 if a checkpoint has a fault."""
        return 1 if any(self.faults.values()) else 0


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
    if args.action == "list":
        return list_checkpoints(args.run, args.root)
    if args.action == "verify":
        return verify_all(args.checkpoint, args.root)
    return diff(args.a, args.b, args.root)


def list_checkpoints(reference: str, root: str) -> Listing:
    """Every checkpoint folder of a run, with what its manifest says."""
    from gemctl.run.directory import find
    from gemctl.run.manifest import checkpoints

    found = find(reference, root)
    return Listing(str(found.path), [_listed(checkpoint) for checkpoint in checkpoints(found)])


def _listed(checkpoint: "Checkpoint") -> Listed:
    from gemctl.run.manifest import read

    base = (checkpoint.path.name, checkpoint.step, checkpoint.attempt)
    if not checkpoint.published:
        return Listed(*base, checkpoint.flaw)
    try:
        manifest = read(checkpoint.path)
    except InputError as error:
        return Listed(*base, checkpoint.flaw or str(error))
    size = sum(file.bytes for file in manifest.files.values())
    return Listed(*base, checkpoint.flaw, manifest.facts.world, len(manifest.objects), size)


def verify_all(reference: str, root: str) -> Verified:
    """Faults of one checkpoint, or of all valid ones of a run."""
    from gemctl.run.directory import find
    from gemctl.run.manifest import checkpoints, verify

    if _is_checkpoint(Path(reference)):
        return Verified({reference: verify(Path(reference))})
    found = find(reference, root)
    valid = [checkpoint.path for checkpoint in checkpoints(found) if checkpoint.flaw is None]
    if not valid:
        raise InputError(f"{found.path}: the run has no checkpoint")
    return Verified({str(path): verify(path) for path in valid})


def diff(a: str, b: str, root: str) -> "Comparison":
    """Compares two checkpoints whose files are whole, in a process that may load torch."""
    from gemctl.run.difference import Comparison, Difference
    from gemctl.run.manifest import verify

    folders = [resolve(reference, root) for reference in (a, b)]
    if faults := [fault for folder in folders for fault in verify(folder)]:
        raise InputError(faults)
    command = [sys.executable, "-m", "gemctl.checkpoint.diff", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        value = json.loads(done.stdout)
    except ValueError:
        raise GemctlError(f"comparing failed (exit code {done.returncode}):\n{done.stderr.strip()}") from None
    if "error" in value:
        raise InputError(value["error"])
    return Comparison(**{**value, "differences": [Difference(**item) for item in value["differences"]]})


def resolve(reference: str, root: str) -> Path:
    """The checkpoint folder that a user means by a path, RUN or RUN:step."""
    from gemctl.run.directory import find
    from gemctl.run.manifest import checkpoints

    if _is_checkpoint(Path(reference)):
        return Path(reference)
    name, _, step = reference.rpartition(":")
    if not (name and step.isdigit()):
        name, step = reference, ""
    found = find(name, root)
    valid = [checkpoint for checkpoint in checkpoints(found) if checkpoint.flaw is None]
    for checkpoint in valid:
        if not step or checkpoint.step == int(step):
            return checkpoint.path
    steps = ", ".join(str(checkpoint.step) for checkpoint in valid) or "none"
    raise InputError(f"{reference}: no such checkpoint; the run has those of step {steps}")


def _is_checkpoint(path: Path) -> bool:
    from gemctl.run.manifest import FILE_NAME, FOLDER

    return path.is_dir() and ((path / FILE_NAME).exists() or FOLDER.fullmatch(path.resolve().name) is not None)
