"""The inputs of a run at submission: the text of the feature spec and a fingerprint of every data file.

    submissions/<n>/, attempts/<n>/
      spec.yaml       the feature spec; the ranks read this copy
      inputs.json     the paths of spec and data, the spec's hash, and each data file's fingerprint

Paths are stored twice, absolute and relative to the run directory, so a run finds its data after it was moved with or
without them. `read` decides which of the two is used.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gemctl import paths
from gemctl.config.schema import DataConfig
from gemctl.durable import create
from gemctl.errors import InputError
from gemctl.run.files import create_json, is_whole, read_text, read_whole
from gemctl.specs import feature_spec
from gemctl.specs.data import FeatureSpec

SPEC, FILE = "spec.yaml", "inputs.json"
NAMED = 8  # files listed in a message


@dataclass(frozen=True)
class FileMark:
    """The fingerprint of a Parquet file: its size and a hash of its footer. The footer has row count, byte sizes and
    statistics of each row group, so `footer` changes with nearly every change of the rows.

    `name`: relative to its source; "" if the source is the file itself. `columns`: a hash of names and types, used only
    to describe a change.
    """

    name: str
    bytes: int
    rows: int
    groups: int
    columns: str
    footer: str

    def same(self, other: "FileMark") -> bool:
        """Whether both have the same rows, whatever their names."""
        return (self.bytes, self.footer) == (other.bytes, other.footer)


@dataclass(frozen=True)
class Source:
    """One path of data.train or data.eval: a file or folder `base`, or a `glob` below it ("" for none), and its files
    in the order of their rows."""

    base: str
    glob: str
    files: list[FileMark]

    @property
    def path(self) -> str:
        """As in the configuration."""
        return f"{self.base}/{self.glob}" if self.glob else self.base

    def path_of(self, file: FileMark) -> str:
        return f"{self.base}/{file.name}" if file.name else self.base


Sources = list[Source]


@dataclass(frozen=True)
class Inputs:
    """`spec_text`: the feature spec that was read from `spec_path`. `eval` None: no evaluation data."""

    spec_path: str
    spec_text: str
    train: Sources
    eval: Sources | None

    @property
    def spec(self) -> FeatureSpec:
        return feature_spec.parse(self.spec_text, self.spec_path)

    def data_sets(self) -> dict[str, Sources]:
        """Configuration key → its sources."""
        return {"data.train": self.train} | ({"data.eval": self.eval} if self.eval is not None else {})


def write(inputs: Inputs, folder: Path, run: Path) -> None:
    """Writes both files into a submission's `folder`; `run`: the run directory."""
    create(folder / SPEC, inputs.spec_text)
    spec = {**_place(inputs.spec_path, run), "sha256": _hash(inputs.spec_text)}
    sources = {key: _to_json(sources, run) for key, sources in (("train", inputs.train), ("eval", inputs.eval))}
    create_json(folder / FILE, {"spec": spec, **sources})


def read(folder: Path, run: Path) -> Inputs | None:
    """The inputs of the submission or attempt in `folder`, with their current paths; None if an older version of gemctl
    wrote it, or a power loss truncated its files. InputError if a file is damaged or was edited.

    Data at the path relative to the run directory, with the same names and sizes, are preferred to those at the
    absolute path: whoever copies a folder with a run in it means the copy. If nothing exists there, the absolute path
    is used.
    """
    found = read_whole(folder / FILE)
    if found is None or not is_whole(folder / SPEC):
        return None
    text = read_text(folder / SPEC)
    try:
        spec, evals = found["spec"], found["eval"]
        if _hash(text) != spec["sha256"]:
            raise InputError(f"{folder / SPEC}: was changed: its hash is not the one in {FILE}")
        spec_path = _here(spec, run, lambda path: _hash_of(path) == spec["sha256"])
        return Inputs(spec_path, text, _from_json(found["train"], run), evals and _from_json(evals, run))
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"{folder / FILE}: is not in the format that gemctl writes ({error})") from error


def texts(folder: Path) -> dict[str, str]:
    """Name → text of both files, for an attempt to copy; empty if an older version of gemctl wrote the submission."""
    return {name: read_text(folder / name) for name in (SPEC, FILE) if is_whole(folder / name)}


def here(data: DataConfig, folder: Path, run: Path) -> DataConfig:
    """The data of the submission or attempt in `folder`: its copy of the spec, and the current paths of the rows.
    `data` itself if an older version of gemctl wrote the submission."""
    inputs = read(folder, run)
    if inputs is None:
        return data
    evals = data_path(inputs.eval) if inputs.eval is not None else None
    return replace(data, spec=str(folder / SPEC), train=data_path(inputs.train), eval=evals)


def pinned(data: DataConfig, inputs: Inputs, folder: Path) -> DataConfig:
    """The data that the ranks of the attempt in `folder` read: exactly the files that existed at submission, so that a
    file added since does not shift the order of the rows."""
    evals = _files(inputs.eval) if inputs.eval is not None else None
    return replace(data, spec=str(folder / SPEC), train=_files(inputs.train), eval=evals)


