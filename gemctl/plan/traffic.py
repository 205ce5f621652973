"""Collectives of one training step: messages and bytes that one rank sends, per axis, by formula.

Ring counts: an all-gather or reduce-scatter over n ranks sends n−1 shards, an all-reduce twice that; an all-to-all
sends (n−1)/n of its rows. Axes of degree 1 send nothing and are left out. A test counts the calls of a real step.

    gemctl plan experiment=synthetic
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemctl.cluster.hardware import Tier, tier_of
from gemctl.mesh.groups import groups
from gemctl.mesh.topology import CLOCKS, CLOCKS_EVERY, EXPERT_SHARD, WORLD, Axis
from gemctl.plan.dense import ROOT, Unit, expert_modules
from gemctl.plan.memory import Inputs
from gemctl.plan.tables import FLOAT, TablePlan, dummy_tables, ranks_of_host, state_floats

INT = 8
ON_HOST = "mp_shard host"  # the part of an mp_shard group on one host: counted as mp_shard


@dataclass(frozen=True)
class Traffic:
    """A collective on one axis: calls per step, bytes that a rank sends per step, and the slowest tier crossed."""

    axis: str
    collective: str
    what: str
    messages: int
    bytes: int
    tier: Tier


def traffic(given: Inputs) -> list[Traffic]:
    """Every collective of a step, dense first."""
    found = [*_dense(given), *_tables(given), *_agreement(given)]
    return [
        Traffic(axis.split()[0], collective, what, messages, round(size), _tier(given, axis))
        for axis, collective, what, messages, size in found
        if messages
    ]


Row = tuple[str, str, str, int, float]  # axis, collective, what, messages, bytes


def _tier(given: Inputs, axis: str) -> Tier:
    topology = given.topology
    if axis == WORLD:
        return tier_of(0, topology.world_size - 1, topology.ranks_per_node)
    if axis == ON_HOST:
        return tier_of(0, ranks_of_host(topology) - 1, topology.ranks_per_node)
    found = groups(topology)[axis]
    first, last, size = found[:, 0], found[:, -1], topology.ranks_per_node
    _, spans = np.unique(first // size * topology.world_size + last // size, return_index=True)  # one of each kind
    return max((tier_of(int(first[i]), int(last[i]), size) for i in spans), key=list(Tier).index)


def _dense(given: Inputs) -> list[Row]:
    topology, ep = given.topology, given.topology.ep
    experts = [unit for unit in given.units if unit.ep > 1]
    rows = _sharded(given, [unit for unit in given.units if unit.ep == 1], Axis.DP_SHARD.value, "dense")
    rows += _sharded(given, experts, EXPERT_SHARD, "experts'")
    if topology.dp_replicate > 1:
        size = sum(unit.padded for unit in given.units) * FLOAT
        sent = 2 * (topology.dp_replicate - 1) / topology.dp_replicate * size
        rows.append((Axis.DP_REPLICATE.value, "all-reduce", "gradient shards", len(given.units), sent))
    if ep > 1:
        rows += _exchanges(given)
    return rows


def _sharded(given: Inputs, units: list[Unit], axis: str, what: str) -> list[Row]:
    """FSDP2's collectives for units that are sharded over one group."""
    if not units or units[0].shards == 1:
        return []
    # Blocks are gathered again for backward; the root stays gathered.
    others = units[0].shards - 1
    calls = {unit.name: (1 if unit.name == ROOT else 2) * given.config.train.accumulate for unit in units}
    gathered = sum(calls[unit.name] * unit.padded for unit in units) * others * given.compute_bytes
    reduced = sum(unit.padded for unit in units) * others * FLOAT
    return [
        (axis, "all-gather", f"{what} weights", sum(calls.values()), gathered),
        (axis, "reduce-scatter", f"{what} gradients", len(units), reduced),
    ]


def _exchanges(given: Inputs) -> list[Row]:
    """Activations of the experts: inputs gathered and outputs summed over `ep`, and the mirror for backward.

    The tokens that exist when a layer begins are gathered first, while its sequence blocks run. A recomputed layer
    gathers and sums again.
    """
    modules = expert_modules(given.config.model, given.spec)
    micro, config = given.config.train.accumulate, given.config
    token = given.rows * (given.topology.ep - 1) * config.model.dim * given.compute_bytes
    inputs, outputs = (sum(values) * token for values in zip(*((m.inputs, m.outputs) for m in modules), strict=True))
    early = sum(2 if 0 < module.early < module.inputs else 1 for module in modules) * micro
    calls, axis, forwards = len(modules) * micro, Axis.EP.value, 2 if config.train.recompute == "layers" else 1
    return [
        (axis, "all-gather", "expert inputs", early * forwards, inputs * forwards),
        (axis, "reduce-scatter", "expert outputs", calls * forwards, outputs * forwards),
        (axis, "all-gather", "expert outputs' gradients", calls, outputs),
        (axis, "reduce-scatter", "expert inputs' gradients", calls, inputs),
    ]


