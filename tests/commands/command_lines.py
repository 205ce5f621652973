"""Seeded command lines of `gemctl train`, half of them edited once, and an oracle that judges them by the JSON Schema.

The oracle sees a line's structure, not its text: it composes the group files by plain YAML reading, sets the values,
and asks the `jsonschema` package. It shares no code with gemctl's composer.

Outside of the JSON Schema, and so kept legal here: products and divisors of the topology, table names, files that must
exist, what trains on this machine, divisors and windows of the model. Keys of these (UNFREE) are set to legal values
only; their names are edited freely.
"""

import copy
import functools
import json
import math
import random
import string
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from gemctl.config.compose import json_schema

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TOPOLOGIES: list[dict[str, Any]] = [
    {},
    {"launcher.ranks_per_node": 2},
    {"launcher.ranks_per_node": 8, "topology.dp_replicate": 4, "topology.dp_shard": 2, "topology.mp_shard": 8},
    {"topology.world_size": 4, "topology.dp_replicate": 1, "topology.dp_shard": "auto"},
    {"topology.dp_replicate": "auto", "topology.dp_shard": 4, "topology.ep": 1, "topology.mp_replicate": 1},
    {"topology.tables": {"user": "table_wise"}, "topology.table_sharding": "row_wise"},
]
UNFREE = (
    *("topology.", "launcher.", "data.spec", "data.train", "data.eval", "data.synthetic", "cluster."),
    *("model.heads", "model.layers", "model.event_types", "model.merge", "checkpoint.warm_start"),
)
CHOICES = {  # experiment=ml100k and data=ml100k read files that the test writes
    "experiment": ["synthetic", "ml100k"],
    "data": ["synthetic", "ml100k"],
    "precision": ["fp32", "bf16"],
    "topology": ["hsdp", "fsdp"],
    "train": ["default", "synthetic", "ml100k"],
    "model": ["gem_nano"],
    "checkpoint": ["default"],
}


@dataclass(frozen=True)
class Word:
    """`key=value` or `group=choice` (`choice` says which), or text that is no override at all (`malformed`).

    `edited`: what the single edit did; `original`: the key before a one-letter edit of it.
    """

    key: str
    value: Any
    choice: bool = False
    malformed: bool = False
    text: str = ""
    edited: str = ""
    original: str = ""

    def shown(self) -> str:
        """The command line's word."""
        return self.text or f"{self.key}={written(self.value)}"


@dataclass
class Line:
    words: list[Word]
    file: dict[str, Any] = field(default_factory=dict)  # dotted keys of FILE.yaml

    @property
    def edit(self) -> Word | None:
        return next((word for word in self.words if word.edited), None)


