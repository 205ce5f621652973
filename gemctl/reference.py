"""Writes docs/reference.md: every command, group and key, from the code that defines them.

python -m gemctl.reference > docs/reference.md
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import TypeAdapter

from gemctl.cli import COMMANDS, parser_of, usage
from gemctl.config.groups import BUILT_IN, Groups
from gemctl.config.keys import GROUPS, find, tree
from gemctl.config.resuming import RULES
from gemctl.config.schema import Config, DataConfig
from gemctl.specs.data import FeatureSpec
from gemctl.specs.interaction import CustomSpec, InteractionSpec
from gemctl.specs.json_schema import Node, child, describe, inlined, is_mapping, options
from gemctl.specs.model import LayerSpec, ModelConfig
from gemctl.specs.sequence import AttentionSpec, SequenceBlockSpec, SummarySpec
from gemctl.specs.unions import specs_of
from gemctl.specs.yaml_file import KeyPath, dotted

_MISSING = object()

EXIT_CODES = {
    0: "finished, or stopped by `gemctl stop` after saving",
    1: "the run failed; the message names the rank and the stage",
    2: "bad input; nothing was started; every problem has its own line",
    3: "the plan does not fit into memory; the message names the largest objects and the nearest change that would fit",
    130: "interrupted by Ctrl-C, or ended by `gemctl stop --now`; after one Ctrl-C the progress is saved and the "
    "message says how to resume; after `--now` or a second Ctrl-C, steps since the last checkpoint are lost",
    143: "as 130, by SIGTERM, or by SIGUSR1 if no scheduler requeues the run",
}


def reference() -> str:
    """The whole page."""
    parts = [HEAD, _exit_codes(), *_commands(), _groups(), *_keys(), _resuming(), DATA_PATHS, *_feature_spec()]
    return "\n\n".join(parts) + "\n"


HEAD = """\
# Reference

Written by `make docs` from the schema and from each command's `--help`.

## Configurations

A configuration is composed in this order; later entries override earlier ones:

1. one file per group, `configs/GROUP/CHOICE.yaml` (Hydra);
2. the experiment, which chooses groups and overrides their values;
3. your own `FILE.yaml`;
4. `KEY=VALUE` on the command line.

`gemctl train --cfg` prints the result; `gemctl config export` writes it as a standalone file. Every key, choice and
value is checked before anything starts, and all problems are reported at once, each with the override or `file:line`
and the nearest valid name.

```bash
gemctl train experiment=ml100k train.steps=50             # a choice and a value
gemctl train 'optim.dense.betas=[0.9,0.99]' data.eval=null
gemctl train 'run.name="2026"'                            # inner quotes make it a string
gemctl train 'topology.tables={user: table_wise}'
gemctl train experiment=parquet data.spec=clicks.yaml data.train=clicks.parquet
gemctl train my.yaml --config-dir my_configs model=wide   # my_configs/model/wide.yaml
```

A `FILE.yaml` has the keys below, nested, and may choose groups as in Hydra. `${key}` refers to another key's value.

