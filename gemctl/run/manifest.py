"""The manifest of a checkpoint, whose existence makes the checkpoint exist, and which checkpoints of a run count.

    checkpoints/step_<n>.a<attempt>/
      __<rank>_0.distcp   each rank's tensors
      .metadata           where each tensor is stored in them
      manifest.json       written last and exclusively: what the state is, and a hash of every file

A folder without a manifest is an unfinished save, unless the run's records say that it was saved. If a later attempt
started from an earlier step, the manifest is void, whenever it appears: the later attempt continued without it. The
step and attempt of a checkpoint are those in its manifest, whatever its folder is called.

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
from typing import Any, Literal

from gemctl.durable import create, open_file, retried, sync_folder
from gemctl.durable import read as read_file
from gemctl.errors import InputError, Unreadable
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import FORMAT, Record, entries, or_unreadable, parse_line, read_log

FILE_NAME = "manifest.json"
FOLDER = re.compile(r"step_(\d+)\.a(\d+)")
DELETED = ".deleted"  # suffix of a folder that is being deleted, or whose deletion was interrupted
# Every random draw is a function of these, never of a generator, so there is no generator state to keep.
RNG = "counter-based: (seed, step, row, layer)"


@dataclass(frozen=True)
class RunFacts:
    """Facts shared by every checkpoint of an attempt. `hosts`: the host of each rank; hashes are hexadecimal."""

    world: int
    axes: dict[str, int]
    hosts: list[str]
    plan_hash: str
    config_hash: str
    seed: int
    optimizers: dict[str, str]


@dataclass(frozen=True)
class StoredObject:
    """One tensor: its full shape, dtype and bytes, its placement when it was saved and its number of shards.

    `content`: a checksum of its values that does not depend on the sharding (gemctl/checkpoint/content.py), in
    hexadecimal; None if an older version of gemctl wrote it.
    """

    shape: list[int]
    dtype: str
    bytes: int
    layout: str
    pieces: int
    content: str | None = None


# The kind of a tensor, by the prefix of its name; named as the objects of a plan.
KINDS = {
    "dense.": "dense weights",
    "tables.": "tables",
    "optim.dense.": "AdamW state",
    "optim.tables.": "tables' AdaGrad state",
}


@dataclass(frozen=True)
class KindCount:
    """Tensors of a kind: their number and bytes, and how many have a checksum that a load compares."""

    objects: int
    bytes: int
    checked: int


def count_kinds(objects: Mapping[str, StoredObject]) -> dict[str, KindCount]:
    """Kind → count of its tensors, in the order of KINDS, then `other`."""
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
    """Everything about a checkpoint except its tensors. `position`: where reading the data resumes (JSON)."""

    step: int
    attempt: int
    facts: RunFacts
    position: dict[str, Any]
    objects: dict[str, StoredObject]
    files: dict[str, StoredFile]
    rng: str = RNG


State = Literal["valid", "void", "unfinished", "damaged", "missing", "unreadable"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder of a run; its data files are not checked. `flaw`: why it does not count; None if `valid`.

    `void`: a later attempt continued without it. `unfinished`: the save did not complete. `damaged`: its manifest is
    wrong or lost. `missing`: the run's records say that it was saved, but the folder does not exist. `unreadable`: it
    cannot be read now, and may be intact. `step`, `attempt`: from its manifest, else from the name of its folder.
    """

    path: Path
    step: int
    attempt: int
    state: State
    flaw: str | None

    @property
    def current(self) -> bool:
        """True if it was published and no attempt has continued without it: the next one starts from the newest."""
        return self.state not in {"void", "unfinished"}

    @property
    def reason(self) -> str:
        """The folder and its flaw."""
        return f"{self.path}: {self.flaw}"


class NotPublished(InputError):
    """The folder has no manifest."""


def folder_name(step: int, attempt: int) -> str:
    return f"step_{step}.a{attempt}"


