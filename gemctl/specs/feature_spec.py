"""Reads a feature spec (YAML) strictly: every problem at once, each with file and line.

    gemctl data spec FILE.parquet -o spec.yaml      # writes a draft that `load` accepts as it is

Two passes: the schema (unknown keys, types, missing keys), then, if that holds, the checks between parts (tables that
exist, unique names, a row time if there are event sequences).
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import fsspec
from pydantic import TypeAdapter, ValidationError

from gemctl.errors import InputError
from gemctl.specs import yaml_file
from gemctl.specs.data import FeatureSpec, LabelSpec
from gemctl.specs.json_schema import Node, find, inlined, shown, wrong
from gemctl.specs.yaml_file import KeyPath, YamlFile, dotted
from gemctl.suggest import did_you_mean

Named = list[tuple[KeyPath, str]]

_MEMBERS = """
T_destination add_module apply bfloat16 buffers call_super_init children clear compile cpu cuda double dump_patches eval
extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu items keys load_state_dict
modules mtia named_buffers named_children named_modules named_parameters parameters pop register_backward_hook
register_buffer register_forward_hook register_forward_pre_hook register_full_backward_hook
register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module
register_parameter register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state
set_submodule share_memory state_dict to to_empty train training type update values xpu zero_grad
"""
OWN_PREFIX, OWN = "gemctl:", Path(__file__).resolve().parent.parent / "configs"
"""`gemctl:NAME` is the file NAME in gemctl's own configs, wherever it is installed."""

TAKEN = frozenset(_MEMBERS.split())
"""Members of PyTorch's modules. Tables and sequences become members too, so they need other names."""


def load(path: str | Path) -> FeatureSpec:
    """The spec at `path`: a file, any fsspec URL, or `gemctl:` and a file in configs/. Raises InputError with all
    problems.
    """
    source = str(path)
    return parse(read(source), source)


def parse(text: str, source: str) -> FeatureSpec:
    """The spec in `text`; `source` names it in problems."""
    file = yaml_file.parse(text, source)
    if file.problems:
        raise InputError(file.problems)
    if not isinstance(file.data, dict) or not file.data:
        raise InputError(f"{source}:1: a feature spec is a mapping of keys (name, tables, labels, …)")
    if file.data.get("format", 1) != 1:
        raise InputError(f"{file.at(('format',))}: format {shown(file.data['format'])}: this gemctl reads format 1")
    spec, problems = _validate(file)
    if spec is not None:
        problems += [f"{file.at(path)}: {text}" for path, text in _cross_checks(spec)]
    if problems or spec is None:
        raise InputError(problems)
    return spec


def scalar(text: str) -> str:
    """`text` such that `parse` reads the same string back: plain if that is safe, else in double quotes."""
    plain = text.replace("_", "").replace("-", "").isalnum() and yaml_file.parse(text, "").data == text
    return text if plain else yaml_file.quoted(text)


def read(source: str) -> str:
    """The text of the spec at `source`, as `load` reads it. Raises InputError if it cannot be read."""
    path = str(OWN / source.removeprefix(OWN_PREFIX)) if source.startswith(OWN_PREFIX) else source
    try:
        with fsspec.open(path, "rt", encoding="utf-8") as file:
            return str(file.read(yaml_file.MOST_CHARACTERS + 1))
    except FileNotFoundError as error:
        made = "`gemctl data import` and `gemctl data spec` write one"
        raise InputError(f"{source}: the feature spec can't be read: no such file; {made}") from error
    except Exception as error:  # every file system of fsspec has its own
        raise InputError(f"{source}: the feature spec can't be read: {error or type(error).__name__}") from error


def _validate(file: YamlFile) -> tuple[FeatureSpec | None, list[str]]:
    try:
        # through JSON: only there does strict mode accept mappings for dataclasses
        return _adapter().validate_json(json.dumps(file.data), strict=True), []
    except ValidationError as error:
        return None, [_explain(problem, file) for problem in error.errors()]


@cache
def _adapter() -> Any:
    return TypeAdapter(FeatureSpec)


@cache
def _schema() -> Node:
    return inlined(_adapter().json_schema())


def _explain(problem: Mapping[str, Any], file: YamlFile) -> str:
    path = tuple(problem["loc"])
    place = file.at(path)
    if problem["type"] == "unexpected_keyword_argument":
        return f"{place}: {dotted(path)}: unknown key{_nearest(str(path[-1]), _keys_at(path[:-1]))}"
    if problem["type"] == "missing":
        return f"{place}: {dotted(path)}: this key is required"
    node, typed = find(_schema(), path) or {}, file.typed.get(path)
    cure = f'; as a string: "{typed}"' if typed and {"type": "string"}.items() <= node.items() else ""
    return f"{place}: {dotted(path)}: {wrong(node, problem['input'], typed)}{cure}"


