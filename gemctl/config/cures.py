"""What a user can paste in place of a wrong value, with what was typed kept as it was.

    gemctl train run.name=1e5     # error: run.name=1e5: must be a string …, not 1e5; as a string: run.name='"1e5"'

A cure is told only where the schema takes it.
"""

import math
import re
import shlex
from collections.abc import Callable
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from gemctl.specs.json_schema import Node, options
from gemctl.specs.yaml_file import KeyPath, dotted


class _AsTyped(HydraOverrideVisitor):
    """Builds values of the text of numbers and words, quotes and all."""

    def visitPrimitive(self, ctx: Any) -> str:
        return str(ctx.getText()).strip()


def typed(override: str, inner: KeyPath) -> str | None:
    """How the value at `inner` of the override's own value was typed; None where it was no plain word."""
    tree = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(override)))).override()
    try:
        value = _AsTyped(None).visit(tree).value()
        for name in inner:
            value = value[name]
    except (AttributeError, KeyError, IndexError, TypeError):  # a function, of which the text is not kept
        return None
    return value if isinstance(value, str) else None


def takes_text(node: Node, text: str) -> bool:
    """Whether the schema takes this string."""
    return any(_takes(option, text) for option in options(node))


def _takes(node: Node, text: str) -> bool:
    if "enum" in node or "const" in node:
        return text in node.get("enum", [node.get("const")])
    if node.get("type") != "string" or len(text) < node.get("minLength", 0):
        return False
    return "pattern" not in node or re.search(node["pattern"], text) is not None


def as_string(path: KeyPath, text: str) -> str:
    """The override that gives the string `text` at `path`, for a shell; inside a list, the string alone."""
    return quoted(text) if any(isinstance(name, int) for name in path) else override(dotted(path), text)


def as_list(key: str, items: list[str], node: Node) -> str | None:
    """The override that gives a list of these texts, for a shell: of strings, or of numbers. None where the schema
    takes no such list."""
    for option in options(node):
        if option.get("type") != "array" or len(items) < option.get("minItems", 0):
            continue
        if len(items) > option.get("maxItems", len(items)):
            continue
        if all(takes_text(option["items"], item) for item in items):
            return f"{key}={shlex.quote('[' + ','.join(map(quoted, items)) + ']')}"
        if option["items"].get("type") in {"number", "integer"} and all(map(_in_bounds(option["items"]), items)):
            return f"{key}={shlex.quote('[' + ','.join(items) + ']')}"
    return None


def _in_bounds(node: Node) -> Callable[[str], bool]:
    low, above = node.get("minimum", -math.inf), node.get("exclusiveMinimum", -math.inf)
    high, below = node.get("maximum", math.inf), node.get("exclusiveMaximum", math.inf)

    def takes(text: str) -> bool:
        try:
            number = float(text)
        except ValueError:
            return False
        return math.isfinite(number) and low <= number <= high and above < number < below

    return takes


def override(key: str, text: str) -> str:
    """KEY=VALUE for a shell, with the value in double quotes: a string whatever it looks like."""
    return f"{key}={shlex.quote(quoted(text))}"


def quoted(text: str) -> str:
    """A string of Hydra's grammar in double quotes."""
    return str(QuotedString(text, Quote.double).with_quotes())