def publish(folder: Path, manifest: Manifest) -> None:
    """Makes the checkpoint in `folder` exist; FileExistsError if it has a manifest already.

    The contents of the data files must be synced; their directory entries, and the folder's own, are synced before the
    manifest is written, which appears atomically and includes a hash of itself.
    """
    body = dataclasses.asdict(manifest)
    value = {"format": FORMAT, "sha256": _digest(body), **body}
    sync_folder(folder)
    sync_folder(folder.parent)
    create(folder / FILE_NAME, json.dumps(value, indent=1, allow_nan=False))


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def read(folder: Path) -> Manifest:
    """The manifest in `folder`. NotPublished if there is none; Unreadable if it cannot be read now, or only by another
    version of gemctl; InputError if it is damaged, which is reported only after a second read."""
    path = folder / FILE_NAME
    try:
        body = _body(path)
    except (NotPublished, Unreadable):
        raise
    except InputError:
        body = _body(path)
    try:
        return Manifest(
            step=body["step"],
            attempt=body["attempt"],
            facts=RunFacts(**body["facts"].fields(RunFacts)),
            position=body["position"],
            objects={key: StoredObject(**value.fields(StoredObject)) for key, value in body["objects"].items()},
            files={name: StoredFile(**value.fields(StoredFile)) for name, value in body["files"].items()},
            rng=body["rng"],
        )
    except InputError as error:  # its hash is right: another version of gemctl wrote it so
        raise Unreadable(error.problems) from error


def _body(path: Path) -> Record:
    """The manifest's JSON, whose hash has been checked."""
    try:
        data = or_unreadable(path, lambda: read_file(path))
    except FileNotFoundError:
        raise NotPublished(
            f"{path.parent}: no checkpoint ({FILE_NAME} is missing: the save did not complete)"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    body = parse_line(data, str(path), path)
    if body.pop("sha256", None) != _digest(body):
        raise InputError(f"{path}: damaged, it does not match its own hash")
    if strange := [name for name in body["files"] if not _plain(name)]:
        raise InputError(f"{path}: {strange[0]!r} is not the name of a file in this folder")
    return body


def _plain(name: str) -> bool:
    """False for names that lead out of the folder, and for the manifest itself."""
    return name not in {"", ".", "..", FILE_NAME} and not any(sign in name for sign in "/\0")


def describe_file(path: Path) -> StoredFile:
    """Size and hash of a file as it is on disk now. InputError if it is not a regular file."""

    def described() -> StoredFile:
        with open_file(path, follow=False) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return StoredFile(os.fstat(file.fileno()).st_size, digest)

    return retried(described)


def check_size(path: Path, stored: StoredFile) -> str | None:
    """What is wrong with the file without reading it, or None. Unreadable if that cannot be known now."""
    try:
        found = or_unreadable(path, lambda: retried(path.lstat))
    except FileNotFoundError:
        return f"{path}: is missing" + (" (was it copied without dot files?)" if path.name.startswith(".") else "")
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"{path}: not a regular file in this folder"
    size = found.st_size
    return None if size == stored.bytes else f"{path}: {size} bytes, its manifest says {stored.bytes}"


def check_file(path: Path, stored: StoredFile) -> str | None:
    """What is wrong with the file, or None. Reads all of it, and a second time, from the disk, if the hash differs.
    Unreadable if that cannot be known now."""
    if (fault := check_size(path, stored)) is not None:
        return fault
    try:
        for _ in range(2):
            if or_unreadable(path, lambda: describe_file(path)).sha256 == stored.sha256:
                return None
            or_unreadable(path, lambda: _forget(path))
    except Unreadable:
        raise
    except InputError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{path}: damaged, its hash is not the one in its manifest"


def _forget(path: Path) -> None:
    """Drops the file from the page cache, where the fault may be."""
    with open_file(path, follow=False) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Check = Callable[[Path, StoredFile], str | None]


def verify(folder: Path, check: Check = check_file) -> list[str]:
    """The faults of a checkpoint's files, by size and hash (or by `check`), or why they cannot be read now; empty if
    the checkpoint is intact."""
    try:
        return file_faults(folder, read(folder), check)
    except InputError as error:
        return error.problems


def file_faults(folder: Path, manifest: Manifest, check: Check) -> list[str]:
    """What `check` finds wrong with the files of the checkpoint in `folder`, which has this manifest. Unreadable as
    `check` raises it."""
    faults = (check(folder / name, stored) for name, stored in sorted(manifest.files.items()))
    return [fault for fault in faults if fault is not None]


def checkpoints(run: RunDir) -> list[Checkpoint]:
    """All checkpoint folders of a run, newest first, including those that do not count. The newest checkpoint in the
    run's records is included even if its folder does not exist.

    Unreadable if the folder of checkpoints cannot be listed.
    """
    bases, records = _bases(run), _Records.of(run)
    found = [_look(path, bases, records) for path in entries(run.checkpoints) if FOLDER.fullmatch(path.name)]
    present = max(((one.step, one.attempt) for one in found if one.current), default=(-1, -1))
    newest = max((one for one in records.saved if _void(*one, bases) is None), default=present)
    if newest > present:
        path = run.checkpoints / folder_name(*newest)
        flaw = f"does not exist, though {records.saved[newest]} says that it was saved"
        found.append(Checkpoint(path, *newest, "missing", flaw))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt), reverse=True)


