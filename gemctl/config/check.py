"""The strict check of a composed configuration: one message per wrong value, with a correction to paste.

    gemctl train run.name=1e5     # error: run.name=1e5: must be a string …, not 1e5; as a string: run.name='"1e5"'

A correction keeps the text as it was typed, and is offered only if the schema accepts it.
"""

import json
import math
import re
import shlex
from collections.abc import Callable
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from pydantic import ValidationError

from gemctl.config.keys import adapter, find_in, tree
from gemctl.config.schema import Config
from gemctl.specs.json_schema import Node, child, choices, chosen, cut, describe, kinds, options, wrong
from gemctl.specs.yaml_file import KeyPath, dotted
from gemctl.suggest import did_you_mean

Typed = Callable[[KeyPath], str | None]
"""Returns the text as typed of a value that is not a string, if it is known."""


def check(data: dict[str, Any], typed: Typed = lambda path: None) -> tuple[Config | None, dict[KeyPath, str]]:
    """The typed configuration, or None and the problems by key."""
    found = {path: _beyond(data, path, value, typed) for path, value in _beyond_json(data, ())}
    try:
        config: Config | None = adapter().validate_json(json.dumps(_numbers(data)), strict=True)
    except ValidationError as error:
        config = None
        for problem in error.errors(include_url=False, include_context=False):
            # Pydantic reports each alternative of a union at a location below the value: keep one message.
            path = _place(data, problem["loc"])
            if problem["type"].startswith("union_tag") and isinstance(_get(data, path), dict):
                path = (*path, "kind")
            found.setdefault(path, _message(data, path, typed))
    return (None if found else config), found


def _beyond(data: dict[str, Any], path: KeyPath, value: Any, typed: Typed) -> str:
    numeric = any(option.get("type") in {"number", "integer"} for option in options(find_in(data, path) or {}))
    return f"must be a finite number, not {cut(typed(path) or repr(value))}" if numeric else _message(data, path, typed)


def _message(data: dict[str, Any], path: KeyPath, typed: Typed) -> str:
    node = find_in(data, path)
    if node is None:
        return f"unknown key {str(path[-1])!r}{did_you_mean(str(path[-1]), _keys(data, path[:-1]))}"
    try:
        value = _get(data, path)
    except KeyError:
        return f"must be set: {describe(node)}"
    if isinstance(value, str):
        return wrong(node, value) + did_you_mean(value, choices(node))
    text = typed(path) if isinstance(value, (int, float)) else None
    hint = ""
    if isinstance(value, list) and (strings := _as_strings(path, value, node, typed)):
        hint = f"; as strings: {strings}"
    if text is not None:
        hint = f"; as a string: {as_string(path, text)}" if accepts_text(node, text) else ""
        hint = hint or did_you_mean(text, choices(node))
    return wrong(node, value, text) + hint


def _as_strings(path: KeyPath, value: list[Any], node: Node, typed: Typed) -> str | None:
    """The override of the list with every item a string."""
    items = [item if isinstance(item, str) else typed((*path, index)) for index, item in enumerate(value)]
    words = [item for item in items if item is not None]
    return as_list(dotted(path), words, node) if len(words) == len(items) else None


def _keys(data: Any, path: KeyPath) -> list[str]:
    """The keys of the mapping at `path`."""
    return [name for option in options(find_in(data, path) or {}) for name in option.get("properties", {})]


def _get(data: Any, path: KeyPath) -> Any:
    for name in path:
        data = data[name]
    return data


def _place(data: Any, location: tuple[str | int, ...]) -> KeyPath:
    """Pydantic's location as a path in the data, or of a missing key; without the names of the alternatives."""
    path: KeyPath = ()
    node: Node = tree()
    for name in location:
        if kinds(node) and isinstance(data, dict):
            node = chosen(node, data)
            continue
        inside = name in data if isinstance(data, dict) else isinstance(data, list) and isinstance(name, int)
        below = child(node, name)
        if not inside:
            return (*path, name) if isinstance(data, dict) and below is not None else path
        data, node, path = data[name], below or {}, (*path, name)
    return path


def _numbers(value: Any) -> Any:
    """Whole floats as integers, as in JSON Schema: steps=1e3 is an integer."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _beyond_json(value: Any, path: KeyPath) -> list[tuple[KeyPath, Any]]:
    """Numbers that JSON cannot represent: NaN, infinities, and integers beyond float64."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for name, item in items for found in _beyond_json(item, (*path, name))]
    if isinstance(value, float) and not math.isfinite(value):
        return [(path, value)]
    too_large = isinstance(value, int) and value.bit_length() > 1023
    return [(path, f"{str(value)[:20]}…")] if too_large else []


def accepts_text(node: Node, text: str) -> bool:
    """Whether the schema accepts this string."""
    return any(_accepts(option, text) for option in options(node))


def _accepts(node: Node, text: str) -> bool:
    if "enum" in node or "const" in node:
        return text in node.get("enum", [node.get("const")])
    if node.get("type") != "string" or len(text) < node.get("minLength", 0):
        return False
    return "pattern" not in node or re.search(node["pattern"], text) is not None


def as_string(path: KeyPath, text: str) -> str:
    """The override that sets `path` to the string `text`, quoted for a shell; in a list, the quoted string alone."""
    return quoted(text) if any(isinstance(name, int) for name in path) else override(dotted(path), text)


def as_list(key: str, items: list[str], node: Node) -> str | None:
    """The override that sets `key` to a list of these strings or numbers, quoted for a shell. None if the schema does
    not accept it."""
    for option in options(node):
        if option.get("type") != "array" or len(items) < option.get("minItems", 0):
            continue
        if len(items) > option.get("maxItems", len(items)):
            continue
        if all(accepts_text(option["items"], item) for item in items):
            return f"{key}={shlex.quote('[' + ','.join(map(quoted, items)) + ']')}"
        if option["items"].get("type") in {"number", "integer"} and all(map(_in_bounds(option["items"]), items)):
            return f"{key}={shlex.quote('[' + ','.join(items) + ']')}"
    return None


def _in_bounds(node: Node) -> Callable[[str], bool]:
    low, above = node.get("minimum", -math.inf), node.get("exclusiveMinimum", -math.inf)
    high, below = node.get("maximum", math.inf), node.get("exclusiveMaximum", math.inf)

    def within(text: str) -> bool:
        try:
            number = float(text)
        except ValueError:
            return False
        return math.isfinite(number) and low <= number <= high and above < number < below

    return within


def override(key: str, text: str) -> str:
    """KEY=VALUE quoted for a shell, with the value in double quotes, so that it is a string."""
    return f"{key}={shlex.quote(quoted(text))}"


def quoted(text: str) -> str:
    """The text as a double-quoted string of Hydra's grammar."""
    return str(QuotedString(text, Quote.double).with_quotes())