```yaml
defaults:
  - data: parquet
  - precision: bf16
data:
  spec: clicks.yaml
  train: clicks.parquet
run:
  name: clicks-${model.name}
```"""


def _exit_codes() -> str:
    return "## Exit codes\n\n" + _table(["code", "meaning"], ([str(code), text] for code, text in EXIT_CODES.items()))


def _commands() -> Iterator[str]:
    yield f"## Commands\n\n```text\n{usage()}\n```"
    for name in COMMANDS:
        parser = parser_of(name)
        for leaf in dict.fromkeys([parser, *parser.leaves()]):
            yield f"### `{leaf.prog}`\n\n```text\n{leaf.format_help().rstrip()}\n```"


def _groups() -> str:
    groups = Groups()
    defaults = groups.chosen({})
    rows = []
    for group in GROUPS:
        for choice in groups.choices(group):
            text = (BUILT_IN / group / f"{choice}.yaml").read_text(encoding="utf-8")
            comment = next((line[2:] for line in text.splitlines() if line.startswith("# ") and "@" not in line), "")
            rows.append([f"`{group}={choice}`", "yes" if defaults[group] == choice else "", comment])
    intro = "`GROUP=CHOICE` selects `configs/GROUP/CHOICE.yaml`; `--config-dir DIR` adds the choices in `DIR/GROUP/`."
    return f"## Groups\n\n{intro}\n\n" + _table(["choice", "default", "what it is"], rows)


def _keys() -> Iterator[str]:
    yield "## Keys\n\nThe default is the value in `gemctl train` without arguments."
    composed = Groups().compose({})
    for group, node in tree()["properties"].items():
        rows = list(_rows((group,), node, composed))
        yield f"### `{group}`\n\n{_purpose((group,))}\n\n" + _table(["key", "value", "default", "meaning"], rows)
        if group == "model":
            yield from _model_blocks()


def _model_blocks() -> Iterator[str]:
    """The entries of model.layers, and every block that a layer chooses by kind."""
    yield BLOCKS
    schema = TypeAdapter(ModelConfig).json_schema()
    for made in [LayerSpec(), *_BLOCKS]:
        node = schema["$defs"][type(made).__name__]
        whole = inlined({**node, "$defs": schema["$defs"]})
        keys = [key for key in node["properties"] if key != "kind"]
        rows = [[f"`{key}`", describe(whole["properties"][key]), f"`{_made_default(getattr(made, key))}`",
                 node["properties"][key].get("description", "")] for key in keys]  # fmt: skip
        title = f"kind `{made.kind}`" if hasattr(made, "kind") else "an entry of `model.layers`"
        table = _table(["key", "value", "default", "meaning"], rows) if rows else "It has no keys."
        yield f"#### {title}\n\n{' '.join(node['description'].split())}\n\n{table}"


_UNIONS = (SequenceBlockSpec, AttentionSpec, SummarySpec, InteractionSpec)
_BLOCKS = [spec() for union in _UNIONS for spec in specs_of(union) if spec is not CustomSpec]
_BLOCKS.append(CustomSpec("your.package.Block"))


def _made_default(value: Any) -> str:
    """A default in words: a block by its kind."""
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return ", ".join(item.kind for item in value)
    return str(getattr(value, "kind", None) or json.dumps(value, ensure_ascii=False))


def _rows(path: KeyPath, node: Node, composed: dict[str, Any]) -> Iterator[list[str]]:
    for option in options(node):
        for name in option.get("properties", {}):
            below = (*path, name)
            key = child(option, name) or {}
            if is_mapping(key) and any("properties" in choice for choice in options(key)):
                yield [f"`{dotted(below)}`", "", "", _purpose(below)]
                yield from _rows(below, key, composed)
            else:
                default = f"`{json.dumps(_default(below, composed), ensure_ascii=False)}`"
                what = describe(key)
                if is_mapping(key.get("items", {})):
                    default, what = "", "a list of ≥ 1 entries, below"
                yield [f"`{dotted(below)}`", what, default, key.get("description", "")]


def _purpose(path: KeyPath) -> str:
    return " ".join(str((find(path) or {}).get("description", "")).split())


def _default(path: KeyPath, composed: Any) -> Any:
    """The composed value, else the schema's default; a JSON Schema has none for lists, but the dataclasses do."""
    default = (find(path) or {}).get("default")
    own: Any = asdict(Config(data=DataConfig(spec="", train="")))
    for name in path:
        composed = composed[name] if isinstance(composed, dict) and name in composed else _MISSING
        own = own.get(name) if isinstance(own, dict) else None
    if composed is not _MISSING:
        return composed
    return own if default is None else default


BLOCKS = """\
Each layer reads the tokens X and the event histories S: X_sum ← compressed X; S ← `sequence`(S, X_sum) and H ←
`summary`(S) for every event sequence; X ← `interaction`([X ‖ H]). The formulas are in the docstrings of
`gemctl/model/`; see also [models.md](models.md). A block is a mapping with its `kind`:

```yaml
layers:
  - repeat: 2
    sequence: {kind: kunlun, attention: {kind: jagged_flash_attention, window: 50}}
    summary: {kind: hsp, seeds: 16, tokens: 8}
    interaction: {kind: wukong, hidden: [256]}
```"""


def _resuming() -> str:
    intro = (
        "`gemctl resume RUN KEY=VALUE` changes settings of a run. A rule applies to a key, or to all keys of a group "
        "that have no rule of their own; `--allow` accepts keys and groups.\n\n"
        "For `data.spec`, `data.train` and `data.eval` the content counts: the same content at a new path is free, "
        "and changed content at the same path counts as a change of the key."
    )
    rows = [[f"`{rule.key}`", rule.kind.value, rule.reason] for rule in RULES]
    return f"## What a resumed run may change\n\n{intro}\n\n" + _table(["key", "change", "because"], rows)