def _look(folder: Path, bases: Mapping[int, int], records: "_Records") -> Checkpoint:
    step, attempt = _named(folder.name)
    state: State = "valid"
    flaw = None
    try:
        if folder.is_symlink():
            raise InputError(f"{folder}/a symbolic link: it is not this run's")
        manifest = read(folder)
        step, attempt = manifest.step, manifest.attempt
    except NotPublished:
        state, flaw = records.unpublished(step, attempt)
    except InputError as error:
        state = "unreadable" if isinstance(error, Unreadable) else "damaged"
        flaw = "; ".join(problem.removeprefix(f"{folder}/") for problem in error.problems)
    if state != "unfinished" and (void := _void(step, attempt, bases)):
        state, flaw = "void", void if flaw is None else f"{void}; {flaw}"
    return Checkpoint(folder, step, attempt, state, flaw)


def _named(folder: str) -> tuple[int, int]:
    step, attempt = map(int, FOLDER.fullmatch(folder).groups())  # type: ignore[union-attr]
    return step, attempt


@dataclass(frozen=True)
class _Records:
    """What a run's attempts recorded about their saves. `saved`: (step, attempt) → the file with the record; `unknown`:
    attempt → why its file cannot be read."""

    saved: dict[tuple[int, int], Path]
    unknown: dict[int, str]

    @classmethod
    def of(cls, run: RunDir) -> "_Records":
        saved: dict[tuple[int, int], Path] = {}
        unknown: dict[int, str] = {}
        for attempt in run.attempts():
            try:
                lines = or_unreadable(attempt.saves, lambda: read_log(attempt.saves))  # noqa: B023 (called here)
            except InputError as error:
                unknown[attempt.number] = "; ".join(error.problems)
                continue
            saved |= {(line["step"], attempt.number): attempt.saves for line in lines if line["event"] == "saved"}
        for attempt in run.attempts():
            base = attempt.started_from()
            if base is not None and base.checkpoint is not None and FOLDER.fullmatch(base.checkpoint):
                saved.setdefault(_named(base.checkpoint), attempt.base_file)
        return cls(saved, unknown)

    def unpublished(self, step: int, attempt: int) -> tuple[State, str]:
        """State and flaw of a folder without a manifest."""
        if file := self.saved.get((step, attempt)):
            return "damaged", f"{FILE_NAME} is missing, though {file} says that it was saved"
        if why := self.unknown.get(attempt):
            return "unreadable", f"it has no {FILE_NAME}, and whether it ever had one cannot be read now: {why}"
        return "unfinished", f"unfinished: it has no {FILE_NAME}"


def number_after(run: RunDir, last: Attempt | None) -> int:
    """Number of the attempt after `last`, which is dead. It is also higher than that of any checkpoint whose attempt a
    power loss removed, so that no name of a checkpoint is used twice."""
    folders = (FOLDER.fullmatch(path.name) for path in entries(run.checkpoints))
    saved = {int(match[2]) for match in folders if match}
    lost = (number for number in saved if not run.attempt(number).path.exists())
    return 1 + max([last.number if last is not None else 0, *lost])


def _bases(run: RunDir) -> dict[int, int]:
    """Attempt → step that it started from, if it has recorded that."""
    found = {attempt.number: attempt.started_from() for attempt in run.attempts()}
    return {number: base.step for number, base in found.items() if base is not None}


def _void(step: int, attempt: int, bases: Mapping[int, int]) -> str | None:
    for later, base in sorted(bases.items()):
        if later > attempt and base < step:
            return f"void: attempt {later} started from step {base}"
    return None
