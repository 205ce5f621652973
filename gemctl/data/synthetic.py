"""Writes the seeded synthetic click log: train and eval Parquet and their feature spec.

    gemctl data synth data/synthetic      # or by `gemctl train` when data.synthetic is set and the files are absent

The first `rows` rows are for training and the next `eval_rows` for evaluation, so evaluation rows are later in time.
Files get their names once they are complete; a second call with the same settings writes nothing.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gemctl import paths
from gemctl.config.schema import DataConfig, SyntheticConfig
from gemctl.data import synthetic_world as world
from gemctl.data.synthetic_world import ClickWorld, Events, Impressions
from gemctl.durable import sync_file, sync_folder
from gemctl.errors import InputError

ROW_GROUP = 20_000
_CHUNK = 5 * ROW_GROUP  # rows generated at once: about 100 MB
_METADATA = b"gemctl.synthetic"
_GENERATOR = 1  # increase it when the rows of a seed change


@dataclass(frozen=True)
class SyntheticLog:
    """What was written: files by role, the generator's settings, and the seconds that it took."""

    files: dict[str, str]
    settings: dict[str, int]
    seconds: float


def ensure(data: DataConfig) -> bool:
    """Writes the log that `data.synthetic` describes if it is absent; True if it did. InputError as `absent`."""
    if not absent(data) or data.synthetic is None:
        return False
    assert isinstance(data.train, str) and not isinstance(data.eval, list)  # `absent` has checked it
    write(data.synthetic, data.train, data.eval, data.spec)
    return True


def absent(data: DataConfig) -> bool:
    """True if `data.synthetic` describes a log and some of its files are missing.

    InputError if existing files have other settings or are not a synthetic log: user files are never replaced.
    """
    config, spec, spec_exists = data.synthetic, Path(data.spec), paths.exists(data.spec)
    if config is None:
        return False
    if isinstance(data.train, list) or isinstance(data.eval, list):
        raise InputError("data.train and data.eval: the synthetic log is one file each: set data.synthetic=null")
    wanted = [Path(path) for path in (data.train, data.eval) if path is not None]
    present = [path for path in wanted if paths.exists(path)]
    problems = [problem for path in present for problem in _made_with(path, config)]
    missing = present != wanted or not spec_exists
    if missing and spec_exists and spec.read_text(encoding="utf-8") != spec_text(config):
        missing_data = ", ".join(str(path) for path in wanted if path not in present)
        problems.append(
            f"{missing_data}: does not exist, and is not generated because {spec} is not the synthetic log's spec: "
            "set data.train and data.eval to your files and data.synthetic=null"
        )
    if problems:
        raise InputError(problems)
    return missing


def write(config: SyntheticConfig, train: str | Path, eval: str | Path | None, spec_path: str | Path) -> SyntheticLog:
    """Writes the files, replacing existing ones; without `eval` no evaluation rows."""
    start = time.monotonic()
    log = ClickWorld(config.users, config.items, config.seed)
    _write_rows(log, config, Path(train), 0, config.rows)
    if eval is not None:
        _write_rows(log, config, Path(eval), config.rows, config.rows + config.eval_rows)
    with _complete(Path(spec_path)) as path:
        path.write_text(spec_text(config), encoding="utf-8")
    files = {"train": train, "eval": eval, "spec": spec_path}
    return SyntheticLog(
        {role: str(path) for role, path in files.items() if path is not None}, asdict(config), time.monotonic() - start
    )


def spec_text(config: SyntheticConfig) -> str:
    """The log's feature spec."""
    return f"""# The synthetic click log's columns and roles (gemctl/data/synthetic.py).
name: synthetic
timestamp: time
true_probability: click_probability
domain: {{column: domain, count: {world.DOMAINS}}}
tables:
  - {{name: user, rows: {config.users + 1}}}
  - {{name: segment, rows: {world.SEGMENTS + 1}}}
  - {{name: item, rows: {config.items + 1}}}
  - {{name: category, rows: {world.CATEGORIES + 1}}}
  - {{name: tag, rows: {world.TAGS + 1}}}
  - {{name: slot, rows: {world.SLOTS + 1}}}
  - {{name: action, rows: {world.ACTIONS + 1}}}
categorical:
  - {{name: user, table: user}}
  - {{name: segment, table: segment}}
  - {{name: item, table: item}}
  - {{name: category, table: category}}
  - {{name: tags, table: tag, multi: true}}
  - {{name: slot, table: slot}}
dense:
  - {{name: price, log: true}}
  - {{name: hour_sin}}
  - {{name: hour_cos}}
sequences:
  - name: history
    timestamps: history_time
    max_length: {world.MAX_EVENTS}
    ids:
      - {{name: item, table: item, column: history_item}}
      - {{name: category, table: category, column: history_category}}
      - {{name: action, table: action, column: history_action}}
    floats:
      - {{name: dwell, column: history_dwell, log: true}}
labels:
  - {{name: click}}
  - {{name: conversion, mask: click}}  # only clicked rows can convert
"""


