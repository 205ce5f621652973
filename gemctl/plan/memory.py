"""Bytes per rank of every object of a training step, by formulas that the plan prints; ranks with equal bytes.

Sharded objects are exact (a test compares them with FSDP2's and TorchRec's storage); activations, inputs and the
reserve are estimates from the data's mean lengths. An object's bytes vary along at most one axis and are run-length
encoded along it, so a plan for 16,384 ranks stays small.

    gemctl plan experiment=synthetic
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemctl.config.schema import Config
from gemctl.data.parquet import READ_BYTES
from gemctl.mesh.topology import Axis, Topology
from gemctl.plan.data_facts import DataFacts
from gemctl.plan.dense import Unit, expert_modules
from gemctl.plan.tables import FLOAT, TablePlan, dummy_tables, state_floats
from gemctl.specs.count import activation_floats
from gemctl.specs.data import FeatureSpec

MIB = 1 << 20
RESERVE = {"cpu": 256 * MIB, "cuda": 2048 * MIB}
"""Per rank. cpu: pages written since the fork, kernels' buffers, the peak measurement at start, allocator slack (a rank
of experiment=synthetic grew to 1.04 × its plan with it); cuda: context, NCCL and allocator slack (assumed, not
measured)."""
HOST_RESERVE = 512 * MIB
"""Per host: the agent with torch and torchrec imported (0.29 GiB, shared by its forked ranks), and the launcher."""

DEVICE, HOST = "device", "host"


@dataclass(frozen=True)
class MemoryObject:
    """Bytes of one object on each rank. `runs`: [ranks, bytes] pairs in order along `axis`; a single run if it is None.

    `place`: "device" (the accelerator; main memory on CPU) or "host". `estimate`: not an exact count.
    """

    name: str
    place: str
    axis: str | None
    runs: list[list[int]]
    formula: str
    estimate: bool = False

    def along(self) -> NDArray[np.int64]:
        """int64 [degree of axis] (or [1]): bytes by index along the axis."""
        counts, values = np.array(self.runs, np.int64).T
        return np.repeat(values, counts)

    def at(self, rank: int) -> int:
        """Bytes on one rank: both axes are the innermost of their grids, so the runs repeat from rank 0."""
        index = rank % sum(count for count, _ in self.runs)
        return next(size for end, size in self._ends() if index < end)

    def _ends(self) -> Iterator[tuple[int, int]]:
        end = 0
        for count, size in self.runs:
            end += count
            yield end, size

    @property
    def largest(self) -> int:
        """Bytes on the rank that holds most."""
        return max(size for _, size in self.runs)


def run_lengths(values: NDArray[np.int64]) -> list[list[int]]:
    """[[count, value], …] of runs of equal values."""
    edges = np.flatnonzero(np.diff(values)) + 1
    starts = np.concatenate([[0], edges])
    counts = np.diff(np.concatenate([starts, [len(values)]]))
    return [[int(count), int(value)] for count, value in zip(counts, values[starts], strict=True)]


@dataclass(frozen=True)
class Inputs:
    """Inputs of the formulas."""

    config: Config
    spec: FeatureSpec
    topology: Topology
    units: list[Unit]
    tables: Mapping[str, TablePlan]
    facts: DataFacts

    @property
    def rows(self) -> int:
        """Rows of a global batch on the rank that gets most."""
        return -(-self.config.train.global_batch // self.topology.world_size)

    @property
    def micro_rows(self) -> int:
        """Rows of the largest micro-batch of the dense part."""
        return -(-self.rows // self.config.train.accumulate)

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in the dense part's compute format."""
        return 2 if self.config.precision.dense == "bf16" else 4


def memory_objects(given: Inputs) -> list[MemoryObject]:
    """Every object, sharded ones first."""
    sharded = [*_dense(given), *_tables(given)]
    staging = _staging(sharded, given.topology.mp_replicate)
    return [*sharded, *_working(given), staging, *_data(given), _reserve(given)]


def _same(name: str, size: float, formula: str, place: str = DEVICE, estimate: bool = False) -> MemoryObject:
    return MemoryObject(name, place, None, [[1, int(size)]], formula, estimate)


def _dense(given: Inputs) -> list[MemoryObject]:
    shards = given.topology.dp_shard
    padded = sum(unit.padded for unit in given.units)
    held = np.sum([unit.held() for unit in given.units], axis=0)
    count = sum(len(unit.shapes) for unit in given.units)
    axis = Axis.DP_SHARD.value
    chunks = "Σ ⌈rows/dp_shard⌉ · columns · 4"
    return [
        MemoryObject("dense weights", DEVICE, axis, [[shards, padded * FLOAT]], chunks),
        MemoryObject("dense gradients", DEVICE, axis, [[shards, padded * FLOAT]], chunks),
        MemoryObject(
            "AdamW state", DEVICE, axis, run_lengths(held * 2 * FLOAT + count * FLOAT),
            "two moments of the shard's own rows · 4, and 4 per tensor",
        ),
        _unsharded(given),
    ]  # fmt: skip