def _keys_at(path: KeyPath) -> list[str]:
    """Legal keys of the mapping at `path`."""
    kind: Any = FeatureSpec
    for key in path:
        hint = get_type_hints(kind).get(str(key)) if isinstance(key, str) else kind
        kind = next((t for t in (hint, *get_args(hint)) if isinstance(t, type) and is_dataclass(t)), kind)
    return [f.name for f in fields(kind)]


def _cross_checks(spec: FeatureSpec) -> Iterable[tuple[KeyPath, str]]:
    yield from _unique("table", [(("tables", i), table.name) for i, table in enumerate(spec.tables)])
    yield from _unique("sequence", [(("sequences", i), sequence.name) for i, sequence in enumerate(spec.sequences)])
    yield from _unique("label", [(("labels", i), label.name) for i, label in enumerate(spec.labels)])
    singles: Named = [(("categorical", i), feature.name) for i, feature in enumerate(spec.categorical)]
    singles += [(("dense", i), feature.name) for i, feature in enumerate(spec.dense)]
    yield from _unique("feature", singles)
    yield from _taken(spec)
    for i, sequence in enumerate(spec.sequences):
        inner: Named = [(("sequences", i, "ids", j), feature.name) for j, feature in enumerate(sequence.ids)]
        inner += [(("sequences", i, "floats", j), feature.name) for j, feature in enumerate(sequence.floats)]
        yield from _unique(f"feature of sequence {sequence.name!r}", inner)
    yield from _table_checks(spec)
    if not spec.labels:
        yield ("labels",), "labels: at least one task is needed"
    if not (spec.categorical or spec.dense or spec.sequences):
        yield (), "no feature: name some under categorical, dense or sequences"
    elif not (spec.categorical or spec.dense or spec.domain):
        yield (), "no feature besides the sequences: name the candidate, say, under categorical, dense or domain"
    if spec.sequences and spec.timestamp is None:
        yield ("sequences",), "timestamp: this key is required (the row's time) because there are sequences"
    for i, label in enumerate(spec.labels):
        yield from _leaks(spec, i, label)


def _unique(kind: str, named: Named) -> Iterable[tuple[KeyPath, str]]:
    count = Counter(name for _, name in named)
    seen: set[str] = set()
    for path, name in named:
        if not name:
            yield path, f"{dotted(path)}.name: empty"
        elif "." in name or "/" in name:
            yield path, f"{dotted(path)}.name: {name!r:.100}: '.' and '/' are not allowed in names"
        elif count[name] > 1 and name in seen:
            yield path, f"{dotted(path)}.name: {name!r:.100}: a {kind} of this name exists already"
        seen.add(name)


def _taken(spec: FeatureSpec) -> Iterable[tuple[KeyPath, str]]:
    for key, named in {"tables": spec.tables, "sequences": spec.sequences}.items():
        for i, name in enumerate(item.name for item in named):  # type: ignore[attr-defined]
            if name in TAKEN:
                yield (key, i), f"{key}.{i}.name: {name!r} is a reserved name in PyTorch: try {name + '_ids'!r}"


def _table_checks(spec: FeatureSpec) -> Iterable[tuple[KeyPath, str]]:
    names = [table.name for table in spec.tables]
    uses: Named = [(("categorical", i, "table"), f.table) for i, f in enumerate(spec.categorical)]
    for i, sequence in enumerate(spec.sequences):
        if not sequence.ids:
            yield ("sequences", i, "ids"), f"sequences.{i}.ids: at least one id feature is needed"
        uses += [(("sequences", i, "ids", j, "table"), feature.table) for j, feature in enumerate(sequence.ids)]
    for path, name in uses:
        if name not in names:
            yield path, f"{dotted(path)}: no table {name!r}{_nearest(name, names)}"
    used = {name for _, name in uses}
    for i, name in enumerate(names):
        if name not in used:
            yield ("tables", i), f"tables.{i}: no feature uses table {name!r}"
    unpooled = set(spec.sequence_tables())
    for i, feature in enumerate(spec.categorical):
        if feature.multi and feature.table in unpooled:
            yield (
                ("categorical", i),
                f"categorical.{i}: a multi-valued feature can't share table {feature.table!r} with a sequence "
                "(it is pooled, the sequence is not): give it a table of its own",
            )


def _leaks(spec: FeatureSpec, index: int, label: LabelSpec) -> Iterable[tuple[KeyPath, str]]:
    """Features must not read the label's or the mask's column, which would leak the answer."""
    hidden = {label.column or label.name, label.mask}
    features: Named = [
        (("categorical", i), feature.column or feature.name) for i, feature in enumerate(spec.categorical)
    ]
    features += [(("dense", i), feature.column or feature.name) for i, feature in enumerate(spec.dense)]
    for path, column in features:
        if column in hidden or column == spec.true_probability:
            yield path, f"{dotted(path)}: column {column!r} is a label's (labels.{index}) and cannot be a feature"


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    return did_you_mean(name, known) or f" (known: {', '.join(known) or 'none'})"
