"""YAML as plain JSON-like data with the line of every key, and all that is wrong with it at once.

The dialect is Hydra's: YAML 1.1 without dates, where 1e-3 is a number. Keys are strings, and no key comes twice.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gemctl.errors import InputError

KeyPath = tuple[str | int, ...]
# YAML 1.1 wants a dot and a signed exponent; Hydra's loader does not.
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9_]+(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


PLAIN_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml's, where it is built in
    """SafeLoader in the dialect above."""


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads: strings that look like numbers there are quoted."""


for _class in (Loader, Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in {f"{_TAG}timestamp", f"{_TAG}float"}]
        for _TAG in ("tag:yaml.org,2002:",)
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass
class YamlFile:
    """`data` is None when the text is no YAML; `lines` has every key and list item; `problems` start with file:line."""

    source: str
    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=lambda: {(): 1})
    problems: list[str] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)  # places that `problems` tell of; (): the text is no YAML

    def at(self, path: KeyPath) -> str:
        """`file:line` of `path`, or of its nearest ancestor in the file."""
        while path not in self.lines:
            path = path[:-1]
        return f"{self.source}:{self.lines[path]}"


def read(path: str) -> YamlFile:
    """Parses a local file. Raises InputError if it cannot be read."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}") from error


def parse(text: str, source: str) -> YamlFile:
    """Parses `text`; `source` names it in problems. Never raises on bad YAML: see `problems`."""
    file = YamlFile(source)
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        file.data = {} if root is None else _Walk(loader, file).value(root, ())
    except (yaml.YAMLError, ValueError) as error:  # ValueError: !!int x
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else text.count("\n") + 1
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        file.problems.append(f"{source}:{line}: not YAML: {what}")
        file.broken.add(())
    return file


def dump(data: Any) -> str:
    """`data` as YAML in block style, keys in their order."""
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Walk:
    """Turns YAML nodes into plain data, noting lines and problems."""

    def __init__(self, loader: Loader, file: YamlFile) -> None:
        self.loader, self.file = loader, file
        self.open: set[int] = set()  # nodes being built: an alias to one of them is a loop

    def value(self, node: Any, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            value = self.loader.construct_object(node)
            if not isinstance(value, (str, int, float, bool, type(None))):
                self._problem(node, path, f"a {type(value).__name__} is no plain value")
            return value
        if id(node) in self.open:
            self._problem(node, path, "holds itself")
            return None
        if node.tag not in PLAIN_TAGS:
            self._problem(node, path, f"tag {node.tag!r} is not taken")
        self.open.add(id(node))
        built = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        self.open.discard(id(node))
        return built

    def _sequence(self, node: Any, path: KeyPath) -> list[Any]:
        for index, item in enumerate(node.value):
            self.file.lines[(*path, index)] = item.start_mark.line + 1
        return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        own = [(key, value) for key, value in node.value if key.tag != "tag:yaml.org,2002:merge"]
        seen: dict[str, int] = {}
        for key, _ in own:
            line = key.start_mark.line + 1
            if key.value in seen:
                self._problem(key, (*path, str(key.value)), f"given twice, first in line {seen[key.value]}")
            elif key.tag != "tag:yaml.org,2002:str":
                self._problem(key, (*path, str(key.value)), "a key must be a string: quote it")
            seen.setdefault(str(key.value), line)
        self.loader.flatten_mapping(node)  # `<<: *anchor`; what is merged comes first
        built: dict[str, Any] = {}
        for key, value in node.value:
            below = (*path, str(key.value))
            self.file.lines[below] = key.start_mark.line + 1
            built[str(key.value)] = self.value(value, below)
        return built

    def _problem(self, node: Any, path: KeyPath, text: str) -> None:
        self.file.problems.append(f"{self.file.source}:{node.start_mark.line + 1}: {dotted(path)}: {text}")
        self.file.broken.add(path)


def overlap(path: KeyPath, other: KeyPath) -> bool:
    """True if one of the places holds the other, or they are the same."""
    shared = min(len(path), len(other))
    return path[:shared] == other[:shared]


def dotted(path: KeyPath) -> str:
    """`a.b.0` for ("a", "b", 0)."""
    return ".".join(map(str, path)) or "the file"
