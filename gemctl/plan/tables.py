"""Placement of every embedding table's rows within one replica of the tables, in TorchRec's layouts.

- row_wise: shard s of n holds rows [s·b, (s+1)·b) with b = ⌈rows/n⌉ (TorchRec's rule: the last shards may be short or
  empty).
- table_row_wise: the same over the ranks of one host of the group; for tables that are looked up pooled.
- table_wise: whole on one rank.

Tables of the last two kinds are placed largest first on the host or rank with the fewest bytes, so the placement is
the same on every machine. All three keep each row whole on one rank, because row-wise AdaGrad keeps one number per
row: with other kinds the result would depend on the layout (see the schema of `topology.tables`).

    gemctl plan experiment=synthetic topology.tables.user=table_wise
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.mesh.topology import Topology
from gemctl.specs.data import FeatureSpec
from gemctl.suggest import did_you_mean

FLOAT = 4  # FBGEMM's tables and their optimizer state are fp32
DUMMY = "dummy/"  # begins the name of a table that `dummy_tables` adds; a spec's names have no "/"


@dataclass(frozen=True)
class TablePlan:
    """One table: shards 0 … ranks−1 are on ranks first_rank … of a group of mp_shard ranks.

    A row-wise table is sharded over the whole group, a table-row-wise one over the ranks of one host, a table-wise one
    (ranks = 1) not at all.
    """

    name: str
    rows: int
    dim: int
    lookup: str  # "pooled" or "sequence"
    sharding: str  # "row_wise", "table_row_wise" or "table_wise"
    first_rank: int
    ranks: int
    shard_rows: int  # rows of a full shard
    weight_bytes: int
    state_bytes: int

    def rows_by_shard(self, shards: int) -> NDArray[np.int64]:
        """int64 [shards]: rows that each rank of a table group holds."""
        held = np.zeros(shards, np.int64)
        held[self.first_rank : self.first_rank + self.ranks] = blocks(self.rows, self.ranks)
        return held


def row_block(rows: int, shards: int) -> int:
    """Rows of a full shard."""
    return -(-rows // shards)


def blocks(rows: int, shards: int) -> NDArray[np.int64]:
    """int64 [shards]: rows of each shard: full ones, possibly a short one, then empty ones."""
    block = row_block(rows, shards)
    full, rest = divmod(rows, block)
    held = np.zeros(shards, np.int64)
    held[:full] = block
    held[full : full + 1] = rest
    return held


def fills(rows: int, shards: int) -> bool:
    """True if every shard has a row."""
    return (shards - 1) * row_block(rows, shards) < rows


def ranks_of_host(topology: Topology) -> int:
    """Ranks of a table group on one host; groups consist of consecutive ranks."""
    return min(topology.ranks_per_node, topology.mp_shard)


def place(spec: FeatureSpec, config: Config, topology: Topology) -> dict[str, TablePlan]:
    """The placement of every table, in the spec's order. Raises InputError if topology.tables is impossible."""
    kinds: dict[str, str] = {table.name: config.topology.table_sharding for table in spec.tables}
    kinds |= {name: kind for name, kind in config.topology.tables.items() if name in kinds}
    if problems := [*_unknown(spec, config), *_not_on_one_host(spec, config, topology, kinds)]:
        raise InputError(problems)
    dim, slots = config.model.dim, state_floats(config)
    shards, host = topology.mp_shard, ranks_of_host(topology)
    sizes = {table.name: table.rows for table in spec.tables}
    row_bytes = (dim + slots) * FLOAT
    spread = {"row_wise": shards, "table_row_wise": host, "table_wise": 1}

    load, homes = np.zeros(shards, np.int64), dict.fromkeys(kinds, 0)
    for name in _of_kind(kinds, "row_wise"):
        load += blocks(sizes[name], shards) * row_bytes
    for kind in ("table_row_wise", "table_wise"):
        ranks = spread[kind]
        named = _of_kind(kinds, kind)
        loads = load.reshape(-1, ranks).sum(1) if named else load
        for name, home in _pack([(name, sizes[name] * row_bytes) for name in named], loads).items():
            homes[name] = home * ranks
            load[home * ranks : (home + 1) * ranks] += blocks(sizes[name], ranks) * row_bytes
    unpooled = set(spec.sequence_tables())
    return {
        name: TablePlan(
            name,
            sizes[name],
            dim,
            "sequence" if name in unpooled else "pooled",
            kind,
            homes[name],
            spread[kind],
            row_block(sizes[name], spread[kind]),
            sizes[name] * dim * FLOAT,
            sizes[name] * slots * FLOAT,
        )
        for name, kind in kinds.items()
    }