def _made_with(path: Path, config: SyntheticConfig) -> Iterator[str]:
    if path.is_dir():
        yield f"{path}: is a folder, not a synthetic log: set data.synthetic=null to train on it, or another path"
        return
    try:
        settings = json.loads((pq.read_schema(path).metadata or {}).get(_METADATA, b"null"))
    except (OSError, pa.ArrowInvalid) as error:
        yield f"{path}: not a readable Parquet file: {error}"
        return
    wanted = _settings(config)
    if settings is None:
        yield f"{path}: exists and is not a synthetic log: set data.synthetic=null to train on it, or another path"
    elif settings != wanted:
        differences = ", ".join(f"{k} {settings.get(k)}, not {v}" for k, v in wanted.items() if settings.get(k) != v)
        yield f"{path}: was written with {differences}: delete it, or set data.synthetic=null to train on it"


def _settings(config: SyntheticConfig) -> dict[str, int]:
    return {"generator": _GENERATOR, **asdict(config)}


def _write_rows(log: ClickWorld, config: SyntheticConfig, path: Path, start: int, stop: int) -> None:
    schema = _schema().with_metadata({_METADATA: json.dumps(_settings(config)).encode()})
    dictionary = [f.name for f in schema if f.name not in _PLAIN]
    with (
        _complete(path) as temporary,
        pq.ParquetWriter(
            temporary, schema, compression="zstd", use_dictionary=dictionary, write_statistics=["time"]
        ) as writer,
    ):
        for first in range(start, stop, _CHUNK):
            rows = log.impressions(np.arange(first, min(first + _CHUNK, stop)))
            writer.write_table(_table(log, rows, log.histories(rows)), row_group_size=ROW_GROUP)


_PLAIN = ("time", "hour_sin", "hour_cos", "click_probability", "history_dwell", "history_time")


def _schema() -> Any:
    return pa.schema(
        {
            "time": pa.int64(),
            "user": pa.int32(),
            "segment": pa.int32(),
            "item": pa.int32(),
            "category": pa.int32(),
            "tags": pa.list_(pa.int32()),
            "domain": pa.int32(),
            "slot": pa.int32(),
            "price": pa.float32(),
            "hour_sin": pa.float32(),
            "hour_cos": pa.float32(),
            "history_time": pa.list_(pa.int64()),
            "history_item": pa.list_(pa.int32()),
            "history_category": pa.list_(pa.int32()),
            "history_action": pa.list_(pa.int32()),
            "history_dwell": pa.list_(pa.float32()),
            "click": pa.bool_(),
            "conversion": pa.bool_(),
            "click_probability": pa.float32(),
        }
    )


def _table(log: ClickWorld, rows: Impressions, events: Events) -> Any:
    probability = log.click_probability(rows, log.interest(rows, events))
    clicks = log.clicks(rows, probability)
    angle = (rows.time % world.DAY) * (2 * np.pi / world.DAY)
    tags = np.arange(0, 2 * rows.row.size + 1, 2)
    present = events.present()
    offsets = np.concatenate([[0], np.cumsum(events.length)])
    columns: dict[str, Any] = {
        "time": rows.time,
        "user": rows.user,
        "segment": log.user_segment[rows.user],
        "item": rows.item,
        "category": log.item_category[rows.item],
        "tags": (tags, log.item_tags[rows.item].reshape(-1)),
        "domain": rows.domain,
        "slot": rows.slot,
        "price": log.item_price[rows.item],
        "hour_sin": np.sin(angle),
        "hour_cos": np.cos(angle),
        "history_time": (offsets, events.time[present]),
        "history_item": (offsets, events.item[present]),
        "history_category": (offsets, log.item_category[events.item[present]]),
        "history_action": (offsets, events.action[present]),
        "history_dwell": (offsets, events.dwell[present]),
        "click": clicks,
        "conversion": clicks & log.conversions(rows),
        "click_probability": probability,
    }
    schema = _schema()
    return pa.Table.from_arrays([_array(columns[f.name], f.type) for f in schema], schema=schema)


def _array(values: Any, kind: Any) -> Any:
    if isinstance(values, tuple):
        offsets, flat = values
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), _array(flat, kind.value_type))
    return pa.array(values.astype(kind.to_pandas_dtype()), kind)


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which is renamed to `path` if no error occurs."""
    temporary = path.with_name(f".{path.name}.partial")
    with paths.writing(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            sync_file(temporary)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
