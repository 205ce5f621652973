"""A user's FILE.yaml: values by key, and an optional `defaults:` list that chooses groups.

    defaults:
      - data: ml100k
      - precision: bf16
    train:
      steps: 500

Its values override those of the chosen groups, and the command line overrides it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from gemctl.config.groups import Groups
from gemctl.config.keys import GROUPS, find, unknown_key
from gemctl.config.overrides import Setting
from gemctl.specs.json_schema import is_mapping
from gemctl.specs.yaml_file import KeyPath, YamlFile, dotted, overlap
from gemctl.suggest import did_you_mean


@dataclass
class UserFile:
    """Choices by group, settings in the file's order, and all problems, each with file:line."""

    choices: dict[str, str] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)  # keys that are among the problems; (): the whole file


def interpret(file: YamlFile, groups: Groups) -> UserFile:
    """The choices and settings of a parsed file; unknown keys and choices become problems."""
    found = UserFile(problems=list(file.problems), broken=file.broken)
    if not isinstance(file.data, dict):
        if not file.problems:
            found.problems.append(f"{file.source}:1: a configuration is a mapping of keys, not {file.data!r}")
        return found
    data = dict(file.data)
    _defaults(data.pop("defaults", []), file, groups, found)
    _settings(data, (), file, found)
    return found


def _defaults(entries: Any, file: YamlFile, groups: Groups, found: UserFile) -> None:
    if not isinstance(entries, list):
        found.problems.append(f"{file.at(('defaults',))}: defaults: a list of GROUP: CHOICE")
        return
    for index, entry in enumerate(entries):
        if entry == "_self_" and index == len(entries) - 1:
            continue
        problem = _default(entry, groups, found)
        if problem:
            found.problems.append(f"{file.at(('defaults', index))}: defaults: {problem}")


def _default(entry: Any, groups: Groups, found: UserFile) -> str | None:
    if not isinstance(entry, dict) or len(entry) != 1:
        return f"{entry!r}: write GROUP: CHOICE (and _self_ only at the end)"
    ((name, choice),) = entry.items()
    group = name.removeprefix("override ").removeprefix("/")
    if group not in GROUPS:
        return f"unknown group {group!r}{did_you_mean(group, GROUPS)}"
    if group in found.choices:
        return f"group {group} is chosen twice"
    problem = groups.wrong_choice(group, choice)
    if problem is None:
        found.choices[group] = str(choice)
    return problem


def _settings(data: dict[str, Any], path: KeyPath, file: YamlFile, found: UserFile) -> None:
    for name, value in data.items():
        below = (*path, name)
        hurt = any(overlap(below, other) for other in file.broken)
        if below in file.broken or (hurt and not is_mapping(find(below) or {})):
            continue  # already among the problems
        if find(below) is None:
            found.problems.append(f"{file.at(below)}: {_unknown(below, file.typed.get(below) or value)}")
        elif isinstance(value, dict) and value and is_mapping(find(below) or {}):
            _settings(value, below, file, found)
        elif not hurt:
            found.settings.append(Setting(below, value, f"{file.at(below)}: {dotted(below)}", file.typed.get))


def _unknown(path: KeyPath, value: Any) -> str | None:
    nested = tuple(dotted(path).split("."))
    if len(nested) > len(path) and find(nested) is not None:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"key {path[-1]!r}: in YAML write it nested, as {': {'.join(nested)}: {text}{'}' * (len(nested) - 1)}"
    return unknown_key(path)
