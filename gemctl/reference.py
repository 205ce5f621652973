"""Writes docs/reference.md: every command, every group, every key, from the code that takes them.

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
from gemctl.specs.interaction import (
    CustomSpec,
    DcnSpec,
    DhenSpec,
    DotSpec,
    MlpSpec,
    TokenMixerSpec,
    WukongExpertsSpec,
    WukongSpec,
)
from gemctl.specs.json_schema import Node, child, describe, inlined, is_mapping, options
from gemctl.specs.model import LayerSpec, ModelConfig
from gemctl.specs.sequence import (
    BlockAttentionSpec,
    ClsSpec,
    GatedSpec,
    HspSpec,
    HstuSpec,
    InterFormerSpec,
    JaggedAttentionSpec,
    KunlunSpec,
    LastSpec,
    PmaSpec,
)
from gemctl.specs.yaml_file import KeyPath, dotted

_MISSING = object()

EXIT_CODES = {
    0: "done, or stopped by `gemctl stop`; what was done is saved",
    1: "the run failed; the message names the rank and the stage",
    2: "bad input; nothing was started, every problem is on a line of its own",
    3: "the plan does not fit; the message names the largest objects and the nearest change that fits",
    130: "interrupted by Ctrl-C, or ended by `gemctl stop --now`; what was done is saved (not after that, or a second "
    "Ctrl-C), the message says how to go on",
    143: "told to end by SIGTERM, or by SIGUSR1 where no scheduler brings the run back; else as 130",
}


def reference() -> str:
    """The whole page."""
    parts = [HEAD, _exit_codes(), *_commands(), _groups(), *_keys(), _resuming(), DATA_PATHS, *_feature_spec()]
    return "\n\n".join(parts) + "\n"


HEAD = """\
# Reference

Written by `make docs` from the schema and from each command's `--help`.

## Configurations

A configuration is composed in this order, later over earlier:

1. the chosen file of every group, `configs/GROUP/CHOICE.yaml` (Hydra);
2. the experiment, which chooses groups and sets values over them;
3. your own `FILE.yaml`;
4. `KEY=VALUE` on the command line.

`gemctl train --cfg` prints the result; `gemctl config export` writes it as a file that stands alone. Every key, choice
and value is checked before anything starts: all problems at once, each with the override's text or `file:line` and the
nearest right word.

```bash
gemctl train experiment=ml100k train.steps=50             # a choice and a value
gemctl train 'optim.dense.betas=[0.9,0.99]' data.eval=null
gemctl train 'run.name="2026"'                            # quotes inside make it a string
gemctl train 'topology.tables={user: table_wise}'
gemctl train experiment=parquet data.spec=clicks.yaml data.train=clicks.parquet
gemctl train my.yaml --config-dir my_configs model=wide   # my_configs/model/wide.yaml
```

A `FILE.yaml` has the keys below, nested, and may choose groups as Hydra does. `${key}` takes another key's value.

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
    intro = "`GROUP=CHOICE` takes `configs/GROUP/CHOICE.yaml`; `--config-dir DIR` adds the choices in `DIR/GROUP/`."
    return f"## Groups\n\n{intro}\n\n" + _table(["choice", "default", "what it is"], rows)


def _keys() -> Iterator[str]:
    yield "## Keys\n\nThe default is what `gemctl train` takes when nothing is said."
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


_BLOCKS: list[Any] = [
    KunlunSpec(), InterFormerSpec(), HstuSpec(), JaggedAttentionSpec(), BlockAttentionSpec(),
    PmaSpec(), HspSpec(), LastSpec(), ClsSpec(), GatedSpec(),
    WukongSpec(), WukongExpertsSpec(), DhenSpec(), MlpSpec(), DotSpec(), DcnSpec(), TokenMixerSpec(),
    CustomSpec("your.package.Block"),
]  # fmt: skip


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
`summary`(S) for every event sequence; X ← `interaction`([X ‖ H]). The formulas stand in the modules' docstrings below
`gemctl/model/`; [models.md](models.md) says more. A block is a mapping with its `kind`:

```yaml
layers:
  - repeat: 2
    sequence: {kind: kunlun, attention: {kind: jagged_flash_attention, window: 50}}
    summary: {kind: hsp, seeds: 16, tokens: 8}
    interaction: {kind: wukong, hidden: [256]}
```"""


def _resuming() -> str:
    intro = (
        "`gemctl resume RUN KEY=VALUE` changes keys of a run that goes on. A rule holds for a key, or for all keys of "
        "a group that have none of their own; `--allow KEY` takes keys and groups.\n\n"
        "For `data.spec`, `data.train` and `data.eval` the content counts: a new place of the same content is free, "
        "and files that have changed where they are count as a change of their key."
    )
    rows = [[f"`{rule.key}`", rule.kind.value, rule.reason] for rule in RULES]
    return f"## What a resumed run may change\n\n{intro}\n\n" + _table(["key", "change", "because"], rows)


DATA_PATHS = """\
## Data paths

