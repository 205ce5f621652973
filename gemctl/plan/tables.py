"""Where the rows of every embedding table lie, as TorchRec will put them.

Row-wise: shard s of n holds rows [s·b, (s+1)·b) with b = ⌈rows/n⌉ (TorchRec's rule: the last shard may be short).
Table-wise: whole on one rank, largest tables first on the rank with the fewest bytes, so the placement is the same on
every machine. FBGEMM's row-wise AdaGrad fails in backward where a shard has no row, so a table that is too small to
give every rank one is placed table-wise, and the plan says so; asking for it row-wise by name is refused.

    gemctl plan experiment=main topology.tables.users=table_wise
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemctl.config.nearest import did_you_mean
from gemctl.config.schema import TopologyConfig
from gemctl.errors import InputError
from gemctl.specs.data import FeatureSpec

FLOAT = 4  # FBGEMM's tables and their optimizer state are fp32


@dataclass(frozen=True)
class TablePlan:
    """One table: `rank` is the shard index in 0 … mp_shard−1 of a table-wise one, None for row-wise."""

    name: str
    rows: int
    dim: int
    lookup: str  # "pooled" or "sequence"
    sharding: str  # "row_wise" or "table_wise"
    rank: int | None
    shard_rows: int  # rows of a full shard
    weight_bytes: int
    state_bytes: int
    note: str = ""  # why the sharding is not the one that topology.table_sharding says

    def rows_by_shard(self, shards: int) -> NDArray[np.int64]:
        """int64 [shards]: rows that each rank of a table group holds."""
        if self.sharding == "table_wise":
            return np.where(np.arange(shards) == self.rank, self.rows, 0)
        return blocks(self.rows, shards)


def row_block(rows: int, shards: int) -> int:
    """Rows of a full row-wise shard."""
    return -(-rows // shards)


def blocks(rows: int, shards: int) -> NDArray[np.int64]:
    """int64 [shards]: rows of each row-wise shard: full ones, perhaps a short one, empty ones."""
    block = row_block(rows, shards)
    full, rest = divmod(rows, block)
    held = np.zeros(shards, np.int64)
    held[:full] = block
    held[full : full + 1] = rest
    return held


def fills(rows: int, shards: int) -> bool:
    """True if row-wise every shard has a row."""
    return (shards - 1) * row_block(rows, shards) < rows


def place(spec: FeatureSpec, dim: int, topology: TopologyConfig, shards: int) -> dict[str, TablePlan]:
    """The plan of every table, in the spec's order. Raises InputError for what topology.tables cannot mean."""
    rows = {table.name: table.rows for table in spec.tables}
    _check_named(spec, rows, topology, shards)
    kinds: dict[str, str] = {name: topology.tables.get(name, topology.table_sharding) for name in rows}
    notes = {}
    for name, count in rows.items():
        if kinds[name] == "row_wise" and not fills(count, shards):
            kinds[name] = "table_wise"
            notes[name] = f"{count} rows in blocks of {row_block(count, shards)} do not reach {shards} ranks"
    load = _row_wise_load([rows[name] for name, kind in kinds.items() if kind == "row_wise"], dim, shards)
    whole = [(name, table_bytes(rows[name], dim)) for name, kind in kinds.items() if kind == "table_wise"]
    homes = _pack(whole, load)
    unpooled = set(spec.sequence_tables())
    return {
        name: TablePlan(
            name,
            rows[name],
            dim,
            "sequence" if name in unpooled else "pooled",
            kind,
            homes.get(name),
            rows[name] if kind == "table_wise" else row_block(rows[name], shards),
            rows[name] * dim * FLOAT,
            rows[name] * FLOAT,
            notes.get(name, ""),
        )
        for name, kind in kinds.items()
    }


def table_bytes(rows: int, dim: int) -> int:
    """Weights and the row-wise AdaGrad state (one number a row)."""
    return rows * (dim + 1) * FLOAT


def _check_named(spec: FeatureSpec, rows: dict[str, int], topology: TopologyConfig, shards: int) -> None:
    problems = []
    for name, kind in topology.tables.items():
        if name not in rows:
            near = did_you_mean(name, list(rows))
            problems.append(f"topology.tables.{name}: {spec.name} has no such table ({', '.join(rows)}){near}")
        elif kind == "row_wise" and not fills(rows[name], shards):
            problems.append(
                f"topology.tables.{name}=row_wise: {rows[name]} rows in blocks of {row_block(rows[name], shards)} "
                f"do not reach all {shards} ranks of mp_shard: use table_wise"
            )
    if problems:
        raise InputError(problems)


def _row_wise_load(rows: Iterable[int], dim: int, shards: int) -> NDArray[np.int64]:
    load = np.zeros(shards, np.int64)
    for count in rows:
        load += blocks(count, shards) * ((dim + 1) * FLOAT)
    return load


def _pack(tables: list[tuple[str, int]], load: NDArray[np.int64]) -> dict[str, int]:
    """Largest first on the least loaded shard; equal sizes by name, equal loads to the lowest shard."""
    # Of n tables each goes to one of the n shards that are least loaded at the start.
    least = np.argsort(load, kind="stable")[: len(tables)].tolist()
    heap = [(int(load[shard]), shard) for shard in least]
    heapq.heapify(heap)
    homes = {}
    for name, size in sorted(tables, key=lambda table: (-table[1], table[0])):
        loaded, shard = heap[0]
        homes[name] = shard
        heapq.heapreplace(heap, (loaded + size, shard))
    return homes
