"""Warm start: what a new run loads from another run's checkpoint, by tensor name, where the shapes agree.

    gemctl train my.yaml checkpoint.warm_start.source=RUN:300 'checkpoint.warm_start.include=[tables.*]' --dry-run

Weights and the tables' AdaGrad state can be loaded. AdamW's moments cannot: they are meaningless without their step
count, and the new run counts from 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from gemctl.config.schema import WarmStartConfig
from gemctl.errors import InputError
from gemctl.run.checkpoints import resolve
from gemctl.run.manifest import Manifest, read, verify
from gemctl.specs.count import Shape
from gemctl.suggest import did_you_mean

LEFT_OUT = "optim.dense."


@dataclass(frozen=True)
class ShapeDiffers:
    """A tensor that both have, with different shapes."""

    name: str
    theirs: list[int]
    ours: list[int]


@dataclass(frozen=True)
class WarmStart:
    """Names of tensors. `loaded`: from `checkpoint` (a folder). `not_found`: selected by the patterns but not in the
    checkpoint; these and `shape_differs` keep their initial values. `unused`: only in the checkpoint."""

    checkpoint: str
    step: int
    loaded: list[str]
    not_found: list[str]
    shape_differs: list[ShapeDiffers]
    unused: list[str]


def find_source(config: WarmStartConfig, root: str) -> Path:
    """The checkpoint's folder, verified. InputError if there is none, or it is damaged."""
    try:
        folder = resolve(config.source, root).absolute()
    except InputError as error:
        raise InputError([f"checkpoint.warm_start.source: {problem}" for problem in error.problems]) from None
    if faults := verify(folder):
        raise InputError([f"checkpoint.warm_start.source: {fault}" for fault in faults])
    return folder


def match(config: WarmStartConfig, folder: Path, wanted: Mapping[str, Shape]) -> WarmStart:
    """Matches the tensors of the new run, `wanted` (gemctl.plan.state), with those in `folder`.

    InputError for patterns that match nothing, and if nothing would be loaded.
    """
    manifest = read(folder)
    _check_patterns(config, manifest, wanted)
    chosen = [name for name in wanted if _takes(config, name)]
    theirs = {name: manifest.objects[name].shape for name in chosen if name in manifest.objects}
    loaded = [name for name, shape in theirs.items() if shape == list(wanted[name])]
    if not loaded:
        raise InputError(f"checkpoint.warm_start: no tensor in {folder} has a selected name and the same shape")
    return WarmStart(
        checkpoint=str(folder),
        step=manifest.step,
        loaded=loaded,
        not_found=[name for name in chosen if name not in manifest.objects],
        shape_differs=[
            ShapeDiffers(name, shape, list(wanted[name])) for name, shape in theirs.items() if name not in loaded
        ],
        unused=[name for name in manifest.objects if _takes(config, name) and name not in wanted],
    )


def _takes(config: WarmStartConfig, name: str) -> bool:
    if name.startswith(LEFT_OUT):
        return False
    included = any(fnmatchcase(name, pattern) for pattern in config.include)
    return included and not any(fnmatchcase(name, pattern) for pattern in config.exclude)


def _check_patterns(config: WarmStartConfig, manifest: Manifest, wanted: Mapping[str, Shape]) -> None:
    """Every pattern must match a name of the run or of the checkpoint."""
    names = [name for name in dict.fromkeys([*wanted, *manifest.objects]) if not name.startswith(LEFT_OUT)]
    problems = []
    for key, patterns in (("include", config.include), ("exclude", config.exclude)):
        for pattern in patterns:
            where = f"checkpoint.warm_start.{key}: {pattern!r}"
            if pattern.startswith(LEFT_OUT):
                problems.append(
                    f"{where}: AdamW starts from scratch; its moments are meaningless without their step count"
                )
            elif not any(fnmatchcase(name, pattern) for name in names):
                problems.append(f"{where} matches no tensor{did_you_mean(pattern, names)}")
    if problems:
        raise InputError(problems)
