"""`${key}` in values, resolved by OmegaConf over the merged configuration; `???` marks a value to be set."""

import re
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gemctl.specs.yaml_file import KeyPath

Problem = tuple[KeyPath, str]


def resolve(data: dict[str, Any]) -> list[Problem]:
    """Replaces every interpolation in `data` by its value; returns those that have none."""
    found = list(_interpolated(data, ()))
    if not found:
        return []
    tree = OmegaConf.create(data)
    problems = []
    for path in found:
        place, node = data, tree
        for name in path[:-1]:
            place, node = place[name], node[name]
        try:
            value = node[path[-1]]
            place[path[-1]] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            problems.append((path, str(error).splitlines()[0]))
    return problems


def escape(value: Any) -> Any:
    """`value` with each `${` written so that `resolve` gives it back as it is."""
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def is_missing(value: Any) -> bool:
    """True for Hydra's mark of a value that must be set."""
    return isinstance(value, str) and value == "???"


def _interpolated(value: Any, path: KeyPath) -> Any:
    if isinstance(value, (dict, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _interpolated(item, (*path, name))
    elif isinstance(value, str) and "${" in value:
        yield path
