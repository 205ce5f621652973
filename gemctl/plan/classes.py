"""Rank classes: ranks whose every object has the same bytes. A plan holds classes, never one entry a rank.

gemctl plan experiment=synthetic        # one column a class
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


def totals(objects: list[MemoryObject], topology: Topology, place: str | None = None) -> NDArray[np.int64]:
    """int64 [world]: bytes of all objects (of one place) on every rank."""
    sums: dict[int, NDArray[np.int64]] = {}  # by length, so that few arrays are as long as the world
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
    order = np.lexsort((first, -sums[first]))[:MOST]
    listed = [_class(objects, topology, int(first[index]), int(count[index])) for index in order]
    return RankClasses(len(first), listed)


def _kinds(objects: list[MemoryObject]) -> NDArray[np.int64]:
    """int64 [degree of the objects' axis]: equal numbers where all of the objects have equal bytes."""
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
    """Bytes of a class that lie on the device."""
    return sum(rank_class.bytes[item.name] for item in objects if item.place == DEVICE)
