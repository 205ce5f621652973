"""What the configuration's JSON Schema says: which keys there are, and what a key's value must be, in words.

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
from gemctl.specs.limits import INT64_MAX
from gemctl.specs.yaml_file import KeyPath

Node = dict[str, Any]
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


def child(node: Node, name: str | int) -> Node | None:
    """The schema of key `name` of a mapping (or of any item of a list); None if there is none."""
    for option in options(node):
        if isinstance(name, int) and "items" in option:
            return resolved(option["items"])
        if name in option.get("properties", {}):
            return resolved(option["properties"][name])
        if isinstance(option.get("additionalProperties"), dict):
            return resolved(option["additionalProperties"])
    return None


def find(path: KeyPath) -> Node | None:
    """The schema of the value at `path`; None if there is no such key."""
    node: Node | None = json_schema()
    for name in path:
        node = child(node, name) if node is not None else None
    return node


def resolved(node: Node) -> Node:
    """`node` with its `$ref` followed; what stands beside the reference stays."""
    if "$ref" not in node:
        return node
    target: Node = json_schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def options(node: Node) -> list[Node]:
    """The alternatives of a value; one for most."""
    return [resolved(option) for option in node.get("anyOf", [node])]


@functools.cache
def all_keys() -> dict[str, Node]:
    """Every key, groups included, as `a.b.c`, with its schema, in the schema's order."""
    found: dict[str, Node] = {}

    def walk(node: Node, prefix: str) -> None:
        for option in options(node):
            for name, below in option.get("properties", {}).items():
                found[prefix + name] = resolved(below)
                walk(resolved(below), f"{prefix}{name}.")

    walk(json_schema(), "")
    return found


def is_mapping(node: Node) -> bool:
    """True if the value has keys of its own."""
    return any(option.get("type") == "object" for option in options(node))


def has_free_names(path: KeyPath) -> bool:
    """True if the mapping at `path` takes any name, as `topology.tables` does."""
    return isinstance((find(path) or {}).get("additionalProperties"), dict)


def choices(node: Node) -> list[str]:
    """The words that a value may be, if there are any."""
    words: list[str] = []
    for option in options(node):
        words += option.get("enum", [option["const"]] if "const" in option else [])
    return words


def describe(node: Node) -> str:
    """What a value must be, in words: `an integer ≥ 1 or auto`."""
    return " or ".join(_describe_one(option) for option in options(node))


def _describe_one(node: Node) -> str:
    if "const" in node or "enum" in node:
        words = choices(node)
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    kind = node.get("type")
    if kind in {"integer", "number"}:
        return " ".join(filter(None, ["an integer" if kind == "integer" else "a number", _bounds(node)]))
    if kind == "array":
        low, high = node.get("minItems"), node.get("maxItems")
        count = f"{low} values" if low is not None and low == high else "values"
        return f"a list of {count}, each {describe(resolved(node['items']))}"
    if kind == "object":
        names = ", ".join(node.get("properties", {}))
        return f"a mapping with the keys {names}" if names else f"a mapping of names to {describe(_values(node))}"
    if kind == "string" and "pattern" in node:
        return f"a string that matches {node['pattern']}"
    return {"string": "a non-empty string" if node.get("minLength") else "a string", "boolean": "true or false"}.get(
        str(kind), str(kind)
    )


def _values(node: Node) -> Node:
    return resolved(node["additionalProperties"])


def _bounds(node: Node) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[key]}" for key, sign in signs.items() if key in node and node[key] != INT64_MAX]
    if "multipleOf" in node:
        bounds.append(f"a multiple of {node['multipleOf']}")
    return " and ".join(bounds)


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
