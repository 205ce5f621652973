"""Composes the configuration from group choices, a user's file and overrides; and converts it to YAML and back.

    gemctl train my.yaml data=ml100k train.steps=500 --cfg

Later overrides earlier: the groups' files (Hydra), the experiment, FILE.yaml, KEY=VALUE on the command line. One
InputError has the problems of all of them.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from gemctl.config import keys
from gemctl.config.check import check
from gemctl.config.groups import Groups
from gemctl.config.interpolate import escape, independent, is_missing, resolve
from gemctl.config.overrides import Overrides, Setting, parse
from gemctl.config.schema import Config
from gemctl.config.user_file import UserFile, interpret
from gemctl.credentials import masked, refusal
from gemctl.errors import InputError
from gemctl.specs import yaml_file
from gemctl.specs.json_schema import describe
from gemctl.specs.yaml_file import KeyPath, dotted, overlap


class BadConfig(InputError):
    """`mended`: the configuration with defaults in place of the wrong values; None if that is not valid either."""

    def __init__(self, problems: list[str], mended: Config | None) -> None:
        super().__init__(problems)
        self.mended = mended


def compose(file: str | None, overrides: list[str], config_dir: str | None = None, *, replace: bool = False) -> Config:
    """The configuration of a command line. InputError has all problems.

    `replace`: a GROUP=CHOICE replaces everything that the file has for that group, instead of being overridden by it.
    """
    groups = Groups(config_dir)
    asked = parse(overrides, groups)
    own = interpret(yaml_file.read(file), groups) if file else UserFile()
    if replace:
        own.settings = [setting for setting in own.settings if setting.path[0] not in asked.choices]
    problems = own.problems + asked.problems
    choices = own.choices | {group: choice for group, (choice, _) in asked.choices.items()}
    data = groups.compose(choices)
    problems += _foreign(data, groups, choices)
    put_all(data, own.settings)
    problems += _without_effect(file, own, asked, groups, data)
    put_all(data, asked.settings)

    def origin(path: KeyPath) -> str:
        return _origin(path, own.settings + asked.settings) or _group_origin(path, groups, choices)

    config = _checked(data, origin, problems, own.broken | asked.broken, own.settings + asked.settings)
    values = _walk(dataclasses.asdict(config), ())
    exposed = {path: why for path, value in values if (why := refusal(str(value))) is not None}
    if exposed:
        raise InputError([masked(f"{origin(path)}: {why}") for path, why in exposed.items()])
    return config


def to_yaml(config: Config) -> str:
    """YAML with all keys; `from_yaml`, or `compose` with it as FILE, returns the same configuration."""
    return yaml_file.dump(escape(dataclasses.asdict(config)))


def from_yaml(text: str, source: str) -> Config:
    """The configuration in a standalone `text`: without groups, with the schema's defaults for missing keys."""
    file = yaml_file.parse(text, source)
    own = interpret(file, Groups())
    if not isinstance(file.data, dict):
        raise InputError(own.problems)
    if own.choices:
        own.problems.append(f"{file.at(('defaults',))}: defaults: not in a standalone configuration")
    data: dict[str, Any] = {}
    put_all(data, own.settings)

    def origin(path: KeyPath) -> str:
        return _origin(path, own.settings) or f"{file.at(path)}: {dotted(path)}"

    return _checked(data, origin, own.problems, own.broken, own.settings)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration: it accepts what `compose` accepts."""
    return keys.json_schema()


def put_all(data: dict[str, Any], settings: Iterable[Setting]) -> None:
    """Sets values in nested mappings, which are created as needed; `{}` empties only a mapping with free names."""
    for setting in settings:
        place: Any = data
        for name in setting.path[:-1]:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            place = place[name]
        last = setting.path[-1]
        if setting.value != {} or not isinstance(place.get(last), dict) or keys.has_free_names(setting.path):
            place[last] = setting.value


def _checked(
    data: dict[str, Any],
    origin: Callable[[KeyPath], str],
    problems: list[str],
    broken: set[KeyPath],
    settings: list[Setting],
) -> Config:
    """The typed configuration. BadConfig has one line per problem; `broken`: the keys that `problems` are about."""

    def typed(path: KeyPath) -> str | None:
        setting = _setting(path, settings)
        text = setting.typed(path) if setting else None
        return None if text is None or "${" in text else text

    unresolved, references = resolve(data)
    faults = {path: f"{origin(path)}: {text}" for path, text in unresolved.items()}
    unset = [path for path, value in _walk(data, ()) if is_missing(value)]
    reported = {path for path in unset if any(overlap(path, other) for other in broken)}
    faults |= {path: f"{dotted(path)} must be set: {_meaning(path)}" for path in unset if path not in reported}
    config, wrong = check(data, typed)
    known = [*unresolved, *unset, *broken - {()}]
    for path, text in wrong.items():
        if not any(overlap(path, other) for other in known):
            faults[path] = f"{origin(path)}: {text}"
    causes = independent([*broken, *faults], references)
    problems = problems + [faults[path] for path in causes if path in faults]
    if problems or config is None:
        mended = config or check(_without(data, [*wrong, *unset, *unresolved]), typed)[0]
        raise BadConfig(list(dict.fromkeys(problems)), mended)
    return config


def _without(data: dict[str, Any], places: list[KeyPath]) -> dict[str, Any]:
    """A copy of the data without these keys."""
    rest = copy.deepcopy(data)
    for path in places:
        holder: Any = rest
        for name in path[:-1]:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and path:
            holder.pop(path[-1], None)
    return rest


def _meaning(path: KeyPath) -> str:
    node = keys.find(path) or {}
    return str(node.get("description", describe(node)))


def _walk(value: Any, path: KeyPath) -> list[tuple[KeyPath, Any]]:
    if isinstance(value, dict):
        return [found for name, item in value.items() for found in _walk(item, (*path, name))]
    return [(path, value)]


def _foreign(data: dict[str, Any], groups: Groups, choices: dict[str, str]) -> list[str]:
    """Removes unknown keys from composed data; returns a problem for each, with the file that has it."""
    problems = []

    def prune(mapping: dict[str, Any], path: KeyPath) -> None:
        for name in list(mapping):
            wrong = keys.unknown_key((*path, name))
            if wrong:
                problems.append(f"{_group_origin((*path, name), groups, choices)}: {wrong}")
                del mapping[name]
            elif isinstance(mapping[name], dict):
                prune(mapping[name], (*path, name))

    prune(data, ())
    return problems


def _without_effect(
    file: str | None, own: UserFile, asked: Overrides, groups: Groups, merged: dict[str, Any]
) -> list[str]:
    """Choices on the command line that have no effect, as FILE.yaml overrides everything that they set."""
    if not own.settings:
        return []
    problems = []
    choices = own.choices | {group: choice for group, (choice, _) in asked.choices.items()}
    for group, (_, text) in asked.choices.items():
        without = {name: choice for name, choice in choices.items() if name != group or name in own.choices}
        without |= {group: own.choices[group]} if group in own.choices else {}
        other = groups.compose(without)
        if other == groups.compose(choices):
            continue
        put_all(other, own.settings)
        if other == merged:
            problems.append(f"{text}: has no effect: {file} overrides everything that it sets")
    return problems


def _origin(path: KeyPath, settings: list[Setting]) -> str | None:
    """What an error quotes as the source of a value; None if it is from a group."""
    setting = _setting(path, settings)
    if setting is None:
        return None
    deep = len(path) > len(setting.path) + 1 and dotted(path) not in setting.origin
    return f"{setting.origin}: {dotted(path)}" if deep else setting.origin


def _setting(path: KeyPath, settings: list[Setting]) -> Setting | None:
    """The last setting of the value at `path`, of a mapping that contains it, or of a part of it."""
    return next((setting for setting in reversed(settings) if overlap(setting.path, path)), None)


def _group_origin(path: KeyPath, groups: Groups, choices: dict[str, str]) -> str:
    """file:line and the key in the group file that has it; the key alone if none has."""
    for place, file in groups.files(choices):
        inner = path[len(place) :]
        if path[: len(place)] == place and inner in file.lines and inner:
            return f"{file.at(inner)}: {dotted(path)}"
    return dotted(path)