def _tables(given: Inputs) -> list[Row]:
    """TorchRec: per lookup kind and sharding kind one exchange of ids (3 calls) and one of outputs each way, all
    within a group of mp_shard ranks; then the average of the replicas.
    """
    rows: list[Row] = []
    for lookup in ("pooled", "sequence"):
        for sharding in ("row_wise", "table_row_wise", "table_wise"):
            tables = [t for t in given.tables.values() if (t.lookup, t.sharding) == (lookup, sharding)]
            if tables and given.topology.mp_shard > 1:
                rows += _exchange(given, lookup, sharding, tables)
    if given.topology.mp_replicate > 1:
        rows.append(_average(given))
    return rows


def _exchange(given: Inputs, lookup: str, sharding: str, tables: list[TablePlan]) -> list[Row]:
    shards, dim = given.topology.mp_shard, given.config.model.dim
    share, axis = (shards - 1) / shards, Axis.MP_SHARD.value
    features, ids = _looked_up(given, {table.name for table in tables})
    features += len(dummy_tables(tables))
    what = f"{lookup} {sharding.replace('_', '-')}"
    copies = max(table.ranks for table in tables)  # ranks that receive the ids of a feature of a row
    lengths = features * given.rows * INT * copies * share
    rows: list[Row] = [
        (axis, "all-to-all", f"ids, {what}", 3, lengths + ids * INT * share + 2 * INT * (shards - 1)),
    ]
    if lookup == "sequence" or sharding == "table_wise":
        size = (ids if lookup == "sequence" else given.rows * features) * dim * FLOAT * share
        return [*rows, *((axis, "all-to-all", f"{name}, {what}", 1, size) for name in ("outputs", "output gradients"))]
    # Partial sums for the rows of the whole group are reduced over the ranks that share a table, then sent to the ranks
    # of these rows: with row-wise tables one collective does both.
    hosts = shards // copies
    own = features / hosts * given.rows * dim * FLOAT  # for one rank's rows and one host's tables
    size = (copies - 1) * hosts * own
    within = axis if sharding == "row_wise" else ON_HOST
    rows += [(within, "reduce-scatter", f"outputs, {what}", 1, size),
             (within, "all-gather", f"output gradients, {what}", 1, size)]  # fmt: skip
    if sharding == "table_row_wise" and hosts > 1:
        size = (hosts - 1) * own
        rows += [(axis, "all-to-all", f"{name}, {what}", 1, size) for name in ("outputs", "output gradients")]
    return rows


def _average(given: Inputs) -> Row:
    """The all-reduce of every fused kernel's weights and optimizer state; calls and bytes averaged over the steps."""
    shards, replicas, every = given.topology.mp_shard, given.topology.mp_replicate, given.config.optim.tables.sync_every
    slots = state_floats(given.config)
    held = np.zeros(shards, np.int64)
    kernels = np.zeros(shards, np.int64)
    kinds: dict[tuple[str, str], NDArray[np.bool_]] = {}
    for table in given.tables.values():
        kind = (table.lookup, table.sharding)
        kinds[kind] = kinds.get(kind, False) | (table.rows_by_shard(shards) > 0)
    for table in [*given.tables.values(), *dummy_tables(given.tables.values())]:
        held += table.rows_by_shard(shards) * (table.dim + slots) * FLOAT
    for present in kinds.values():
        kernels += present
    fullest = int(held.argmax())
    when = "" if every == 1 else f", every {every} steps"
    size = 2 * (replicas - 1) / replicas * int(held[fullest]) / every
    messages = max(1, round(int(kernels[fullest]) * (1 + slots) / every))
    return Axis.MP_REPLICATE.value, "all-reduce", f"tables and their optimizer state{when}", messages, size


def _looked_up(given: Inputs, tables: set[str]) -> tuple[int, float]:
    """Features that look up `tables`, and ids that one rank looks up in a step."""
    features, ids = 0, 0.0
    for feature in given.spec.categorical:
        if feature.table in tables:
            features += 1
            ids += given.rows * given.facts.mean_ids.get(feature.name, 1.0)
    for sequence in given.spec.sequences:
        count = sum(feature.table in tables for feature in sequence.ids)
        features += count
        ids += count * given.rows * given.facts.mean_events[sequence.name]
    return features, ids


def _agreement(given: Inputs) -> list[Row]:
    """Flags, losses and weights once per micro-batch, now and then with the ranks' clocks; the gradient norm once."""
    world = given.topology.world_size
    if world == 1:
        return []
    accumulate, tasks = given.config.train.accumulate, len(given.spec.labels)
    values = accumulate * (3 + 2 * tasks) + 1 + world * CLOCKS / CLOCKS_EVERY
    return [
        (WORLD, "all-reduce", "flags, losses, gradient norm", accumulate + 1, 2 * (world - 1) / world * values * INT)
    ]