def _unsharded(given: Inputs) -> MemoryObject:
    root, *blocks = given.units
    largest = max((unit.numel for unit in blocks), default=0)
    weights = (root.numel + min(2, len(blocks)) * largest) * given.compute_bytes
    micro = given.config.train.accumulate > 1
    gradients = sum(unit.numel for unit in given.units) if micro else root.numel + largest
    # Two blocks are gathered, because one is prefetched. Unreduced gradients of micro-batches are kept whole.
    formula = f"weights: root + 2 largest blocks; gradients: {'all' if micro else 'root + 1 block'}"
    return _same("unsharded peak", weights + gradients * FLOAT, formula)


def _tables(given: Inputs) -> list[MemoryObject]:
    shards, axis = given.topology.mp_shard, Axis.MP_SHARD.value
    rows = np.zeros(shards, np.int64)
    floats = np.zeros(shards, np.int64)
    for table in [*given.tables.values(), *dummy_tables(given.tables.values())]:
        held = table.rows_by_shard(shards)
        rows += held
        floats += held * table.dim
    objects = [MemoryObject("tables", DEVICE, axis, run_lengths(floats * FLOAT), "Σ rows of the shard · dim · 4")]
    if slots := state_floats(given.config):
        size = run_lengths(rows * slots * FLOAT)
        objects.append(MemoryObject("tables' AdaGrad state", DEVICE, axis, size, "Σ rows of the shard · 4"))
    return objects


def _working(given: Inputs) -> list[MemoryObject]:
    per_event, per_row = activation_floats(given.config.model, given.spec, given.config.train.recompute)
    events = {name: given.micro_rows * mean for name, mean in given.facts.mean_events.items()}
    saved = sum(per_event[name] * count for name, count in events.items()) + per_row * given.micro_rows
    return [
        _same(
            "activations", saved * given.compute_bytes,
            f"{given.micro_rows} rows · {per_row} + Σ events · ({', '.join(map(str, per_event.values()))}) values",
            estimate=True,
        ),
        _same(
            "looked-up embeddings", 2 * _embedded_floats(given) * FLOAT,
            "vectors and their gradients · dim · 4", estimate=True,
        ),
        _same("communication buffers", _buffers(given), BUFFERS, estimate=True),
        *_gathered(given),
    ]  # fmt: skip


def _gathered(given: Inputs) -> list[MemoryObject]:
    """Inputs of experts spread over `ep`, kept for the whole group's rows. (A rank runs 1/ep of the experts on ep times
    the rows, so what they compute is counted already.)"""
    ep, modules = given.topology.ep, expert_modules(given.config.model, given.spec)
    if ep == 1:
        return []
    tokens = [module.inputs for module in modules]
    kept = max(tokens) if given.config.train.recompute == "layers" else sum(tokens)
    size = ep * given.micro_rows * kept * given.config.model.dim * given.compute_bytes
    formula = f"ep = {ep} times {given.micro_rows} rows · {kept} tokens · dim · {given.compute_bytes}"
    return [_same("gathered expert inputs", size, formula, estimate=True)]


def _embedded_floats(given: Inputs) -> float:
    """Values of the tables' outputs for one rank's rows."""
    vectors = float(len(given.spec.categorical))
    vectors += sum(len(s.ids) * given.facts.mean_events[s.name] for s in given.spec.sequences)
    return given.rows * vectors * given.config.model.dim


BUFFERS = "max of: largest unit, table outputs sent and received"


def _buffers(given: Inputs) -> float:
    dense = max(unit.padded * unit.shards * FLOAT if unit.shards > 1 else 0 for unit in given.units)
    pooled = sum(feature.table in set(given.spec.pooled_tables()) for feature in given.spec.categorical)
    # Row-wise pooled tables compute partial sums for the rows of the whole table group before these are reduced.
    partial = pooled * given.rows * given.topology.mp_shard * given.config.model.dim
    return max(dense, (_embedded_floats(given) + partial) * FLOAT)


