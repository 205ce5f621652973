"""From degrees to ranks: the grids, the process groups of every axis, and the mesh placed on hosts.

Pure NumPy, no processes. The innermost (last) axis of a grid has consecutive ranks, so it uses the fastest tier:
`ep` inside `dp_shard` inside `dp_replicate`; `mp_shard` inside `mp_replicate`.

    gemctl plan experiment=synthetic        # draws the groups of every axis, host by host
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemctl.errors import GemctlError, InputError
from gemctl.mesh.topology import EXPERT_SHARD, Axis, Topology

Ranks = NDArray[np.int64]
LISTED = 8  # hosts that a message names at most


def dense_grid(topology: Topology) -> Ranks:
    """Ranks int64 [dp_replicate, dp_shard]."""
    return np.arange(topology.world_size).reshape(topology.dp_replicate, topology.dp_shard)


def expert_grid(topology: Topology) -> Ranks:
    """The dense grid with `dp_shard` re-carved: ranks int64 [dp_replicate, dp_shard / ep, ep]."""
    return np.arange(topology.world_size).reshape(topology.dp_replicate, topology.expert_shard, topology.ep)


def table_grid(topology: Topology) -> Ranks:
    """Ranks int64 [mp_replicate, mp_shard]."""
    return np.arange(topology.world_size).reshape(topology.mp_replicate, topology.mp_shard)


def groups(topology: Topology) -> dict[str, Ranks]:
    """Process groups by axis (and `expert_shard`): int64 [groups, degree], every rank once; row order = group rank."""
    dense, experts, tables = dense_grid(topology), expert_grid(topology), table_grid(topology)
    return {
        Axis.DP_REPLICATE.value: dense.T,
        Axis.DP_SHARD.value: dense,
        EXPERT_SHARD: experts.swapaxes(1, 2).reshape(-1, topology.expert_shard),
        Axis.EP.value: experts.reshape(-1, topology.ep),
        Axis.MP_REPLICATE.value: tables.T,
        Axis.MP_SHARD.value: tables,
    }


@dataclass(frozen=True)
class AxisGroups:
    """The groups of one axis as a rule: each has `degree` ranks, `stride` apart. `starts`: the first rank of each, as
    [rows, distance between rows, groups per row]. `hosts`: how many hosts the narrowest and the widest group span.
    """

    axis: str
    degree: int
    groups: int
    stride: int
    starts: tuple[int, int, int]
    hosts: tuple[int, int]

    def ranks(self, group: int) -> list[int]:
        """The ranks of group number `group`."""
        _, distance, width = self.starts
        first = group // width * distance + group % width
        return [first + self.stride * index for index in range(self.degree)]


def axis_groups(topology: Topology) -> list[AxisGroups]:
    """The groups of every axis, outermost first, and those of `expert_shard` if `ep` > 1.

    Hosts are counted as the launcher starts them, `ranks_per_node` ranks on each.
    """
    strides = {Axis.DP_REPLICATE.value: topology.dp_shard, EXPERT_SHARD: topology.ep}
    strides[Axis.MP_REPLICATE.value] = topology.mp_shard
    found = groups(topology)
    if topology.ep == 1:
        del found[EXPERT_SHARD]
    return [_axis_groups(axis, ranks, strides.get(axis, 1), topology) for axis, ranks in found.items()]


def _axis_groups(axis: str, ranks: Ranks, stride: int, topology: Topology) -> AxisGroups:
    count, degree = ranks.shape
    hosts = 1 + (np.diff(ranks // topology.ranks_per_node, axis=1) != 0).sum(axis=1)
    width = min(stride, count)  # groups start at consecutive ranks up to the first group's second rank
    starts = (count // width, stride * degree, width)
    return AxisGroups(axis, degree, count, stride, starts, (int(hosts.min()), int(hosts.max())))


@dataclass(frozen=True)
class HostReport:
    """A host as its agent reports it: its slots and its topology address, outermost switch first ("spine.leaf1.n2")."""

    name: str
    slots: int
    address: str = ""


@dataclass(frozen=True)
class PlacedRank:
    """Where one rank runs."""

    rank: int
    host: str
    local_rank: int


@dataclass(frozen=True)
class Mesh:
    """A topology placed on hosts, the value of mesh.json. `hosts` are in mesh order, one rank per slot."""

    topology: Topology
    hosts: list[HostReport]

    def ranks(self) -> list[PlacedRank]:
        """Where every rank runs."""
        places = [(host.name, local) for host in self.hosts for local in range(host.slots)]
        return [PlacedRank(rank, name, local) for rank, (name, local) in enumerate(places)]

    def ranks_by_host(self) -> dict[str, list[int]]:
        """Ranks by host, in the order of the mesh."""
        found: dict[str, list[int]] = {}
        for place in self.ranks():
            found.setdefault(place.host, []).append(place.rank)
        return found

    def check_place(self, rank: int, world: int, host: str, local_rank: int) -> None:
        """Raises MisplacedError unless the mesh places `rank` of `world` where it runs, as `local_rank` of `host`."""
        ranks = self.ranks()
        if world != len(ranks):
            raise MisplacedError(f"rank {rank} is one of {world} ranks, but the mesh has {len(ranks)}")
        place = ranks[rank]
        if (place.host, place.local_rank) != (host, local_rank):
            raise MisplacedError(
                f"rank {rank} runs on {host} as local rank {local_rank}; "
                f"the mesh places it on {place.host} as local rank {place.local_rank}"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values for mesh.json: the hosts, and the groups of every axis by their rule."""
        return {**asdict(self), "groups": [asdict(rule) for rule in axis_groups(self.topology)]}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Mesh":
        """The mesh of a mesh.json."""
        return Mesh(Topology(**value["topology"]), [HostReport(**host) for host in value["hosts"]])


class MisplacedError(GemctlError):
    """A rank runs elsewhere than the mesh places it."""


def place_on_hosts(topology: Topology, hosts: Sequence[HostReport]) -> Mesh:
    """The mesh on `hosts` in topology order (by address, number-aware; equal addresses in the given order, never by
    name), each with consecutive ranks. A pure function of its arguments.

    Raises InputError if the hosts' slots do not add up to the world, or two hosts share a name.
    """
    _check_hosts(topology, hosts)
    return Mesh(topology, sorted(hosts, key=lambda host: topology_key(host.address)))


def _check_hosts(topology: Topology, hosts: Sequence[HostReport]) -> None:
    problems = []
    slots = sum(host.slots for host in hosts)
    if slots != topology.world_size:
        listed = ", ".join(f"{host.name}: {host.slots}" for host in hosts[:LISTED])
        listed += f", … {len(hosts) - LISTED} more" if len(hosts) > LISTED else ""
        problems.append(f"the mesh needs {topology.world_size} ranks, the hosts have {slots} slots ({listed})")
    problems += [
        f"host {host.name} has {host.slots} slots: it must have at least 1" for host in hosts if host.slots < 1
    ]
    times = Counter(host.name for host in hosts)
    problems += [f"host {name} reports {count} times" for name, count in sorted(times.items()) if count > 1]
    if problems:
        raise InputError(problems)


def topology_key(address: str) -> list[list[tuple[int, int, str]]]:
    """The sort key of a topology address, in which n2 comes before n10, level by level."""
    return [list(_pieces(level)) for level in address.split(".")]


def _pieces(level: str) -> Iterator[tuple[int, int, str]]:
    for text in re.findall(r"\d+|\D+", level):
        yield (0, int(text), "") if text.isdigit() else (1, 0, text)
