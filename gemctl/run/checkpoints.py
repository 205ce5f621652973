"""What the commands say of checkpoints: a run's list, faults, and what two of them differ in.

gemctl checkpoint list RUN
"""

from dataclasses import dataclass
from pathlib import Path

from gemctl.errors import InputError
from gemctl.run.directory import find
from gemctl.run.manifest import (
    FILE_NAME,
    FOLDER,
    Checkpoint,
    check_size,
    checkpoints,
    file_faults,
    read,
    valid_checkpoints,
    verify,
)


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
    """A run's checkpoints, newest first, and the other folders beside them, which do not count and why."""

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
class Verified:
    """`faults` of each verified checkpoint folder, by path; no faults: its files are whole."""

    faults: dict[str, list[str]]

    @property
    def exit_code(self) -> int:
        """1 if a checkpoint has a fault."""
        return 1 if any(self.faults.values()) else 0


@dataclass(frozen=True)
class Difference:
    """One object (or `position.<key>`) that is not the same.

    `what`: missing in A, missing in B, shape, dtype, value. For `value` of tensors: how many `elements` differ in any
    bit, the largest |A − B|, and that over the largest |A| (NaN if one is NaN). `a` and `b`: the two shapes, dtypes
    or JSON values.
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
    """Two checkpoints' folders. `objects`: keys in either; `compared`: those whose values were set side by side."""

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
    """The checkpoints of the run that `reference` means, with what their manifests say; one whose files are gone, or
    longer or shorter than that, does not count."""
    run = find(reference, root)
    listed = [_listed(checkpoint) for checkpoint in checkpoints(run)]
    valid = [one for one in listed if one.flaw is None]
    return Listing(str(run.path), valid, [one for one in listed if one.flaw is not None])


def _listed(checkpoint: Checkpoint) -> Listed:
    base = (checkpoint.path.name, checkpoint.step, checkpoint.attempt)
    if not checkpoint.published:
        return Listed(*base, checkpoint.flaw)
    try:
        manifest = read(checkpoint.path)
    except InputError as error:
        return Listed(*base, checkpoint.flaw or str(error))
    flaw = checkpoint.flaw or next(iter(file_faults(checkpoint.path, manifest, check_size)), None)
    size = sum(file.bytes for file in manifest.files.values())
    return Listed(*base, flaw, manifest.facts.world, len(manifest.objects), size)


def verify_all(reference: str, root: str) -> Verified:
    """Faults of one checkpoint (a path or RUN:step), or of all valid ones of a run."""
    if _is_checkpoint(Path(reference)) or reference.rpartition(":")[2].isdecimal():
        folder = resolve(reference, root)
        return Verified({str(folder): verify(folder)})
    run = find(reference, root)
    valid = valid_checkpoints(run)
    if not valid:
        raise InputError(f"{run.path}: the run has no checkpoint")
    return Verified({str(checkpoint.path): verify(checkpoint.path) for checkpoint in valid})


def resolve(reference: str, root: str) -> Path:
    """The checkpoint folder that a user means by a path, RUN (its newest) or RUN:step."""
    if _is_checkpoint(Path(reference)):
        return Path(reference)
    name, _, step = reference.rpartition(":")
    if not (name and step.isdecimal()):
        name, step = reference, ""
    valid = valid_checkpoints(find(name, root))
    for checkpoint in valid:
        if not step or checkpoint.step == int(step):
            return checkpoint.path
    if not valid:
        raise InputError(f"{reference}: the run has no checkpoint")
    steps = ", ".join(str(checkpoint.step) for checkpoint in valid)
    raise InputError(f"{reference}: no such checkpoint; the run has those of step {steps}")


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and ((path / FILE_NAME).exists() or FOLDER.fullmatch(path.resolve().name) is not None)
