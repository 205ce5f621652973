"""The strict check of composed data, as JSON has it: every wrong value in one line, by place."""

import json
import math
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from gemctl.config.cures import as_list, as_string, takes_text
from gemctl.config.keys import adapter, find_in, tree
from gemctl.config.schema import Config
from gemctl.specs.json_schema import Node, child, choices, chosen, cut, describe, kinds, options, wrong
from gemctl.specs.yaml_file import KeyPath, dotted
from gemctl.suggest import did_you_mean

Typed = Callable[[KeyPath], str | None]
"""How a value that is no string was typed, where that is known."""


def check(data: dict[str, Any], typed: Typed = lambda path: None) -> tuple[Config | None, dict[KeyPath, str]]:
    """The typed configuration, or None and what is wrong, by place."""
    found = {path: _beyond(data, path, value, typed) for path, value in _beyond_json(data, ())}
    try:
        config: Config | None = adapter().validate_json(json.dumps(_numbers(data)), strict=True)
    except ValidationError as error:
        config = None
        for problem in error.errors(include_url=False, include_context=False):
            # A union reports each alternative below the value's own place: one line says what all of them want.
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
    if isinstance(value, list) and (cure := _as_strings(path, value, node, typed)):
        hint = f"; as strings: {cure}"
    if text is not None:
        hint = f"; as a string: {as_string(path, text)}" if takes_text(node, text) else ""
        hint = hint or did_you_mean(text, choices(node))
    return wrong(node, value, text) + hint


def _as_strings(path: KeyPath, value: list[Any], node: Node, typed: Typed) -> str | None:
    """The list with what is no string in it as one."""
    items = [item if isinstance(item, str) else typed((*path, index)) for index, item in enumerate(value)]
    words = [item for item in items if item is not None]
    return as_list(dotted(path), words, node) if len(words) == len(items) else None


def _keys(data: Any, path: KeyPath) -> list[str]:
    """Names that the mapping at `path` takes."""
    return [name for option in options(find_in(data, path) or {}) for name in option.get("properties", {})]


def _get(data: Any, path: KeyPath) -> Any:
    for name in path:
        data = data[name]
    return data


def _place(data: Any, location: tuple[str | int, ...]) -> KeyPath:
    """The part of pydantic's location that lies in the data; a missing key counts. A kind's own name is left out."""
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
    """Whole floats as integers, as JSON Schema counts them: steps=1e3 is an integer."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _beyond_json(value: Any, path: KeyPath) -> list[tuple[KeyPath, Any]]:
    """Numbers that JSON does not have: NaN, infinities and what a float64 cannot hold."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for name, item in items for found in _beyond_json(item, (*path, name))]
    if isinstance(value, float) and not math.isfinite(value):
        return [(path, value)]
    too_large = isinstance(value, int) and value.bit_length() > 1023
    return [(path, f"{str(value)[:20]}…")] if too_large else []
