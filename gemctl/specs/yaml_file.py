"""YAML as plain JSON-like data with the line of every key, and all its problems at once.

The dialect is Hydra's: YAML 1.1 without dates, where 1e-3 is a number. Keys are unique strings. What would exhaust
memory or stack (aliases of aliases, deep nesting, numbers of a million digits) is refused before it is expanded.
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
NUMBER_TAGS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
MERGE_TAG = "tag:yaml.org,2002:merge"
MOST_CHARACTERS, MOST_VALUES, MOST_DEPTH, MOST_DIGITS = 1 << 24, 500_000, 64, 308
"""Limits of a file: characters, values (each alias counted in full), levels of mappings and lists, and digits of a
number (as many as the largest float64 has)."""


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml's, if available
    """SafeLoader in the dialect above."""


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads: strings that it would read as numbers are quoted."""


for _class in (Loader, Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in {f"{_TAG}timestamp", f"{_TAG}float"}]
        for _TAG in ("tag:yaml.org,2002:",)
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass
class YamlFile:
    """`data` is None if the text is not YAML; `lines` has every key and list item; `problems` start with file:line."""

    source: str
    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=lambda: {(): 1})
    problems: list[str] = field(default_factory=list)
    typed: dict[KeyPath, str] = field(default_factory=dict)  # source text of values other than strings: 1e5, off, 0x10
    broken: set[KeyPath] = field(default_factory=set)  # where `problems` are; (): the text is not YAML
    oversized: bool = False  # beyond a limit above: no other parser should be given it

    def at(self, path: KeyPath) -> str:
        """`file:line` of `path`, or of its nearest ancestor in the file."""
        while path not in self.lines:
            path = path[:-1]
        return f"{self.source}:{self.lines[path]}"


def read(path: str) -> YamlFile:
    """Parses a local file. Raises InputError if it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return parse(file.read(MOST_CHARACTERS + 1), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}") from error


def parse(text: str, source: str) -> YamlFile:
    """Parses `text`; `source` names it in problems. Never raises on bad YAML: see `problems`."""
    file = YamlFile(source)
    try:
        if len(text) > MOST_CHARACTERS:
            raise _Oversized(1, f"more than {MOST_CHARACTERS:,} characters")
        _check_depth(text)
        loader = Loader(text)
        root = loader.get_single_node()
        file.data = {} if root is None else _Walk(loader, file).value(root, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else text.count("\n") + 1
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        file.problems.append(f"{source}:{line}: not YAML: {what}")
        file.broken.add(())
    except _Oversized as error:
        file.data, file.oversized = None, True
        file.problems = [f"{source}:{error.line}: refused: {error}"]
        file.broken.add(())
    return file


class _Oversized(Exception):
    """The file exceeds a limit, at `line` first."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def _check_depth(text: str) -> None:
    """Reads only events, because composing nodes is recursive."""
    depth = 0
    for event in yaml.parse(text, Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise _Oversized(line, f"more than {MOST_DEPTH} levels of lists and mappings")


def dump(data: Any) -> str:
    """`data` as YAML in block style, keys in their order."""
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def quoted(text: str) -> str:
    """`text` in double quotes, on one line, as YAML reads it back."""
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def printable(text: str) -> str:
    """`text` on one line: unprintable characters, line breaks included, as escapes."""
    return "".join(char if char.isprintable() else _code(ord(char)) for char in text)


def _code(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Walk:
    """Turns YAML nodes into plain data, noting lines and problems."""

    def __init__(self, loader: Loader, file: YamlFile) -> None:
        self.loader, self.file = loader, file
        self.open: set[int] = set()  # nodes being built: an alias to one of them is a loop
        self.merged: dict[int, list[tuple[Any, Any]]] = {}  # entries of each mapping, with those merged into it
        self.values = 0

    def value(self, node: Any, path: KeyPath) -> Any:
        self.values += 1
        if self.values > MOST_VALUES:
            raise _Oversized(node.start_mark.line + 1, f"more than {MOST_VALUES:,} values, aliases counted in full")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self.open:
            self._problem(node, path, "contains itself")
            return None
        if node.tag not in PLAIN_TAGS:
            self._problem(node, path, f"tag {node.tag!r} is not supported")
        self.open.add(id(node))
        built = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        self.open.discard(id(node))
        return built

    def _scalar(self, node: Any, path: KeyPath) -> Any:
        if node.tag in NUMBER_TAGS and len(node.value) > MOST_DIGITS:
            self._problem(node, path, f"a number of {len(node.value):,} digits")
            return None
        try:
            value = self.loader.construct_object(node)
        except (ValueError, KeyError, OverflowError):  # !!int x, !!bool x
            self._problem(node, path, f"{node.value!r:.80} is not a valid {node.tag.rsplit(':', 1)[-1]}")
            return None
        if not isinstance(value, (str, int, float, bool, type(None))):
            self._problem(node, path, f"values of type {type(value).__name__} are not supported")
        if not isinstance(value, str):
            self.file.typed[path] = node.value
        return value

    def _sequence(self, node: Any, path: KeyPath) -> list[Any]:
        for index, item in enumerate(node.value):
            self.file.lines[(*path, index)] = item.start_mark.line + 1
        return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: Any, path: KeyPath) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == MERGE_TAG:
                continue
            line, name = key.start_mark.line + 1, _name(key)
            if name in seen:
                self._problem(key, (*path, name), f"given twice, first on line {seen[name]}")
            elif key.tag != "tag:yaml.org,2002:str":
                self._problem(key, (*path, name), "a key must be a string: quote it")
            seen.setdefault(name, line)
        built: dict[str, Any] = {}
        for key, value in self._entries(node, path):
            name = _name(key)
            self.file.lines[*path, name] = key.start_mark.line + 1
            built[name] = self.value(value, (*path, name))
        return built

    def _entries(self, node: Any, path: KeyPath) -> list[tuple[Any, Any]]:
        """Keys and values, those of `<<: *anchor` first; each key once, so that merges of merges stay small."""
        if id(node) not in self.merged:
            self.merged[id(node)] = []  # for a mapping that merges itself
            found: dict[str, tuple[Any, Any]] = {}
            for key, value in node.value:
                if key.tag != MERGE_TAG:
                    continue
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for source in reversed(sources):
                    if isinstance(source, yaml.MappingNode):
                        found |= {_name(key): (key, below) for key, below in self._entries(source, path)}
                    else:
                        self._problem(key, path, "<< takes a mapping or a list of mappings")
            found |= {_name(key): (key, value) for key, value in node.value if key.tag != MERGE_TAG}
            self.merged[id(node)] = list(found.values())
        return self.merged[id(node)]

    def _problem(self, node: Any, path: KeyPath, text: str) -> None:
        self.file.problems.append(f"{self.file.source}:{node.start_mark.line + 1}: {dotted(path)}: {text}")
        self.file.broken.add(path)


def _name(key: Any) -> str:
    """A key as text; keys that are lists or mappings are reported elsewhere."""
    return str(key.value) if isinstance(key, yaml.ScalarNode) else "?"


def overlap(path: KeyPath, other: KeyPath) -> bool:
    """True if one path contains the other, or they are equal."""
    shared = min(len(path), len(other))
    return path[:shared] == other[:shared]


def dotted(path: KeyPath) -> str:
    """`a.b.0` for ("a", "b", 0)."""
    return ".".join(map(str, path)) or "the file"
