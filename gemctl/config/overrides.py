"""Overrides on the command line, `GROUP=CHOICE` and `KEY=VALUE`, parsed with Hydra's grammar; and sweeps over them.

gemctl train experiment=ml100k optim.dense.lr=0.002 'optim.dense.betas=[0.9,0.99]' 'run.name="2026"'
"""

import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from gemctl.config.check import accepts_text, as_list, override
from gemctl.config.groups import Groups
from gemctl.config.keys import GROUPS, all_keys, did_you_mean_key, find, unknown_key
from gemctl.specs.json_schema import cut
from gemctl.specs.yaml_file import KeyPath, dotted
from gemctl.suggest import did_you_mean


@dataclass(frozen=True)
class Setting:
    """A value for a key. `origin` is what errors quote: the override's text, or file:line and the key. `typed` returns
    the text as typed of a value at or below `path` that is not a string."""

    path: KeyPath
    value: Any
    origin: str
    typed: Callable[[KeyPath], str | None] = lambda path: None


@dataclass
class Overrides:
    """The parsed command line: choice and text by group, settings in order, and all problems."""

    choices: dict[str, tuple[str, str]] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)  # keys whose values are among the problems


def parse(texts: Iterable[str], groups: Groups) -> Overrides:
    """Parses all overrides and collects their problems."""
    parser = OverridesParser.create()
    found = Overrides()
    seen: dict[str, str] = {}
    for text in texts:
        try:
            parsed = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError) as error:  # ValueError: thousands of digits
            found.problems.append(f"{text}: {_unparsable(text, error)}")
            found.broken.add(tuple(text.partition("=")[0].split(".")))
            continue
        found.problems += [f"{text}: {problem}" for problem in _add(parsed, text, groups, found, seen)]
    return found


def _unparsable(text: str, error: Exception) -> str:
    key, equals, value = text.partition("=")
    if not equals and key in GROUPS:
        return f"has no choice: write {key}=CHOICE"
    if not equals and find(tuple(key.split("."))) is not None:
        return f"has no value: write {key}=VALUE"
    if not equals:
        return f"neither KEY=VALUE nor a YAML file{did_you_mean_key(key.split()[0] if key.split() else key)}"
    node = find(tuple(key.split(".")))
    if node is None and key not in GROUPS:
        return f"unknown key {key!r}{did_you_mean_key(key)}"
    if isinstance(error, RecursionError):
        return "invalid value: lists and mappings are nested too deeply"
    quoted = None
    if node is not None and "${" not in value:
        if value.startswith("[") and value.endswith("]"):
            quoted = as_list(key, [item.strip() for item in value[1:-1].split(",")], node)
        elif accepts_text(node, value):
            quoted = override(key, value)
    return f"invalid value ({cut(str(error).splitlines()[0])})" + (f": quote it: {quoted}" if quoted else "")


def _add(given: Override, text: str, groups: Groups, found: Overrides, seen: dict[str, str]) -> list[str]:
    """Adds a parsed override to `found`; returns its problems."""
    key = given.key_or_group
    refused = _refused(given, text)
    if refused:
        return [refused]
    value = given.value()
    if key in GROUPS and not isinstance(value, dict):
        if key in seen:
            return [f"given twice, first as {seen[key]}"]
        seen[key] = text
        problem = groups.wrong_choice(key, value)
        if not problem:
            found.choices[key] = (str(value), text)
        return [problem] if problem else []
    path = tuple(key.split("."))
    problems = []
    for leaf, item in leaves(path, value):
        clash = _clash(dotted(leaf), seen)
        if clash:
            problems.append(f"given twice, first as {clash}")
        else:
            seen[dotted(leaf) + "."] = text
            problem = unknown_key(leaf, len(path))
            problems += [problem] if problem else []
            if not problem:
                found.settings.append(Setting(leaf, item, text, partial(_typed, text, len(path))))
    return list(dict.fromkeys(problems))


def _refused(given: Override, text: str) -> str | None:
    """Why an override that Hydra's grammar allows is not allowed here."""
    key = given.key_or_group
    if given.type in {OverrideType.ADD, OverrideType.FORCE_ADD}:
        return f"keys cannot be added{_offer(key) or ': write ' + shlex.quote(text.lstrip('+'))}"
    if given.type == OverrideType.DEL:
        return f"keys cannot be removed: set {key} to a value{_offer(key)}"
    if given.is_sweep_override():
        listed = as_list(key, text.partition("=")[2].split(","), find(tuple(key.split("."))) or {})
        return "several values: use -m for a sweep over them" + (f" (a list is {listed})" if listed else "")
    if given.package is not None or "/" in key:
        return f"choose a group with GROUP=CHOICE{did_you_mean(key.split('/')[0], GROUPS)}"
    return None if key else f"the key before = is missing{_offer(text[1:])}"


def _offer(key: str) -> str:
    return "" if key in all_keys() or key in GROUPS else did_you_mean_key(key)


def leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Every plain value below `path`; an empty mapping counts as one."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves((*path, str(name)), item)
    else:
        yield path, value


def _clash(leaf: str, seen: dict[str, str]) -> str | None:
    """The text of an earlier override of the same value, of a mapping that contains it, or of a part of it."""
    mine = leaf + "."
    return next((text for key, text in seen.items() if key.endswith(".") and _covers(key, mine)), None)


def _covers(key: str, other: str) -> bool:
    return key.startswith(other) or other.startswith(key)


class _AsTyped(HydraOverrideVisitor):
    """Evaluates to the text of numbers and words as typed, quotes included."""

    def visitPrimitive(self, ctx: Any) -> str:
        return str(ctx.getText()).strip()


def _typed(override: str, depth: int, path: KeyPath) -> str | None:
    """The text of the value at `path` as typed in an override of a key of `depth` names; None if it is not a word."""
    tree = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(override)))).override()
    try:
        value = _AsTyped(None).visit(tree).value()
        for name in path[depth:]:
            value = value[name]
    except (AttributeError, KeyError, IndexError, TypeError):  # a function, whose text Hydra does not keep
        return None
    return value if isinstance(value, str) else None


def expand(texts: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep, the last override varying fastest. What Hydra cannot parse is kept.

    expand(["optim.dense.lr=1e-3,2e-3", "run.seed=range(0,3)", "train.steps=50"])      # six lists of three overrides
    """
    return [list(chosen) for chosen in itertools.product(*map(_sweep_values, texts))]


def _sweep_values(text: str) -> list[str]:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return [text]
    if not override.is_sweep_override():
        return [text]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
