"""What `gemctl checkpoint` shows and does: lists, verifies, compares, exports and prunes checkpoints.

gemctl checkpoint list RUN
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from gemctl.errors import InputError
from gemctl.run.directory import RunDir, find
from gemctl.run.files import entries
from gemctl.run.manifest import (
    DELETED,
    FILE_NAME,
    FOLDER,
    Checkpoint,
    check_size,
    checkpoints,
    read,
    verify,
)


@dataclass(frozen=True)
class Listed:
    """One checkpoint folder. `flaw`: why it does not count. `step`, `attempt`: from its manifest, which may differ from
    the folder's `name` if it was moved. The rest is None without a manifest; `bytes`: of all files."""

    name: str
    step: int
    attempt: int
    flaw: str | None
    world: int | None = None
    tensors: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Listing:
    """A run's checkpoints, newest first, and the folders that do not count."""

    run: str
    checkpoints: list[Listed]
    others: list[Listed]


@dataclass(frozen=True)
class Exported:
    """What `gemctl checkpoint export` wrote to the folder `target`. `bytes`: of all tensors."""

    checkpoint: str
    step: int
    target: str
    files: list[str]
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Unusable:
    """A checkpoint folder that no attempt can start from, and why. `bytes`: of its readable files."""

    path: str
    reasons: list[str]
    bytes: int


@dataclass(frozen=True)
class Pruned:
    """What `gemctl checkpoint prune` deletes, or would delete (`dry_run`). `failed`: what could not be deleted."""

    run: str
    dry_run: bool
    folders: list[Unusable]
    failed: list[str]

    @property
    def exit_code(self) -> int:
        """1 if something could not be deleted."""
        return 1 if self.failed else 0


@dataclass(frozen=True)
class Verified:
    """Path of each verified checkpoint folder → its faults; none if its files are intact."""

    faults: dict[str, list[str]]

    @property
    def exit_code(self) -> int:
        """1 if a checkpoint has a fault."""
        return 1 if any(self.faults.values()) else 0


@dataclass(frozen=True)
class Difference:
    """One object (or `position.<key>`) that differs.

    `what`: missing in A, missing in B, shape, dtype, value. For `value` of tensors: the number of `elements` that
    differ in any bit, the largest |A − B|, and that relative to the largest |A| (NaN if one is NaN). `a` and `b`: the
    shapes, dtypes or JSON values.
    """

    key: str
    what: str
    a: str = ""
    b: str = ""
    elements: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two checkpoint folders. `objects`: keys in either; `compared`: those whose values were compared."""

    a: str
    b: str
    step_a: int
    step_b: int
    objects: int
    compared: int
    differences: list[Difference]

    @property
    def exit_code(self) -> int:
        """1 if anything differs."""
        return 1 if self.differences else 0


def list_checkpoints(reference: str, root: str) -> Listing:
    """The checkpoints of the run `reference`, as in their manifests; one whose files are missing or have another size
    does not count."""
    run = find(reference, root)
    found = [_listed(checkpoint) for checkpoint in checkpoints(run)]
    valid = [one for one in found if one.flaw is None]
    return Listing(str(run.path), valid, [one for one in found if one.flaw is not None])


def _listed(checkpoint: Checkpoint) -> Listed:
    base = (checkpoint.path.name, checkpoint.step, checkpoint.attempt)
    try:
        manifest = read(checkpoint.path)
    except InputError as error:
        return Listed(*base, checkpoint.flaw or str(error))
    flaw = checkpoint.flaw or next(iter(verify(checkpoint.path, check_size)), None)
    size = sum(file.bytes for file in manifest.files.values())
    return Listed(*base, flaw, manifest.facts.world, len(manifest.objects), size)


def verify_all(reference: str, root: str) -> Verified:
    """The faults of one checkpoint (a path or RUN:step), or of all that a run has published."""
    if _is_checkpoint(Path(reference)) or reference.rpartition(":")[2].isdecimal():
        folder = resolve(reference, root)
        return Verified({str(folder): verify(folder)})
    run = find(reference, root)
    found = [one for one in checkpoints(run) if one.current]
    if not found:
        raise InputError(f"{run.path}: the run has no checkpoint")
    return Verified({str(one.path): [one.reason] if one.flaw is not None else verify(one.path) for one in found})


def unusable(run: RunDir) -> list[Unusable]:
    """The checkpoint folders that no attempt can start from, newest first: unfinished, void, unreadable or damaged (all
    files are read)."""
    found = []
    for one in checkpoints(run):
        reasons = [one.flaw] if one.flaw is not None else verify(one.path)
        if reasons and one.state != "missing":
            found.append(Unusable(str(one.path), reasons, size_of(one.path)))
    for path in sorted(entries(run.checkpoints)):
        if path.name.endswith(DELETED):
            found.append(Unusable(str(path), ["its deletion was interrupted"], size_of(path)))
    return found


def size_of(folder: Path) -> int:
    """Bytes of a folder's readable files."""
    try:
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    except OSError:
        return 0


def delete(found: list[Unusable]) -> list[str]:
    """Deletes the folders; returns what could not be deleted, one line each."""
    failed: list[str] = []

    def refused(function: object, path: str, info: object) -> None:
        failed.append(f"{path}: {sys.exc_info()[1]}")

    for one in found:
        try:
            if (path := Path(one.path)).is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path, onerror=refused)
        except OSError as error:
            failed.append(f"{one.path}: {error.strerror}")
    return failed


def resolve(reference: str, root: str) -> Path:
    """The checkpoint folder of a path, RUN (its newest) or RUN:step."""
    if _is_checkpoint(Path(reference)):
        return Path(reference)
    name, _, step = reference.rpartition(":")
    if not (name and step.isdecimal()):
        name, step = reference, ""
    found = [one for one in checkpoints(find(name, root)) if one.current]
    for checkpoint in found:
        if not step or checkpoint.step == int(step):
            if checkpoint.flaw is not None:
                raise InputError(checkpoint.reason)
            return checkpoint.path
    valid = [one for one in found if one.flaw is None]
    if not valid:
        raise InputError(f"{reference}: the run has no checkpoint")
    steps = ", ".join(str(checkpoint.step) for checkpoint in valid)
    raise InputError(f"{reference}: no such checkpoint; the run has steps {steps}")


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and ((path / FILE_NAME).exists() or FOLDER.fullmatch(path.resolve().name) is not None)
