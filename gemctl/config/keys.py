"""What the configuration's JSON Schema says: which keys there are, and which is meant by a wrong one.

    python -c "from gemctl.config.keys import json_schema; print(json_schema())"

The schema is the only list of keys: errors, suggestions and docs/reference.md all come from it.
"""

import dataclasses
import functools
import itertools
from typing import Any

from pydantic import TypeAdapter

from gemctl.config.nearest import edits, offer
from gemctl.config.schema import Config
from gemctl.specs import json_schema as words
from gemctl.specs.json_schema import Node, inlined, options
from gemctl.specs.yaml_file import KeyPath

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


def offer_keys(key: str) -> str:
    """The offer of the keys nearest to `key`, which is none: few edits first, then the same name in another group."""
    parts = key.lower().split(".")
    limit = min(3, max(1, len(parts[-1]) // 3))
    ranked = []
    for known in [*all_keys(), *GROUPS[-1:]]:
        others = known.lower().split(".")
        whole = edits(key.lower(), known.lower(), limit)
        moved = edits(parts[-1], others[-1], 1)
        # One edit of the whole key beats the same name elsewhere, which beats everything further away.
        cost = min(float(whole) if whole <= limit else 99.0, 1.5 + moved if moved <= 1 else 99.0)
        if cost < 99:
            ranked.append((cost, -_common_end(parts, others), known))
    ranked.sort()
    return offer([known for place, (cost, _, known) in enumerate(ranked) if place < 3 or cost == 1.5])


def _common_end(parts: list[str], others: list[str]) -> int:
    """Equal last segments."""
    pairs = zip(reversed(parts), reversed(others), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