def written(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


class Schema:
    """The JSON Schema's leaves and nodes by dotted key."""

    def __init__(self) -> None:
        self.root = json_schema()
        self.leaves: dict[str, dict[str, Any]] = {}
        self.nodes: set[str] = set()
        self._walk(self.root, "")
        self.keys = sorted(self.nodes | set(self.leaves))
        self.validator = jsonschema.Draft202012Validator(self.root)

    def _deref(self, node: dict[str, Any]) -> dict[str, Any]:
        return self.root["$defs"][node["$ref"].split("/")[-1]] if "$ref" in node else node

    def _walk(self, node: dict[str, Any], prefix: str) -> None:
        for name, below in node["properties"].items():
            options = [self._deref(option) for option in below.get("anyOf", [below])]
            inner = next((option for option in options if "properties" in option), None)
            if inner is None:
                self.leaves[prefix + name] = below
            else:
                self.nodes.add(prefix + name)
                self._walk(inner, f"{prefix}{name}.")

    def options(self, key: str) -> list[dict[str, Any]]:
        leaf = self.leaves[key]
        return [self._deref(option) for option in leaf.get("anyOf", [leaf])]


class Generator:
    """Draws lines; everything comes from `seed`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.schema = Schema()
        self.free = [key for key in self.schema.leaves if not key.startswith(UNFREE)]
        # Hydra takes 0.1 s for each new set of choices, so there are some twenty of them.
        self.choices = [{g: self.random.choice(CHOICES[g]) for g in self._some(CHOICES, 2)} for _ in range(20)]

    def line(self, edit: bool) -> Line:
        """A valid line; with `edit`, one of its words is edited once, which may or may not leave it valid."""
        words = [Word(group, choice, choice=True) for group, choice in self.random.choice(self.choices).items()]
        values = {key: self.value(key) for key in self._some(self.free, 5)}
        values |= self.random.choice(TOPOLOGIES) | {"cluster.memory_gb": 1_000_000}
        if self.random.random() < 0.3 and all(word.value != "ml100k" for word in words):
            values["data.synthetic.users"] = 7
        # A file must not hide a choice of the same group wholly, so it has values of groups that are not chosen.
        kept = {"cluster", *(word.key for word in words)}
        movable = [key for key in values if "experiment" not in kept and key.split(".")[0] not in kept]
        file = {key: values.pop(key) for key in movable} if self.random.random() < 0.15 else {}
        words += [Word(key, value) for key, value in values.items()]
        self.random.shuffle(words)
        if edit:
            free = [place for place, word in enumerate(words) if word.key in self.free]  # their values are edited too
            place = self.random.choice(free if free and self.random.random() < 0.6 else range(len(words)))
            words[place : place + 1] = self.edit(words[place])
        return Line(words, file)

    def _some(self, things: Any, most: int) -> list[Any]:
        return self.random.sample(list(things), self.random.randint(0, most))

    def value(self, key: str) -> Any:
        """A valid value of a key."""
        option = self.random.choice(self.schema.options(key))
        if "enum" in option or "const" in option:
            return self.random.choice(option.get("enum", [option.get("const")]))
        match option["type"]:
            case "null":
                return None
            case "integer":
                step = option.get("multipleOf", 1)
                low = math.ceil(option.get("minimum", 0) / step)
                return step * self.random.randint(low, low + 7)
            case "number":
                low = max(option.get("minimum", 0.0), option.get("exclusiveMinimum", 0.0))
                return self.random.choice([low + 0.5, low + 0.25, low + 0.125, low + 5e-05])
            case "string":
                return self.random.choice(["abc", "run-7", "x_y.z"])
            case "array":
                count = option.get("minItems", self.random.randint(0, 3))
                return [self._item(option["items"]) for _ in range(count)]
        raise AssertionError(f"{key}: no value for {option}")

    def _item(self, node: dict[str, Any]) -> Any:
        if node["type"] != "number":
            return self.random.randint(1, 99)
        return self.random.choice([0.5, 0.9] if "exclusiveMinimum" in node else [0.5, 0.9, 0])

    def edit(self, word: Word) -> list[Word]:
        """The word after one edit (two words for a duplicate)."""
        edits = [self._key_typo, self._key_typo, self._key_typo, self._wrong_group, self._form, self._twice]
        if word.choice:
            edits += [self._choice_typo, self._choice_typo]
        elif word.key in self.free:
            edits += [self._value_typo, self._wrong_type, self._out_of_range]
        return self.random.choice(edits)(word)

    def typo(self, text: str) -> str:
        """One letter inserted, dropped, replaced, or swapped with its neighbour; never the same text."""
        while True:
            at = self.random.randrange(len(text))
            letter = self.random.choice(string.ascii_lowercase + "_")
            changed = self.random.choice(
                [
                    text[:at] + letter + text[at:],
                    text[:at] + text[at + 1 :],
                    text[:at] + letter + text[at + 1 :],
                    text[:at] + text[at + 1 : at + 2] + text[at] + text[at + 2 :],
                ]
            )
            if changed != text and changed and not changed.startswith(".") and not changed.endswith("."):
                return changed

    def _key_typo(self, word: Word) -> list[Word]:
        key = self.typo(word.key)
        if key in self.schema.keys and key.startswith(UNFREE):  # dp_shard → mp_shard: legal for the schema alone
            return self._key_typo(word)
        return [replace(word, key=key, choice=key in CHOICES, edited="key", original=word.key)]

    def _wrong_group(self, word: Word) -> list[Word]:
        parts = word.key.split(".")
        group = self.random.choice(["run", "train", "optim", "optim.dense", "model", "checkpoint", "topology"])
        key = f"{group}.{parts[-1]}"
        if key in self.schema.keys:
            return self._wrong_group(word)
        return [replace(word, key=key, choice=False, edited="group")]

    def _form(self, word: Word) -> list[Word]:
        shown = word.shown()
        text = self.random.choice(
            [shown.replace("=", "", 1), f"+{shown}", f"++{shown}", f"~{word.key}", f"{shown},{written(word.value)}",
             f"{word.key}=[1,2", f"{word.key}='x", word.key, f"{word.key}=(", f"{word.key} = 3"]
        )  # fmt: skip
        return [replace(word, malformed=True, text=text, edited="form")]

    def _twice(self, word: Word) -> list[Word]:
        return [word, replace(word, malformed=True, text=word.shown(), edited="twice")]

    def _choice_typo(self, word: Word) -> list[Word]:
        return [replace(word, value=self.typo(word.value), edited="choice")]

    def _value_typo(self, word: Word) -> list[Word]:
        if isinstance(word.value, str):
            return [replace(word, value=self.typo(word.value), edited="value")]
        if isinstance(word.value, int) and not isinstance(word.value, bool):
            digits = str(word.value)
            at = self.random.randrange(len(digits) + 1)
            return [replace(word, value=digits[:at] + self.random.choice("qxz") + digits[at:], edited="value")]
        return self._wrong_type(word)

    def _wrong_type(self, word: Word) -> list[Word]:
        value = self.random.choice(["x1", True, None, 1.5, 7, 3.0, [1], {"a": 1}, [], "auto", [0.5, "b"]])
        return [replace(word, value=value, edited="type")]

    def _out_of_range(self, word: Word) -> list[Word]:
        value = self.random.choice([0, -1, -0.5, 1, 2**63, 1e300, math.nan, math.inf, "", "a b", 6])
        return [replace(word, value=value, edited="range")]


def valid(line: Line, schema: Schema) -> bool:
    """True if the line's words compose to data that the JSON Schema admits."""
    if any(word.malformed for word in line.words):
        return False
    keys = [word.key for word in line.words]
    flat = [leaf for word in line.words for leaf in _leaves(word)]
    if len(set(keys)) < len(keys) or any(_holds(a, b) for a in flat for b in flat if a is not b):
        return False
    choices = {word.key: str(word.value) for word in line.words if word.choice}
    if any(not (CONFIGS / group / f"{choice}.yaml").is_file() for group, choice in choices.items()):
        return False
    data = composed(choices)
    values = [*line.file.items(), *((word.key, word.value) for word in line.words if not word.choice)]
    for key, value in values:
        if not _set(data, key.split("."), copy.deepcopy(value)):
            return False
    try:
        text = json.dumps(data, allow_nan=False)  # JSON has no NaN and no infinities
    except ValueError:
        return False
    return schema.validator.is_valid(json.loads(text))


def composed(choices: dict[str, str]) -> dict[str, Any]:
    """The chosen group files put together."""
    base = {
        group: choice for entry in _load("config")["defaults"] if entry != "_self_" for group, choice in entry.items()
    }
    experiment = _load(f"experiment/{choices.get('experiment', base['experiment'])}")
    chosen = base | {
        group.removeprefix("override /"): choice
        for entry in experiment.pop("defaults", [])
        for group, choice in entry.items()
    } | choices  # fmt: skip
    data = {group: _load(f"{group}/{choice}") for group, choice in chosen.items() if group != "experiment"}
    for group, values in experiment.items():
        data[group] |= values
    return data


def _load(name: str) -> dict[str, Any]:
    return copy.deepcopy(_read(name))


@functools.cache
def _read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")) or {}


def _leaves(word: Word) -> list[str]:
    if isinstance(word.value, dict) and word.value:
        return [f"{word.key}.{name}." for name in word.value]
    return [] if word.choice else [f"{word.key}."]


def _holds(a: str, b: str) -> bool:
    return a.startswith(b) or b.startswith(a)


def _set(data: dict[str, Any], path: list[str], value: Any) -> bool:
    for name in path[:-1]:
        if not isinstance(data.get(name), dict):
            data[name] = {}
        data = data[name]
    old = data.get(path[-1])
    data[path[-1]] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    return True


def one_edit_apart(a: str, b: str) -> bool:
    """True if one insertion, deletion, replacement or swap of neighbours makes b of a."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest_a, rest_b = a[at:], b[at:]
    return a != b and (
        rest_a[1:] == rest_b[1:]
        or rest_a[1:] == rest_b
        or rest_a == rest_b[1:]
        or (rest_a[:2] == rest_b[:2][::-1] and rest_a[2:] == rest_b[2:])
    )
