"""Writes logs with the history lengths and table sizes of the one-GPU experiments.

    python -m gemctl.bench.log kunlun_1gpu            # data/kunlun_1gpu: train.parquet and spec.yaml
    gemctl train experiment=kunlun_1gpu

Ids, times and labels are random: the logs are for measuring speed and memory; there is nothing to learn. Row groups are
functions of their number and the seed. Lengths are log-normal, cut at the longest; ids follow a power law.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

GROUP = 4_000  # rows per row group
START, SECONDS_PER_ROW = 1_700_000_000, 2
SMALL = {"segment": 40, "category": 64, "tag": 200, "slot": 8, "action": 3}  # ids of the small tables
DOMAINS = 3


@dataclass(frozen=True)
class Shape:
    """`mean` events per row before the cut at `longest`; `sigma` of their logarithm; sizes of the large tables."""

    rows: int
    mean: float
    sigma: float
    longest: int
    items: int
    users: int


SHAPES = {
    "gem_1gpu_long": Shape(rows=16_000, mean=1050, sigma=0.8, longest=4096, items=800_000, users=200_000),
    "gem_1gpu_short": Shape(rows=160_000, mean=26, sigma=0.5, longest=256, items=800_000, users=200_000),
    "kunlun_1gpu": Shape(rows=32_000, mean=525, sigma=0.8, longest=4096, items=8_000_000, users=2_000_000),
    "tokenmixer_1gpu": Shape(rows=160_000, mean=26, sigma=0.5, longest=256, items=8_000_000, users=2_000_000),
}


def seq_lengths(shape: Shape, rows: int, seed: int) -> NDArray[np.int64]:
    """int64 [rows]: events of each row, 0 to `shape.longest`."""
    draw = np.random.default_rng(seed)
    normal = draw.normal(math.log(shape.mean) - shape.sigma**2 / 2, shape.sigma, rows)
    return np.minimum(np.rint(np.exp(normal)), shape.longest).astype(np.int64)


def write(shape: Shape, folder: Path, seed: int = 0) -> tuple[int, int]:
    """Writes train.parquet and spec.yaml; returns rows and events."""
    folder.mkdir(parents=True, exist_ok=True)
    events, writer = 0, None
    for first in range(0, shape.rows, GROUP):
        rows = min(GROUP, shape.rows - first)
        lengths = seq_lengths(shape, rows, seed + first)
        table = pa.table(dict(_columns(shape, first, lengths, np.random.default_rng([seed, first]))))
        writer = writer or pq.ParquetWriter(folder / "train.parquet", table.schema, compression="none")
        writer.write_table(table, row_group_size=GROUP)
        events += int(lengths.sum())
    assert writer is not None
    writer.close()
    (folder / "spec.yaml").write_text(spec_text(shape), encoding="utf-8")
    return shape.rows, events


def _columns(
    shape: Shape, first: int, lengths: NDArray[np.int64], draw: np.random.Generator
) -> Iterator[tuple[str, object]]:
    rows, events = len(lengths), int(lengths.sum())
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)

    def ids(below: int, count: int) -> NDArray[np.int32]:
        return (draw.random(count) ** 3 * below).astype(np.int32)

    def lists(values: NDArray[np.generic]) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))

    time = START + SECONDS_PER_ROW * (first + np.arange(rows))
    before = np.repeat(offsets[1:].astype(np.int64), lengths) - np.arange(events)
    yield "time", time
    yield "user", ids(shape.users, rows)
    yield "item", ids(shape.items, rows)
    for name in ("segment", "category", "slot"):
        yield name, ids(SMALL[name], rows)
    tags = pa.array(np.arange(0, 2 * rows + 1, 2, dtype=np.int32))
    yield "tags", pa.ListArray.from_arrays(tags, pa.array(ids(SMALL["tag"], 2 * rows)))
    yield "domain", ids(DOMAINS, rows)
    for name in ("price", "hour_sin", "hour_cos"):
        yield name, draw.random(rows, np.float32)
    yield "history_time", lists(np.repeat(time, lengths) - 977 * before - draw.integers(0, 900, events))
    yield "history_item", lists(ids(shape.items, events))
    yield "history_category", lists(ids(SMALL["category"], events))
    yield "history_action", lists(ids(SMALL["action"], events))
    yield "history_dwell", lists(60 * draw.random(events, np.float32))
    yield "click", draw.random(rows) < 0.27
    yield "conversion", draw.random(rows) < 0.1


def spec_text(shape: Shape) -> str:
    """The log's feature spec."""
    sizes = {"user": shape.users, "item": shape.items, **SMALL}
    tables = "\n".join(f"  - {{name: {name}, rows: {ids + 1}}}" for name, ids in sizes.items())
    single = "\n".join(
        f"  - {{name: {name}, table: {name}}}" for name in ("user", "item", "segment", "category", "slot")
    )
    return f"""name: bench_log
timestamp: time
domain: {{column: domain, count: {DOMAINS}}}
tables:
{tables}
categorical:
{single}
  - {{name: tags, table: tag, multi: true}}
dense:
  - {{name: price, log: true}}
  - {{name: hour_sin}}
  - {{name: hour_cos}}
sequences:
  - name: history
    timestamps: history_time
    max_length: {shape.longest}
    ids:
      - {{name: item, table: item, column: history_item}}
      - {{name: category, table: category, column: history_category}}
      - {{name: action, table: action, column: history_action}}
    floats:
      - {{name: dwell, column: history_dwell, log: true}}
labels:
  - {{name: click}}
  - {{name: conversion, mask: click}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the log of a one-GPU experiment to data/NAME.")
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--folder", type=Path, help="folder to write to (default: data/NAME)")
    given = parser.parse_args()
    folder = given.folder or Path("data") / given.name
    rows, events = write(SHAPES[given.name], folder)
    sys.stdout.write(f"{folder}: {rows:,} rows, {events / rows:.1f} events each on average\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
