"""Damage to a checkpoint's files, as by a bad disk or an attacker.

done = damage(run, Damage("flip", "data", 0.3))      # the folders that are now damaged
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemctl.run.directory import RunDir
from gemctl.run.manifest import FILE_NAME, checkpoints, describe_file, publish, read
from tests.chaos.scenario import Damage

PLANTED = "planted"  # a folder of the case that is only created if the planted pickle runs


def damage(run: RunDir, what: Damage) -> list[Path] | None:
    """Damages one valid checkpoint; returns every damaged folder, or None if there is no such checkpoint. Whole
    checkpoints that have swapped names are not damaged: their manifests identify them."""
    valid = [checkpoint.path for checkpoint in checkpoints(run) if checkpoint.flaw is None]
    if len(valid) <= what.newest:
        return None
    folder = valid[what.newest]
    if what.what in PAIRS:
        older = valid[what.newest + 1 :][:1]
        for other in older:
            PAIRS[what.what](_file(folder, what), other)
        if not older:
            return None
        return [] if what.what == "swap_folders" else [folder, *older]
    FILES[what.what](_file(folder, what), what.draw)
    return [folder]


def _file(folder: Path, what: Damage) -> Path:
    if what.file == "data":
        files = sorted(folder.glob("*.distcp"))
        return files[int(what.draw * len(files))]
    return folder / {"metadata": ".metadata", "manifest": FILE_NAME}[what.file]


def _cut(path: Path, draw: float) -> None:
    """Removes anything from one byte to all but one."""
    size = path.stat().st_size
    os.truncate(path, size - 1 - int(draw * (size - 2)))


def _flip(path: Path, draw: float) -> None:
    """Flips one bit; in a manifest not in its format number, as an older one is valid too."""
    data = bytearray(path.read_bytes())
    first = data.index(b"sha256") if path.name == FILE_NAME else 0
    bit = int(draw * 8 * (len(data) - first))
    data[first + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _remove(path: Path, draw: float) -> None:
    path.unlink()


def _empty(path: Path, draw: float) -> None:
    os.truncate(path, 0)


def _swap_ranks(path: Path, draw: float) -> None:
    """Swaps the files of two ranks."""
    first, second = sorted(path.parent.glob("*.distcp"))[:2]
    _swap(first, second)


class _Planted:
    """Unpickling this creates a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def _plant(path: Path, draw: float) -> None:
    """Plants a pickle that runs code, in a checkpoint whose manifest matches it."""
    folder = path.parent
    case = folder.parents[4]
    (folder / ".metadata").write_bytes(pickle.dumps(_Planted(case / PLANTED)))
    manifest = read(folder)
    (folder / FILE_NAME).unlink()
    publish(folder, replace(manifest, files={name: describe_file(folder / name) for name in manifest.files}))


def _swap_files(path: Path, other: Path) -> None:
    """Swaps the same file of two checkpoints."""
    _swap(path, other / path.name)


def _swap_folders(path: Path, other: Path) -> None:
    """Swaps the names of two whole checkpoints."""
    _swap(path.parent, other)


def _swap(first: Path, second: Path) -> None:
    aside = first.with_name(f"{first.name}.aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


FILES: dict[str, Callable[[Path, float], None]] = {
    "cut": _cut,
    "flip": _flip,
    "remove": _remove,
    "empty": _empty,
    "swap_ranks": _swap_ranks,
    "plant": _plant,
}
PAIRS: dict[str, Callable[[Path, Path], None]] = {"swap_checkpoints": _swap_files, "swap_folders": _swap_folders}
