"""What the configuration's JSON Schema says: which keys there are, and which is meant by a wrong one.

    python -c "from gemctl.config.keys import json_schema; print(json_schema())"

The schema is the only list of keys: errors, suggestions and docs/reference.md all come from it.
"""

import dataclasses
import functools
from difflib import get_close_matches
from typing import Any

from pydantic import TypeAdapter

from gemctl.config.schema import Config
from gemctl.specs import json_schema as words
from gemctl.specs.json_schema import Node, inlined, options
from gemctl.specs.yaml_file import KeyPath
from gemctl.suggest import closest, offer

GROUPS = [*(group.name for group in dataclasses.fields(Config)), "experiment"]


@functools.cache
def adapter() -> TypeAdapter[Config]:
    """Pydantic's checker of Config."""
    return TypeAdapter(Config)


@functools.cache
def json_schema() -> Node:
    """The JSON Schema (2020-12) of a whole configuration."""
    schema: Node = adapter().json_schema()
    return schema


@functools.cache
def tree() -> Node:
    """The same with every reference followed."""
    return inlined(json_schema())


def find(path: KeyPath) -> Node | None:
    """The schema of the value at `path`; None if there is no such key."""
    return words.find(tree(), path)


def find_in(data: Any, path: KeyPath) -> Node | None:
    """The same where the data's own `kind` chooses among alternatives."""
    node: Node | None = tree()
    for name in path:
        node = words.child(words.chosen(node, data), name) if node is not None else None
        inside = name in data if isinstance(data, dict) else isinstance(data, list) and name in range(len(data))
        data = data[name] if inside else None
    return None if node is None else words.chosen(node, data)


@functools.cache
def all_keys() -> dict[str, Node]:
    """Every key, groups included, as `a.b.c`, with its schema, in the schema's order."""
    found: dict[str, Node] = {}

    def walk(node: Node, prefix: str) -> None:
        for option in options(node):
            for name, below in option.get("properties", {}).items():
                found[prefix + name] = below
                walk(below, f"{prefix}{name}.")

    walk(tree(), "")
    return found


def has_free_names(path: KeyPath) -> bool:
    """True if the mapping at `path` takes any name, as `topology.tables` does."""
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
