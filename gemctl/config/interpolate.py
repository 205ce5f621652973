"""`${key}` in values, resolved by OmegaConf in the merged configuration; `???` marks a value that must be set."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from gemctl.config.keys import unknown_key
from gemctl.config.schema import Config, DataConfig
from gemctl.specs.yaml_file import KeyPath, dotted, overlap

MOST_CHARACTERS = 1 << 14
References = dict[KeyPath, list[KeyPath]]
_REFERENCE = re.compile(r"(?<!\\)\$\{\s*([^${}:\s]+)\s*\}")


def resolve(data: dict[str, Any]) -> tuple[dict[KeyPath, str], References]:
    """Replaces every interpolation in `data` by its value, which may be a default of the schema.

    Returns the problems of those that have no value, by key, and the keys that each interpolation refers to.
    """
    found = dict(_interpolated(data, ()))
    references = {path: _named(path, text) for path, text in found.items()}
    problems: dict[KeyPath, str] = {}
    if not found:
        return {}, {}
    whole = _over(_defaults(), data)
    tree = OmegaConf.create(whole)
    lengths: dict[KeyPath, int] = {}
    for path in found:
        if _length(path, found, references, lengths) > MOST_CHARACTERS:
            problems[path] = f"in ${{…}}: resolves to more than {MOST_CHARACTERS:,} characters"
            continue
        place: Any = data
        node: Any = tree
        for name in path[:-1]:
            place, node = place[name], node[name]
        try:
            value = node[path[-1]]
            place[path[-1]] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            problems[path] = _why(path, references, whole, error)
    return problems, references


def _length(path: KeyPath, found: dict[KeyPath, str], references: References, lengths: dict[KeyPath, int]) -> int:
    """A lower bound of the characters of a value once it is resolved, memoised in `lengths`; 0 inside a loop."""
    if path not in lengths:
        lengths[path] = 0
        inside = [other for other in found if overlap(other, path)]
        named = [key for other in inside for key in references[other]]
        lengths[path] = sum(len(found[other]) for other in inside)
        lengths[path] += sum(_length(key, found, references, lengths) for key in named)
    return lengths[path]


def _defaults() -> dict[str, Any]:
    return dataclasses.asdict(Config(data=DataConfig(spec="???", train="???")))


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {key: _over(below[key], value) for key, value in above.items()
            if isinstance(value, dict) and isinstance(below.get(key), dict)}  # fmt: skip
    return below | above | both


def independent(faults: Iterable[KeyPath], references: References) -> list[KeyPath]:
    """The faulty keys without those that are faulty only because they refer to another one; of a loop, the first."""
    order = list(faults)
    reach = {path: _reach(path, references) for path in order}

    def follows(path: KeyPath, cause: KeyPath) -> bool:
        named = any(overlap(cause, key) for key in reach[path])
        loop = any(overlap(path, key) for key in reach[cause])
        return path != cause and named and (not loop or order.index(cause) < order.index(path))

    return [path for path in order if not any(follows(path, cause) for cause in order)]


def escape(value: Any) -> Any:
    """`value` with each `${` escaped, so that `resolve` returns the value as it is."""
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def is_missing(value: Any) -> bool:
    """True for Hydra's marker of a value that must be set."""
    return isinstance(value, str) and value == "???"


def _interpolated(value: Any, path: KeyPath) -> Iterable[tuple[KeyPath, str]]:
    if isinstance(value, (dict, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _interpolated(item, (*path, name))
    elif isinstance(value, str) and "${" in value:
        yield path, value


def _named(path: KeyPath, text: str) -> list[KeyPath]:
    """The keys that a value refers to; `${.key}` is relative to its mapping, each further dot one level up."""
    found = []
    for key in _REFERENCE.findall(text):
        up = len(key) - len(key.lstrip("."))
        names = [name for name in re.split(r"[.\[\]]", key) if name]
        found.append((*(path[:-up] if up else ()), *(int(name) if name.isdigit() else name for name in names)))
    return found


def _reach(path: KeyPath, references: References) -> set[KeyPath]:
    """Every key that the value at `path` refers to, directly or through others."""
    found: set[KeyPath] = set()
    todo = [path]
    while todo:
        place = todo.pop()
        for owner, named in references.items():
            if overlap(owner, place):
                todo += [key for key in named if key not in found]
                found |= set(named)
    return found


def _why(path: KeyPath, references: References, data: dict[str, Any], error: Exception) -> str:
    for key in references[path]:
        if any(overlap(path, other) for other in _reach(key, references) | {key}):
            return "refers to itself" + ("" if overlap(path, key) else f" through {dotted(key)}")
        if wrong := unknown_key(key):
            return f"in ${{…}}: {wrong}"
        if isinstance(error, InterpolationToMissingValueError) or not _has(data, key):
            return f"in ${{…}}: {dotted(key)} is not set"
    return f"can't be resolved: {str(error).splitlines()[0].rpartition('interpolation: ')[2]}"


def _has(data: Any, path: KeyPath) -> bool:
    for name in path:
        if not (name in data if isinstance(data, dict) else isinstance(data, list) and name in range(len(data))):
            return False
        data = data[name]
    return True