def _files(sources: Sources) -> list[str]:
    return [source.path_of(file) for source in sources for file in source.files]


def data_path(sources: Sources) -> str | list[str]:
    """The value of the configuration key."""
    return sources[0].path if len(sources) == 1 else [source.path for source in sources]


def _place(path: str, run: Path) -> dict[str, Any]:
    return {"path": path, "from_run": None if _remote(path) else os.path.relpath(path, run)}


def _remote(path: str) -> bool:
    return "://" in path or path.startswith(feature_spec.OWN_PREFIX)


def _here(place: dict[str, Any], run: Path, holds: Callable[[str], bool]) -> str:
    """The path to use: relative to the run directory if `holds` says that the data are there, or nothing is
    elsewhere."""
    path, from_run = str(place["path"]), place["from_run"]
    near = os.path.normpath(run / from_run) if from_run is not None else path
    return near if holds(near) or (paths.exists(near) and not paths.exists(path)) else path


def _to_json(sources: Sources | None, run: Path) -> list[dict[str, Any]] | None:
    if sources is None:
        return None
    return [{**_place(one.base, run), "glob": one.glob, "files": list(map(asdict, one.files))} for one in sources]


def _from_json(found: list[Any], run: Path) -> Sources:
    sources = []
    for one in found:
        files = [FileMark(**file.fields(FileMark)) for file in one["files"]]

        def holds(base: str, glob: str = one["glob"], files: list[FileMark] = files) -> bool:
            return all(_size(Source(base, glob, files).path_of(file)) == file.bytes for file in (files[0], files[-1]))

        sources.append(Source(_here(one, run, holds), one["glob"], files))
    return sources


def _size(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        return None


def _hash_of(path: str) -> str | None:
    try:
        return _hash(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def same_rows(before: Sources, now: Sources) -> bool:
    """Whether both have the same files in the same order, whatever their paths."""
    old, new = _marks(before), _marks(now)
    return len(old) == len(new) and _agree(old, new)


def grown(before: Sources, now: Sources) -> bool:
    """Whether `now` has the files of `before`, followed by others."""
    old, new = _marks(before), _marks(now)
    return len(old) < len(new) and _agree(old, new[: len(old)])


def rows_of(sources: Sources) -> int:
    return sum(file.rows for source in sources for file in source.files)


def _marks(sources: Sources) -> list[FileMark]:
    return [file for source in sources for file in source.files]


def _agree(old: list[FileMark], new: list[FileMark]) -> bool:
    return all(a.same(b) for a, b in zip(old, new, strict=True))


def data_differences(before: Sources, now: Sources) -> list[str]:
    """The differences, one line per file; empty if the rows are the same."""
    if same_rows(before, now):
        return []
    # If all sources were moved, each is compared with the one at the same position in the list.
    moved = len(before) == len(now) and not {one.base for one in before} & {one.base for one in now}
    old, new = _by_name(before, moved), _by_name(now, moved)
    gone = [f"{name} is gone" for key, (name, _) in old.items() if key not in new]
    other = [(new[key][0], difference(file, new[key][1])) for key, (_, file) in old.items() if key in new]
    added = [f"{name} was added ({file.rows:,} rows)" for key, (name, file) in new.items() if key not in old]
    lines = [*gone, *(f"{name}: {what}" for name, what in other if what), *added]
    if not lines:
        return ["the same files in another order"]
    more = len(lines) - NAMED
    return lines if more <= 1 else [*lines[:NAMED], f"and {more} more files"]


def _by_name(sources: Sources, moved: bool) -> dict[tuple[int | str, str], tuple[str, FileMark]]:
    """Key of a file → its name in messages, and the file."""
    return {
        (index if moved else source.base, file.name): (
            file.name if file.name and len(sources) == 1 else source.path_of(file),
            file,
        )
        for index, source in enumerate(sources)
        for file in source.files
    }


def difference(before: FileMark, now: FileMark) -> str:
    """How a file has changed; "" if it has not."""
    if before.same(now):
        return ""
    parts = []
    if before.rows != now.rows:
        parts.append(f"{before.rows:,} → {now.rows:,} rows")
    if before.columns != now.columns:
        parts.append("other columns or types")
    if before.bytes != now.bytes:
        parts.append(f"{before.bytes:,} → {now.bytes:,} bytes")
    if before.rows == now.rows:
        parts.append("other rows, by its footer")
    return ", ".join(parts)


def spec_differences(before: FeatureSpec, now: FeatureSpec) -> list[str]:
    """One line for each key of the spec that differs: `dense.price.log: True → False`."""
    old, new = _flat(asdict(before)), _flat(asdict(now))
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    lines = [f"{key}: {old.get(key)!r} → {new.get(key)!r}" for key in keys]
    return lines if lines or before == now else ["the same features in another order"]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted key → value; list items are keyed by their names."""
    if isinstance(value, dict):
        return {key: leaf for name, item in value.items() for key, leaf in _flat(item, f"{path}.{name}").items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _flat({item.get("name", index): item for index, item in enumerate(value)}, path)
    return {path.removeprefix("."): value}