def _staging(sharded: list[MemoryObject], replicas: int) -> MemoryObject:
    """The stager's cached copy of what a rank writes to a checkpoint: all of its dense part, and its share of the table
    shard that `replicas` ranks hold. The total varies along two axes, so the largest is counted everywhere.
    """
    dense, tables = {"dense weights", "AdamW state"}, {"tables", "tables' AdaGrad state"}
    size = sum(item.largest for item in sharded if item.name in dense)
    size += sum(-(-item.largest // replicas) for item in sharded if item.name in tables)
    share = ", tables / mp_replicate" if replicas > 1 else ""
    return _same("checkpoint staging", size, f"one copy of weights and optimizer state{share}", HOST)


def _data(given: Inputs) -> list[MemoryObject]:
    per_row = row_bytes(given.spec, given.facts)
    config = given.config.data
    held = config.window + 1 if config.order == "shuffled" else 2
    held = min(held, given.facts.groups or held)
    batches = config.prefetch + 2
    return [
        _same(
            "input batches", batches * given.rows * per_row,
            f"{batches} batches · {given.rows} rows · {per_row:.0f} bytes", HOST, True,
        ),
        _row_groups(held, given.facts, per_row),
    ]  # fmt: skip


def _row_groups(held: int, facts: DataFacts, per_row: float) -> MemoryObject:
    """Those held after the cut to `max_length`, or, if larger, the largest one while it is read whole."""
    kept, read = held * facts.group_rows * per_row, facts.largest_read * READ_BYTES
    formula = f"{held} row groups · {facts.group_rows} rows · {per_row:.0f} bytes"
    if read > kept:
        formula = f"{facts.largest_read} values of the largest row group · {READ_BYTES} bytes, which is read whole"
    return _same("row groups read", max(kept, read), formula, HOST, True)


def row_bytes(spec: FeatureSpec, facts: DataFacts) -> float:
    """Bytes of one row of a batch: ids and offsets int64, everything else float32."""
    size = 8.0 + 8.0 + 8.0 + FLOAT * (len(spec.dense) + 2 * len(spec.labels))  # row, domain, weight and probability
    size += sum(8 + 8 * facts.mean_ids.get(feature.name, 1.0) for feature in spec.categorical)
    for sequence in spec.sequences:
        event = 8 * len(sequence.ids) + FLOAT * (len(sequence.floats) + 1)
        size += 8 + facts.mean_events[sequence.name] * event
    return size


def _reserve(given: Inputs) -> MemoryObject:
    device = given.config.cluster.device
    return _same("reserve", RESERVE[device], f"fixed, for a {device} rank", estimate=True)


MOST_CLASSES = 16  # listed in a plan, heaviest first


@dataclass(frozen=True)
class RankClass:
    """`ranks` ranks with equal bytes of every object, the first of them `first_rank`; `total`: the sum of `bytes`."""

    first_rank: int
    ranks: int
    bytes: dict[str, int]
    total: int


@dataclass(frozen=True)
class RankClasses:
    """The heaviest classes, and the number of classes."""

    count: int
    listed: list[RankClass]


def totals(objects: list[MemoryObject], topology: Topology, place: str | None = None) -> NDArray[np.int64]:
    """int64 [world]: bytes of all objects (or those of one place) on every rank."""
    sums: dict[int, NDArray[np.int64]] = {}  # by length, so that few arrays have the length of the world
    for item in objects:
        if place is None or item.place == place:
            along = item.along()
            sums[len(along)] = sums.get(len(along), 0) + along
    found = np.zeros(topology.world_size, np.int64)
    for along in sums.values():
        found.reshape(-1, len(along))[:] += along
    return found


def rank_classes(objects: list[MemoryObject], topology: Topology) -> RankClasses:
    """Classes heaviest first; equal totals by first rank."""
    ids = np.zeros(topology.world_size, np.int64)
    for axis in (Axis.DP_SHARD.value, Axis.MP_SHARD.value):
        kinds = _kinds([item for item in objects if item.axis == axis])
        ids = (ids.reshape(-1, len(kinds)) * (kinds.max() + 1) + kinds).reshape(-1)
    _, first, count = np.unique(ids, return_index=True, return_counts=True)
    sums = totals(objects, topology)
    order = np.lexsort((first, -sums[first]))[:MOST_CLASSES]
    listed = [_class(objects, topology, int(first[index]), int(count[index])) for index in order]
    return RankClasses(len(first), listed)


def _kinds(objects: list[MemoryObject]) -> NDArray[np.int64]:
    """int64 [degree of the objects' axis]: equal numbers where all objects have equal bytes."""
    ends = [np.cumsum([count for count, _ in item.runs]) for item in objects]
    edges = np.unique(np.concatenate(ends))  # between two of them no object changes
    values = [
        np.array([size for _, size in item.runs])[np.searchsorted(end, edges)]
        for item, end in zip(objects, ends, strict=True)
    ]
    _, kinds = np.unique(np.stack(values, axis=1), axis=0, return_inverse=True)
    return np.repeat(kinds.reshape(-1), np.diff(edges, prepend=0))


def _class(objects: list[MemoryObject], topology: Topology, rank: int, ranks: int) -> RankClass:
    sizes = {item.name: item.at(rank) for item in objects}
    return RankClass(rank, ranks, sizes, sum(sizes.values()))


def device_total(rank_class: RankClass, objects: list[MemoryObject]) -> int:
    """Bytes of a class on the device."""
    return sum(rank_class.bytes[item.name] for item in objects if item.place == DEVICE)
