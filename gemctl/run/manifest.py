"""A checkpoint's manifest, the file that makes a checkpoint exist, and which checkpoints of a run count.

    checkpoints/step_<n>.a<attempt>/
      __<rank>_0.distcp   each rank's tensors
      .metadata           where each tensor lies in them
      manifest.json       written last and exclusively: what the state is, and the hash of every file

A folder without a manifest is a save that did not end. A manifest of an earlier attempt at a later step than the one
a later attempt started from is void for ever, whenever it appears: the later attempt went on without it.

    gemctl checkpoint list RUN
"""

import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemctl.durable import create, open_file, steadily, sync_folder
from gemctl.errors import InputError
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import FORMAT, entries, read_json

FILE_NAME = "manifest.json"
FOLDER = re.compile(r"step_(\d+)\.a(\d+)")
# Every random draw is a function of these, never of a generator, so there is no generator state to keep.
RNG = "counter-based: (seed, step, row, layer)"


@dataclass(frozen=True)
class RunFacts:
    """What holds for every checkpoint of an attempt. `hosts`: the host of each rank; hashes are hexadecimal."""

    world: int
    axes: dict[str, int]
    hosts: list[str]
    plan_hash: str
    config_hash: str
    seed: int
    optimizers: dict[str, str]


@dataclass(frozen=True)
class StoredObject:
    """One tensor: its full shape, dtype and bytes, its placement when it was saved and in how many pieces it lies.

    `content`: the number that its values give however they are sharded (gemctl/checkpoint/content.py), in hexadecimal;
    None where an older gemctl wrote it.
    """

    shape: list[int]
    dtype: str
    bytes: int
    layout: str
    pieces: int
    content: str | None = None


# What a tensor is, by how its name begins; the words are those of a plan's objects.
KINDS = {
    "dense.": "dense weights",
    "tables.": "tables",
    "optim.dense.": "AdamW state",
    "optim.tables.": "tables' AdaGrad state",
}


@dataclass(frozen=True)
class KindCount:
    """Tensors of a kind: how many, their bytes, and how many of them have a content that a load compares."""

    objects: int
    bytes: int
    checked: int


def count_kinds(objects: Mapping[str, StoredObject]) -> dict[str, KindCount]:
    """Kind → its tensors, in the order of KINDS, then `other`."""
    found: dict[str, list[StoredObject]] = {kind: [] for kind in [*KINDS.values(), "other"]}
    for key, stored in objects.items():
        found[kind_of(key)].append(stored)
    return {
        kind: KindCount(len(some), sum(one.bytes for one in some), sum(one.content is not None for one in some))
        for kind, some in found.items()
        if some
    }


def kind_of(key: str) -> str:
    """The kind of a tensor."""
    return next((kind for prefix, kind in KINDS.items() if key.startswith(prefix)), "other")


@dataclass(frozen=True)
class StoredFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint but its tensors. `position`: where the data goes on (JSON)."""

    step: int
    attempt: int
    facts: RunFacts
    position: dict[str, Any]
    objects: dict[str, StoredObject]
    files: dict[str, StoredFile]
    rng: str = RNG


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder of a run. `flaw` says why it does not count; None: it is published and valid."""

    path: Path
    step: int
    attempt: int
    published: bool
    flaw: str | None


def folder_name(step: int, attempt: int) -> str:
    return f"step_{step}.a{attempt}"


def publish(folder: Path, manifest: Manifest) -> None:
    """Makes the checkpoint in `folder` exist; FileExistsError if it has a manifest already.

    The data files' bytes must be on disk; their names, and the folder's own, are put there before the manifest, which
    appears whole or not at all, and holds a hash of itself.
    """
    body = dataclasses.asdict(manifest)
    value = {"format": FORMAT, "sha256": _digest(body), **body}
    sync_folder(folder)
    sync_folder(folder.parent)
    create(folder / FILE_NAME, json.dumps(value, indent=1, allow_nan=False))


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def read(folder: Path) -> Manifest:
    """The manifest in `folder`. InputError if there is none, or it is damaged, of a newer format, or one of another
    checkpoint than the folder's name says."""
    path = folder / FILE_NAME
    try:
        body = read_json(path)
    except FileNotFoundError:
        raise InputError(f"{folder}: no checkpoint ({FILE_NAME} is missing; the save did not end)") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    if body.pop("sha256", None) != _digest(body):
        raise InputError(f"{path}: damaged, it does not match its own hash")
    if strange := [name for name in body["files"] if not _plain(name)]:
        raise InputError(f"{path}: {strange[0]!r} is no name of a file in this folder")
    name = folder_name(body["step"], body["attempt"])
    if FOLDER.fullmatch(folder.name) and folder.name != name:
        raise InputError(f"{path}: it is that of {name}, and lies in {folder.name}")
    return Manifest(
        step=body["step"],
        attempt=body["attempt"],
        facts=RunFacts(**body["facts"].fields(RunFacts)),
        position=body["position"],
        objects={key: StoredObject(**value.fields(StoredObject)) for key, value in body["objects"].items()},
        files={name: StoredFile(**value.fields(StoredFile)) for name, value in body["files"].items()},
        rng=body["rng"],
    )


