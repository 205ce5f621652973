"""A JSON Schema in words: what a value must be, which keys exist; for all files and options that users write.

schema = inlined(TypeAdapter(FeatureSpec).json_schema())
wrong(find(schema, ("tables", 0, "rows")), 1)       # "must be an integer ≥ 2, not 1"
"""

import json
from typing import Any

from gemctl.specs.limits import INT64_MAX
from gemctl.specs.yaml_file import KeyPath

Node = dict[str, Any]
MOST_SHOWN = 200  # characters of a value in a message


def inlined(schema: Node) -> Node:
    """The schema (of non-recursive types) with every `$ref` followed; keys beside a `$ref` are kept."""
    definitions = schema.get("$defs", {})

    def follow(value: Any) -> Any:
        if isinstance(value, list):
            return [follow(item) for item in value]
        if not isinstance(value, dict):
            return value
        own = {key: follow(item) for key, item in value.items() if key not in {"$ref", "$defs"}}
        return {**follow(definitions[value["$ref"].rsplit("/", 1)[1]]), **own} if "$ref" in value else own

    found: Node = follow(schema)
    return found


def find(schema: Node, path: KeyPath) -> Node | None:
    """The schema of the value at `path`; None if there is no such key."""
    node: Node | None = schema
    for name in path:
        node = child(node, name) if node is not None else None
    return node


def child(node: Node, name: str | int) -> Node | None:
    """The schema of key `name` of a mapping (or of any item of a list); None if there is none."""
    found: list[Node] = []
    for option in options(node):
        if isinstance(name, int) and "items" in option:
            found.append(dict(option["items"]))
        elif name in option.get("properties", {}):
            found.append(dict(option["properties"][name]))
        elif isinstance(option.get("additionalProperties"), dict):
            found.append(dict(option["additionalProperties"]))
    if len(found) > 1:
        return {"anyOf": found}
    return found[0] if found else None


def options(node: Node) -> list[Node]:
    """The alternatives of a value; most have one."""
    below = node.get("anyOf", node.get("oneOf"))
    return [node] if below is None else [option for one in below for option in options(one)]


def kinds(node: Node) -> list[Node]:
    """The alternatives of a value that its key `kind` selects; none for other values."""
    found = options(node)
    return found if len(found) > 1 and all("kind" in option.get("properties", {}) for option in found) else []


def chosen(node: Node, value: Any) -> Node:
    """The alternative that the value's `kind` names; the node itself for other values."""
    kind = value.get("kind") if isinstance(value, dict) else None
    for option in kinds(node):
        words = option["properties"]["kind"]
        if kind in choices(words) or ("pattern" in words and "." in str(kind)):
            return option
    return node


def is_mapping(node: Node) -> bool:
    """True if the value has keys of its own."""
    return any(option.get("type") == "object" for option in options(node))


def choices(node: Node) -> list[str]:
    """The words that a value may be, if any."""
    words: list[str] = []
    for option in options(node):
        words += option.get("enum", [option["const"]] if "const" in option else [])
    return words


def wrong(node: Node, value: Any, typed: str | None = None) -> str:
    """The message for a value that `node` does not accept; `typed`: how it was written, if not as in JSON."""
    if isinstance(value, int) and value > INT64_MAX:
        return f"must be {describe(node)} below 2^63, not {shown(value)}"
    reason = node.get("refused", {}).get(value) if isinstance(value, str) else None
    text = shown(value) if typed is None else cut(typed)
    return f"must be {describe(node)}, not {text}" + (f": {reason}" if reason else "")


def shown(value: Any) -> str:
    """A value in a message: as JSON, cut if it is long."""
    if isinstance(value, int) and value.bit_length() > 1023:
        return f"a number of {value.bit_length():,} bits"  # Python refuses to print the largest
    return cut(json.dumps(value, ensure_ascii=False))


def cut(text: str) -> str:
    """`text`, or its beginning and its length."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}… ({len(text):,} characters)"


def describe(node: Node) -> str:
    """What a value must be, in words: `an integer ≥ 1 or auto`."""
    if kinds(node):
        return f"a mapping of kind {describe(child(node, 'kind') or {})}"
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
        count = f"{low} values" if low is not None and low == high else f"≥ {low} values" if low else "values"
        return f"a list of {count}, each {describe(node['items'])}"
    if kind == "object":
        if names := ", ".join(node.get("properties", {})):
            return f"a mapping with the keys {names}"
        below = node.get("additionalProperties")
        return f"a mapping of names to {describe(below)}" if isinstance(below, dict) else "a mapping"
    if "words" in node:
        return str(node["words"])
    if kind == "string" and "pattern" in node:
        return f"a string that matches {node['pattern']}"
    return {"string": "a non-empty string" if node.get("minLength") else "a string", "boolean": "true or false"}.get(
        str(kind), str(kind)
    )


def _bounds(node: Node) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[key]}" for key, sign in signs.items() if key in node and node[key] != INT64_MAX]
    if "multipleOf" in node:
        bounds.append(f"a multiple of {node['multipleOf']}")
    return " and ".join(bounds)
