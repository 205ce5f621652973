"""Collectives of one training step: messages and bytes that one rank sends, per axis, by formula.

Ring counts: an all-gather or reduce-scatter over n ranks sends n−1 shards, an all-reduce twice that; an all-to-all
sends (n−1)/n of its rows. Axes of degree 1 send nothing and are left out. A test counts the calls of a real step.

    gemctl plan experiment=main
"""

from dataclasses import dataclass

import numpy as np

from gemctl.cluster.tiers import Tier, tier_of
from gemctl.mesh.axes import EXPERT_SHARD, Axis
from gemctl.mesh.groups import groups
from gemctl.plan.dense import ROOT, Unit
from gemctl.plan.memory import Inputs
from gemctl.plan.tables import FLOAT
from gemctl.specs.model import WukongExpertsSpec

INT = 8
WORLD = "world"


@dataclass(frozen=True)
class Traffic:
    """One collective of an axis: calls per step, bytes that a rank sends per step, and the slowest tier it crosses."""

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
        Traffic(axis, collective, what, messages, round(size), _tier(given, axis))
        for axis, collective, what, messages, size in found
        if messages
    ]


Row = tuple[str, str, str, int, float]  # axis, collective, what, messages, bytes


def _tier(given: Inputs, axis: str) -> Tier:
    topology = given.topology
    if axis == WORLD:
        return tier_of(0, topology.world_size - 1, topology.ranks_per_node)
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
    """FSDP2's collectives of units that are cut over one group."""
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
    """Activations of the expert blocks: inputs gathered and outputs summed over `ep`, and the mirror for backward."""
    model, spec = given.config.model, given.config.model.interaction
    if not isinstance(spec, WukongExpertsSpec):
        return []
    calls, others = model.layers * given.config.train.accumulate, given.topology.ep - 1
    sequences = len(given.spec.sequences) * model.summary.seeds
    first = len(given.spec.categorical) + bool(given.spec.dense) + bool(given.spec.domain)
    tokens = {"inputs": first + (model.layers - 1) * spec.tokens + model.layers * sequences,
              "outputs": model.layers * spec.tokens}  # fmt: skip
    token = given.rows * others * model.dim * given.compute_bytes
    return [
        (Axis.EP.value, collective, f"expert {what}", calls, tokens[what.split("'")[0]] * token)
        for collective, what in (
            ("all-gather", "inputs"),
            ("reduce-scatter", "outputs"),
            ("all-gather", "outputs' gradients"),
            ("reduce-scatter", "inputs' gradients"),
        )
    ]


def _tables(given: Inputs) -> list[Row]:
    """TorchRec: per lookup kind and sharding kind one exchange of ids (3 calls) and one of outputs each way."""
    shards = given.topology.mp_shard
    rows: list[Row] = []
    if shards == 1:
        return rows
    share, axis = (shards - 1) / shards, Axis.MP_SHARD.value
    for lookup in ("pooled", "sequence"):
        for sharding in ("row_wise", "table_wise"):
            names = {t.name for t in given.tables.values() if (t.lookup, t.sharding) == (lookup, sharding)}
            if not names:
                continue
            features, ids = _looked_up(given, names)
            what, dim = f"{lookup} {sharding.replace('_', '-')}", given.config.model.dim
            lengths = features * given.rows * INT * (shards - 1 if sharding == "row_wise" else share)
            rows.append((axis, "all-to-all", f"ids, {what}", 3, lengths + ids * INT * share + 2 * INT * (shards - 1)))
            if lookup == "pooled" and sharding == "row_wise":
                size = (shards - 1) * given.rows * features * dim * FLOAT
                rows.append((axis, "reduce-scatter", f"outputs, {what}", 1, size))
                rows.append((axis, "all-gather", f"output gradients, {what}", 1, size))
            else:
                vectors = ids if lookup == "sequence" else given.rows * features
                rows.append((axis, "all-to-all", f"outputs, {what}", 1, vectors * dim * FLOAT * share))
                rows.append((axis, "all-to-all", f"output gradients, {what}", 1, vectors * dim * FLOAT * share))
    return rows


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
    """Flags, losses and weights once a micro-batch; the gradient norm once."""
    world = given.topology.world_size
    if world == 1:
        return []
    accumulate, tasks = given.config.train.accumulate, len(given.spec.labels)
    values = accumulate * (3 + 2 * tasks) + 1
    return [
        (WORLD, "all-reduce", "flags, losses, gradient norm", accumulate + 1, 2 * (world - 1) / world * values * INT)
    ]
