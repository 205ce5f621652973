"""Rank classes: ranks whose every object has the same bytes. A plan holds classes, never one entry a rank.

gemctl plan experiment=main        # one column a class
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemctl.mesh.axes import Axis
from gemctl.mesh.topology import Topology
from gemctl.plan.memory import DEVICE, MemoryObject

MOST = 16  # classes that a plan lists, heaviest first


@dataclass(frozen=True)
class RankClass:
    """`ranks` ranks, the first of them `first_rank`; bytes by object; `total` is their sum."""

    first_rank: int
    ranks: int
    bytes: dict[str, int]
    total: int


@dataclass(frozen=True)
class RankClasses:
    """The heaviest classes, and how many there are in all."""

    count: int
    listed: list[RankClass]


def by_rank(item: MemoryObject, topology: Topology) -> NDArray[np.int64]:
    """int64 [world]: bytes of one object on every rank."""
    ranks = np.arange(topology.world_size)
    along = item.along()
    return along[ranks % len(along)] if item.axis else np.full(topology.world_size, along[0])


def totals(objects: list[MemoryObject], topology: Topology, place: str | None = None) -> NDArray[np.int64]:
    """int64 [world]: bytes of all objects (of one place) on every rank."""
    chosen = [item for item in objects if place is None or item.place == place]
    return np.sum([by_rank(item, topology) for item in chosen], axis=0, dtype=np.int64)


def rank_classes(objects: list[MemoryObject], topology: Topology) -> RankClasses:
    """Classes heaviest first; equal totals by first rank."""
    ids = np.zeros(topology.world_size, np.int64)
    for axis in (Axis.DP_SHARD.value, Axis.MP_SHARD.value):
        along = [item.along() for item in objects if item.axis == axis]
        _, kinds = np.unique(np.stack(along, axis=1), axis=0, return_inverse=True)
        kinds = kinds.reshape(-1)
        ids = ids * (kinds.max() + 1) + kinds[np.arange(topology.world_size) % len(kinds)]
    _, first, count = np.unique(ids, return_index=True, return_counts=True)
    sums = totals(objects, topology)
    order = np.lexsort((first, -sums[first]))[:MOST]
    listed = [_class(objects, topology, int(first[index]), int(count[index])) for index in order]
    return RankClasses(len(first), listed)


def _class(objects: list[MemoryObject], topology: Topology, rank: int, ranks: int) -> RankClass:
    sizes = {item.name: int(by_rank(item, topology)[rank]) for item in objects}
    return RankClass(rank, ranks, sizes, sum(sizes.values()))


def device_total(rank_class: RankClass, objects: list[MemoryObject]) -> int:
    """Bytes of a class that lie on the device."""
    return sum(rank_class.bytes[item.name] for item in objects if item.place == DEVICE)
