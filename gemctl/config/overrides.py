"""Overrides of the command line, read by Hydra's own grammar: `group=choice` and `key=value`, nothing else.

gemctl train experiment=ml100k optim.dense.lr=0.002 'optim.dense.betas=[0.9,0.99]' 'run.name="2026"'
"""

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from gemctl.config.cures import as_list, override, takes_text, typed
from gemctl.config.groups import Groups
from gemctl.config.keys import GROUPS, all_keys, did_you_mean_key, find
from gemctl.specs.json_schema import cut, is_mapping
from gemctl.specs.yaml_file import KeyPath, dotted
from gemctl.suggest import did_you_mean


@dataclass(frozen=True)
class Setting:
    """One value at one place. `origin` is what an error quotes: the override's text or file:line with the key. `typed`
    gives the text of a value at or below `path` that is no string."""

    path: KeyPath
    value: Any
    origin: str
    typed: Callable[[KeyPath], str | None] = lambda path: None


@dataclass
class Overrides:
    """What the command line asks for: a choice and its text by group; settings in their order; all problems."""

    choices: dict[str, tuple[str, str]] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)  # keys whose value `problems` tell of


def parse(texts: Iterable[str], groups: Groups) -> Overrides:
    """Reads all overrides, going on after each problem."""
    parser = OverridesParser.create()
    found = Overrides()
    seen: dict[str, str] = {}
    for text in texts:
        try:
            parsed = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
            found.problems.append(f"{text}: {_unparsable(text, error)}")
            found.broken.add(tuple(text.partition("=")[0].split(".")))
            continue
        found.problems += [f"{text}: {problem}" for problem in _add(parsed, text, groups, found, seen)]
    return found


def _unparsable(text: str, error: Exception) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return f"neither KEY=VALUE nor a YAML file{did_you_mean_key(key.split()[0] if key.split() else key)}"
    node = find(tuple(key.split(".")))
    if node is None and key not in GROUPS:
        return f"unknown key {key!r}{did_you_mean_key(key)}"
    if isinstance(error, RecursionError):
        return "no valid value: too many lists and mappings inside each other"
    cure = None
    if node is not None and "${" not in value:
        if value.startswith("[") and value.endswith("]"):
            cure = as_list(key, [item.strip() for item in value[1:-1].split(",")], node)
        elif takes_text(node, value):
            cure = override(key, value)
    return f"no valid value ({cut(str(error).splitlines()[0])})" + (f": quote it: {cure}" if cure else "")


def _add(given: Override, text: str, groups: Groups, found: Overrides, seen: dict[str, str]) -> list[str]:
    """Files one parsed override; returns its problems."""
    key = given.key_or_group
    refused = _refused(given, text)
    if refused:
        return [refused]
    value = given.value()
    if key in GROUPS and not isinstance(value, dict):
        if key in seen:
            return [f"given twice, first as {seen[key]}"]
        seen[key] = text
        problem = groups.wrong_choice(key, value)
        if not problem:
            found.choices[key] = (str(value), text)
        return [problem] if problem else []
    path = tuple(key.split("."))
    problems = []
    for leaf, item in leaves(path, value):
        clash = _clash(dotted(leaf), seen)
        if clash:
            problems.append(f"given twice, first as {clash}")
        else:
            seen[dotted(leaf) + "."] = text
            problem = unknown_key(leaf, len(path))
            problems += [problem] if problem else []
            if not problem:
                found.settings.append(Setting(leaf, item, text, partial(_typed, text, path)))
    return list(dict.fromkeys(problems))


def _refused(given: Override, text: str) -> str | None:
    """Why an override of Hydra's grammar is not taken here."""
    key = given.key_or_group
    if given.type in {OverrideType.ADD, OverrideType.FORCE_ADD}:
        return f"keys cannot be added{_offer(key) or ': write ' + shlex.quote(text.lstrip('+'))}"
    if given.type == OverrideType.DEL:
        return f"keys cannot be removed: set {key} to a value{_offer(key)}"
    if given.is_sweep_override():
        cure = as_list(key, text.partition("=")[2].split(","), find(tuple(key.split("."))) or {})
        return "one run has one value: several make a sweep, with -m" + (f" (a list is {cure})" if cure else "")
    if given.package is not None or "/" in key:
        return f"a group is chosen as GROUP=CHOICE{did_you_mean(key.split('/')[0], GROUPS)}"
    return None if key else f"no key before ={_offer(text[1:])}"


def _typed(text: str, key: KeyPath, path: KeyPath) -> str | None:
    """How the value at `path` stands in the override `text` of `key`."""
    return typed(text, path[len(key) :])


def _offer(key: str) -> str:
    return "" if key in all_keys() or key in GROUPS else did_you_mean_key(key)


def leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Every plain value below `path`; an empty mapping stands for itself."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves((*path, str(name)), item)
    else:
        yield path, value


def unknown_key(path: KeyPath, given: int = 1) -> str | None:
    """What is wrong with a path that the schema does not have; None if it has it."""
    for length in range(1, len(path) + 1):
        if find(path[:length]) is not None:
            continue
        parent = find(path[: length - 1])
        if parent is not None and not is_mapping(parent):
            return f"{dotted(path[: length - 1])} has no keys of its own: set it whole"
        wrong = dotted(path[: max(length, given)])
        return f"unknown key {wrong!r}{did_you_mean_key(wrong)}"
    return None


def _clash(leaf: str, seen: dict[str, str]) -> str | None:
    """The text of an earlier override of the same value, of what holds it, or of a part of it."""
    mine = leaf + "."
    return next((text for key, text in seen.items() if key.endswith(".") and _covers(key, mine)), None)


def _covers(key: str, other: str) -> bool:
    return key.startswith(other) or other.startswith(key)