def _plain(name: str) -> bool:
    """False for what leads out of the folder, and for the manifest itself."""
    return name not in {"", ".", "..", FILE_NAME} and not any(sign in name for sign in "/\0")


def describe_file(path: Path) -> StoredFile:
    """Size and hash of a file as it is on disk now. InputError if it is a link or no file at all."""

    def described() -> StoredFile:
        with open_file(path, follow=False) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return StoredFile(os.fstat(file.fileno()).st_size, digest)

    return steadily(described)


def check_size(path: Path, stored: StoredFile) -> str | None:
    """What shows to be wrong with the file before it is read, or None."""
    try:
        found = path.lstat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"{path}: no regular file of this folder"
    size = found.st_size
    return None if size == stored.bytes else f"{path}: {size} bytes, its manifest says {stored.bytes}"


def check_file(path: Path, stored: StoredFile) -> str | None:
    """What is wrong with the file, or None; reads all of it."""
    if (fault := check_size(path, stored)) is not None:
        return fault
    try:
        whole = describe_file(path).sha256 == stored.sha256
    except InputError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None if whole else f"{path}: damaged, its hash is not the one in its manifest"


Check = Callable[[Path, StoredFile], str | None]


def verify(folder: Path, check: Check = check_file) -> list[str]:
    """Every fault of a checkpoint's files, by size and hash (or by `check`); empty if it is whole."""
    try:
        manifest = read(folder)
    except InputError as error:
        return error.problems
    return file_faults(folder, manifest, check)


def file_faults(folder: Path, manifest: Manifest, check: Check) -> list[str]:
    """What `check` finds wrong with the files of the checkpoint in `folder`, whose manifest has been read."""
    faults = (check(folder / name, stored) for name, stored in sorted(manifest.files.items()))
    return [fault for fault in faults if fault is not None]


def checkpoints(run: RunDir) -> list[Checkpoint]:
    """All checkpoint folders of a run, newest first; those that do not count too, with the reason.

    None where the folder of checkpoints was deleted. InputError if it cannot be read.
    """
    bases = _bases(run)
    found = []
    for path in entries(run.checkpoints):
        if match := FOLDER.fullmatch(path.name):
            step, attempt = int(match[1]), int(match[2])
            published = (path / FILE_NAME).exists()
            flaw = _void(step, attempt, bases) if published else f"unfinished: it has no {FILE_NAME}"
            flaw = "a symbolic link: it is not this run's" if path.is_symlink() else flaw
            found.append(Checkpoint(path, step, attempt, published, flaw))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt), reverse=True)


def valid_checkpoints(run: RunDir) -> list[Checkpoint]:
    """Those that count, newest first; their files are not looked at."""
    return [checkpoint for checkpoint in checkpoints(run) if checkpoint.flaw is None]


def number_after(run: RunDir, last: Attempt | None) -> int:
    """Number of the attempt after `last`, which is dead: higher too than that of any checkpoint whose attempt a power
    loss has taken, so that no name of a checkpoint comes twice."""
    folders = (FOLDER.fullmatch(path.name) for path in entries(run.checkpoints))
    saved = {int(match[2]) for match in folders if match}
    lost = (number for number in saved if not run.attempt(number).path.exists())
    return 1 + max([last.number if last is not None else 0, *lost])


def _bases(run: RunDir) -> dict[int, int]:
    """Attempt → step that it started from, for attempts that have said so."""
    found = {attempt.number: attempt.started_from() for attempt in run.attempts()}
    return {number: base.step for number, base in found.items() if base is not None}


def _void(step: int, attempt: int, bases: Mapping[int, int]) -> str | None:
    for later, base in sorted(bases.items()):
        if later > attempt and base < step:
            return f"void: attempt {later} started from step {base}"
    return None


def newest_verified(
    run: RunDir, faults_of: Callable[[Checkpoint], list[str]] = lambda found: verify(found.path)
) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint without faults, by default one whose files are whole, and why each newer one was
    refused, one line each."""
    refused: list[str] = []
    for checkpoint in checkpoints(run):
        faults = [f"{checkpoint.path}: {checkpoint.flaw}"] if checkpoint.flaw else faults_of(checkpoint)
        if not faults:
            return checkpoint, refused
        refused += faults
    return None, refused