`data.train`, `data.eval`, `gemctl eval --data` and `gemctl data spec` take the same paths, local ones and fsspec URLs:

| path | what is read |
|---|---|
| `clicks.parquet` | the file, whatever its name |
| `logs/clicks` | all files in the folder and in the folders below it |
| `logs/dt=2026-03-*/*.parquet` | what the glob matches; `**` stands for any number of folders |
| a list of these | all of them, in this order: `data.train='[base.parquet,logs/new]'`, `--data A --data B` |

- On the command line a value with `=` or `*` in it is quoted for the shell and within:
  `data.train='"logs/dt=2026-03-01"'`.
- A path that exists is taken as it is; only one that does not is read as a glob.
- In folders and globs, files count whose names end in `.parquet`, `.pq` or `.parq`, in any case. Other files are not
  read, and a line says so. Names that begin with `.` or `_` (`_SUCCESS`, `_temporary/`) are passed over, unless the
  glob itself asks for them.
- Files come in the order of their paths, folder by folder. Where the order matters (`data.order=time`), pad numbers
  with zeros: `hour=10` comes before `hour=9`.
- Links are followed. A file that is named twice, by links or otherwise (`latest` beside `dt=2026-03-02`), is refused:
  its rows would be read twice.
- The `key=value` folders of a Hive layout are folders like others. Their keys are not columns: a spec that needs one
  needs it in the files. (Spark drops the column of `partitionBy`; keep a copy of it, `day` beside `dt`, say.)"""


FEATURE_SPEC = """\
## Feature specs

`data.spec` is a YAML file that says what the columns of the Parquet files mean. `gemctl data spec PATH` drafts
one with a comment for every guess. Features that name the same `table` share it: let a candidate and the events of a
history share one wherever their ids mean the same things. Where `column` is null the column has the feature's name.

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

Types that say the same thing are read the same, and may differ from file to file: integers of any width and sign and
decimals without a fraction; `float16`, `float32`, `float64` and decimals with one; `string`, `large_string` and
`string_view`; every sort of list, of fixed size or not; and the values of a dictionary. A column of Arrow's `null` type
is one whose values are all missing. Anything else is refused before a run starts, with file and column.

| role | types | what they mean | a null |
| --- | --- | --- | --- |
| id, table with `ids: vocab` | integers | 0 … rows−2 are rows; every other one is unknown | unknown |
| id, table with `ids: hash` | integers or strings | hashed as 64 bits (modulo 2⁶⁴), or as UTF-8 bytes | unknown |
| `multi`, and `ids` of a sequence | lists of those | a null list is empty | unknown |
| `dense`, and `floats` of a sequence | numbers, booleans | float32; NaN is missing, infinity refused | 0 |
| label | numbers, booleans | 0 or 1, anything else is refused; NaN is missing | does not count |
| `mask` | numbers, booleans | 0 and NaN: the label does not count | does not count |
| `weight` | numbers, booleans | finite in float32 and ≥ 0, else refused | refused |
| `domain` | integers | 0 … count−1, else refused | refused |
| `true_probability` | numbers, booleans | 0 … 1, else refused; NaN is unknown | unknown |
| `timestamp`, `timestamps` | timestamps, dates, numbers | below | refused where there are events |

Ages are row time − event time: seconds between timestamps of any unit, to the nanosecond, and between dates, which
begin at midnight; in the data's own unit between numbers, integers exactly (those of int64's range) and floats as
float64. All row and event times of a run must be of one sort, in every sequence and file, for training and evaluation:
timestamps with a time zone (whatever zone), timestamps without one (Parquet's INT96 too, read to the microsecond),
dates, or numbers.
Which zone is meant where none is given, or which unit a number has beside timestamps, nobody can tell: such data are
refused. So are integers and strings in columns of one hashed table: 7 and "7" have different rows."""


def _feature_spec() -> Iterator[str]:
    yield FEATURE_SPEC
    schema = TypeAdapter(FeatureSpec).json_schema()
    for name, node in {"FeatureSpec": schema, **schema["$defs"]}.items():
        keys = node["properties"].items()
        rows = [[f"`{key}`", _spec_value(value), _spec_default(key, value, node)] for key, value in keys]
        title = "the whole" if name == "FeatureSpec" else f"an entry: {name.removesuffix('Spec').lower()}"
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