DATA_PATHS = """\
## Data paths

`data.train`, `data.eval`, `gemctl eval --data` and `gemctl data spec` accept the same paths, local or fsspec URLs:

| path | what is read |
|---|---|
| `clicks.parquet` | the file, whatever its name |
| `logs/clicks` | all files in the folder and in the folders below it |
| `logs/dt=2026-03-*/*.parquet` | what the glob matches; `**` matches any number of folders |
| a list of these | all of them, in this order: `data.train='[base.parquet,logs/new]'`, `--data A --data B` |

- On the command line, a value that contains `=` or `*` needs quotes for the shell and quotes inside them:
  `data.train='"logs/dt=2026-03-01"'`.
- A path that exists is used as it is; only a path that does not exist is treated as a glob.
- In folders and globs, only files ending in `.parquet`, `.pq` or `.parq` (in any case) are read; a line names the
  others. Names that begin with `.` or `_` (`_SUCCESS`, `_temporary/`) are skipped unless the glob asks for them.
- Files are read in the order of their paths, folder by folder. If the order matters (`data.order=time`), pad numbers
  with zeros: `hour=10` sorts before `hour=9`.
- Links are followed. A file that is reached twice, by links or otherwise (`latest` beside `dt=2026-03-02`), is
  refused, because its rows would be read twice.
- The `key=value` folders of a Hive layout are ordinary folders. Their keys are not columns; a column that the spec
  needs must be in the files. (Spark drops the column of `partitionBy`: keep a copy, for example `day` beside `dt`.)"""


FEATURE_SPEC = """\
## Feature specs

`data.spec` is a YAML file that says what the columns of the Parquet files mean. `gemctl data spec PATH` drafts one and
comments on every guess. Features that name the same `table` share it: a candidate and the events of a history should
share one if their ids mean the same thing. If `column` is null, the column has the feature's name.

```yaml
name: clicks
tables:
  - {name: user, rows: 50001, ids: hash}
  - {name: item, rows: 2001}
categorical:
  - {name: user, table: user}
  - {name: item, table: item}
dense:
  - {name: price, log: true}
sequences:
  - name: seen
    timestamps: seen_time
    ids: [{name: item, table: item, column: seen_item}]
labels:
  - {name: clicked}
timestamp: time
```

### What a column may be

Equivalent types are read alike, and may differ from file to file: integers of any width and sign, and decimals with
scale 0; `float16`, `float32`, `float64` and other decimals; `string`, `large_string` and `string_view`; every kind of
list, fixed-size or not; and dictionary-encoded values. In a column of Arrow's `null` type all values are missing.
Anything else is refused before a run starts, with file and column.

| role | types | what they mean | a null |
| --- | --- | --- | --- |
| id, table with `ids: vocab` | integers | 0 … rows−2 are table rows; every other id is unknown | unknown |
| id, table with `ids: hash` | integers or strings | hashed as 64 bits (modulo 2⁶⁴), or as UTF-8 bytes | unknown |
| `multi`, and `ids` of a sequence | lists of those | a null list is empty | unknown |
| `dense`, and `floats` of a sequence | numbers, booleans | float32; NaN is missing, infinity refused | 0 |
| label | numbers, booleans | 0 or 1, anything else is refused; NaN is missing | does not count |
| `mask` | numbers, booleans | 0 and NaN: the label does not count | does not count |
| `weight` | numbers, booleans | finite in float32 and ≥ 0, else refused | refused |
| `domain` | integers | 0 … count−1, else refused | refused |
| `true_probability` | numbers, booleans | 0 … 1, else refused; NaN is unknown | unknown |
| `timestamp`, `timestamps` | timestamps, dates, numbers | below | refused where there are events |

An event's age is row time − event time. Between timestamps of any unit it is in seconds, exact to the nanosecond; so
it is between dates, which begin at midnight. Between numbers it is in the data's own unit, exact for integers within
int64's range, as float64 for floats. All row and event times of a run, in every sequence and file, for training and
evaluation, must be of one kind: timestamps with a time zone (any zone), timestamps without one (including Parquet's
INT96, read to the microsecond), dates, or numbers. A mixture is refused, because the missing zone or unit cannot be
known. Integers and strings in columns of one hashed table are refused too: 7 and "7" have different rows."""


def _feature_spec() -> Iterator[str]:
    yield FEATURE_SPEC
    schema = TypeAdapter(FeatureSpec).json_schema()
    for name, node in {"FeatureSpec": schema, **schema["$defs"]}.items():
        keys = node["properties"].items()
        rows = [[f"`{key}`", _spec_value(value), _spec_default(key, value, node)] for key, value in keys]
        title = "the whole file" if name == "FeatureSpec" else f"an entry: {name.removesuffix('Spec').lower()}"
        yield f"### {title}\n\n{node['description']}\n\n" + _table(["key", "value", "default"], rows)


def _spec_default(key: str, value: Node, entry: Node) -> str:
    return "must be set" if key in entry.get("required", []) else f"`{json.dumps(value.get('default', []))}`"


def _spec_value(node: Node) -> str:
    if "const" in node:
        return str(node["const"])
    inner = node.get("items", node)
    named = inner.get("$ref") or next((option["$ref"] for option in node.get("anyOf", []) if "$ref" in option), None)
    if named is None:
        return describe(node)
    entry = named.rsplit("/", 1)[1].removesuffix("Spec").lower()
    return f"a list of entries: {entry}" if "items" in node else f"an entry: {entry}, or null"


def _table(head: list[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(reference())
