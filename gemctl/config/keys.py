"""The keys of the configuration, from its JSON Schema, and suggestions for unknown ones.

    python -c "from gemctl.config.keys import json_schema; print(json_schema())"

Errors, suggestions and docs/reference.md all use this schema; there is no other list of keys.
"""

import dataclasses
import functools
from difflib import get_close_matches
from typing import Any

from pydantic import TypeAdapter

from gemctl.config.schema import Config
from gemctl.specs import json_schema as schemas
from gemctl.specs.json_schema import Node, inlined, is_mapping, options
from gemctl.specs.yaml_file import KeyPath, dotted
from gemctl.suggest import closest, offer

GROUPS = [*(group.name for group in dataclasses.fields(Config)), "experiment"]


@functools.cache
def adapter() -> TypeAdapter[Config]:
    """Pydantic's validator of Config."""
    return TypeAdapter(Config)


@functools.cache
def json_schema() -> Node:
    """The JSON Schema (2020-12) of a whole configuration."""
    schema: Node = adapter().json_schema()
    return schema


@functools.cache
def tree() -> Node:
    """The schema with every reference resolved."""
    return inlined(json_schema())


def find(path: KeyPath) -> Node | None:
    """The schema of the value at `path`; None if there is no such key."""
    return schemas.find(tree(), path)


def find_in(data: Any, path: KeyPath) -> Node | None:
    """The schema of the value at `path`; where there are alternatives, the one that the data choose by `kind`."""
    node: Node | None = tree()
    for name in path:
        node = schemas.child(schemas.chosen(node, data), name) if node is not None else None
        inside = name in data if isinstance(data, dict) else isinstance(data, list) and name in range(len(data))
        data = data[name] if inside else None
    return None if node is None else schemas.chosen(node, data)


@functools.cache
def all_keys() -> dict[str, Node]:
    """Every key, groups included, as `a.b.c`, with its schema, in order."""
    found: dict[str, Node] = {}

    def walk(node: Node, prefix: str) -> None:
        for option in options(node):
            for name, below in option.get("properties", {}).items():
                found[prefix + name] = below
                walk(below, f"{prefix}{name}.")

    walk(tree(), "")
    return found


def has_free_names(path: KeyPath) -> bool:
    """True if the mapping at `path` takes any names as keys, like `topology.tables`."""
    return isinstance((find(path) or {}).get("additionalProperties"), dict)


def did_you_mean_key(key: str) -> str:
    """`; did you mean X?` with the most similar key, and those of the same or the most similar name in any group."""
    known = [*all_keys(), "experiment"]
    by_name: dict[str, list[str]] = {}
    for one in known:
        by_name.setdefault(one.rpartition(".")[2], []).append(one)
    whole = closest(key, known, cutoff=0.85)
    name = closest(key.rpartition(".")[2], by_name)
    same_name = [one for found in name for one in get_close_matches(key, by_name[found], n=len(known), cutoff=0)]
    return offer(list(dict.fromkeys([*whole, *same_name])))


def unknown_key(path: KeyPath, given: int = 1) -> str | None:
    """Why there is no key `path`, whose first `given` names were given as one word; None if there is."""
    for length in range(1, len(path) + 1):
        if find(path[:length]) is not None:
            continue
        parent = find(path[: length - 1])
        if parent is not None and not is_mapping(parent):
            return f"{dotted(path[: length - 1])} has no nested keys: set it as a whole"
        wrong = dotted(path[: max(length, given)])
        return f"unknown key {wrong!r}{did_you_mean_key(wrong)}"
    return None