def state_floats(config: Config) -> int:
    """Numbers that the tables' optimizer keeps per row."""
    return 1 if config.optim.tables.kind == "rowwise_adagrad" else 0


def dummy_tables(tables: Iterable[TablePlan]) -> list[TablePlan]:
    """Tables with one row per rank that nothing looks up, added last where a table leaves ranks without rows.

    FBGEMM's CPU backward fails on a rank whose last table of a kind has no rows. One per lookup and sharding kind, and
    per host for table-row-wise ones.
    """
    found = {}
    for table in tables:
        place = (table.lookup, table.sharding, table.first_rank)
        if not fills(table.rows, table.ranks):
            name = f"{DUMMY}{table.sharding}{table.first_rank}"
            state = table.state_bytes // table.rows * table.ranks
            weights = table.ranks * table.dim * FLOAT
            found[place] = TablePlan(
                name, table.ranks, table.dim, table.lookup, table.sharding, table.first_rank, table.ranks, 1,
                weights, state,
            )  # fmt: skip
    return list(found.values())


@dataclass(frozen=True)
class Replication:
    """What replicas of the tables cost, in bytes of weights and optimizer state."""

    replicas: int
    replica_bytes: int  # of one replica, over its group of ranks
    added_bytes: int  # per rank on average, beyond one replica over the whole world: S·(M−1)/T
    imbalance: float  # the fullest rank's bytes over the mean


def replication(tables: Mapping[str, TablePlan], topology: Topology) -> Replication:
    """The costs of a plan's tables."""
    held = np.zeros(topology.mp_shard, np.int64)
    for table in tables.values():
        held += table.rows_by_shard(topology.mp_shard) * ((table.weight_bytes + table.state_bytes) // table.rows)
    size, replicas = int(held.sum()), topology.mp_replicate
    added = size * (replicas - 1) // topology.world_size
    return Replication(replicas, size, added, float(held.max() / held.mean()) if size else 1.0)


def _unknown(spec: FeatureSpec, config: Config) -> list[str]:
    names = [table.name for table in spec.tables]
    return [
        f"topology.tables.{name}: {spec.name} has no such table ({', '.join(names)}){did_you_mean(name, names)}"
        for name in config.topology.tables
        if name not in names
    ]


def _not_on_one_host(spec: FeatureSpec, config: Config, topology: Topology, kinds: Mapping[str, str]) -> list[str]:
    """Why tables cannot be sharded over the ranks of one host."""
    wanted = _of_kind(kinds, "table_row_wise")
    unpooled = set(spec.sequence_tables())
    problems = [
        f"{_key(name, config)}=table_row_wise: event sequences look up {name} unpooled, and TorchRec shards only "
        f"pooled tables over one host: use topology.tables.{name}=row_wise"
        for name in wanted
        if name in unpooled
    ]
    if wanted and topology.mp_shard % ranks_of_host(topology):
        problems.append(
            f"table_row_wise ({', '.join(wanted)}): a table group of topology.mp_shard = {topology.mp_shard} ranks "
            f"does not fill whole hosts of {topology.ranks_per_node} ranks: use row_wise, or a multiple of "
            f"{topology.ranks_per_node} ranks"
        )
    elif wanted and topology.ranks_per_node % ranks_of_host(topology):
        problems.append(
            f"table_row_wise ({', '.join(wanted)}): table groups of topology.mp_shard = {topology.mp_shard} ranks "
            f"span parts of several hosts of {topology.ranks_per_node} ranks: use row_wise"
        )
    return problems


def _key(table: str, config: Config) -> str:
    return f"topology.tables.{table}" if table in config.topology.tables else "topology.table_sharding"


def _of_kind(kinds: Mapping[str, str], kind: str) -> list[str]:
    return [name for name, found in kinds.items() if found == kind]


def _pack(tables: list[tuple[str, int]], load: NDArray[np.int64]) -> dict[str, int]:
    """Largest first on the least loaded shard; equal sizes by name, equal loads to the lowest shard."""
    # Each of n tables goes to one of the n shards that are least loaded at the start.
    least = np.argsort(load, kind="stable")[: len(tables)].tolist()
    heap = [(int(load[shard]), shard) for shard in least]
    heapq.heapify(heap)
    homes = {}
    for name, size in sorted(tables, key=lambda table: (-table[1], table[0])):
        loaded, shard = heap[0]
        homes[name] = shard
        heapq.heapreplace(heap, (loaded + size, shard))
    return homes
