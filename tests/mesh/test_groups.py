"""Process groups against their definition by coordinates, and the mesh placed on hosts."""

import dataclasses
import itertools
import json
import random
import re

import pytest

from gemctl.errors import InputError
from gemctl.mesh.groups import (
    HostReport,
    Mesh,
    MisplacedError,
    axis_groups,
    dense_grid,
    expert_grid,
    groups,
    place_on_hosts,
    table_grid,
)
from gemctl.mesh.topology import Topology, divisors


def legal_topologies(largest: int, experts: int) -> list[Topology]:
    return [
        Topology(world, world // dp_shard, dp_shard, ep, world // mp_shard, mp_shard, world)
        for world in range(1, largest + 1)
        for dp_shard, mp_shard in itertools.product(divisors(world), repeat=2)
        for ep in divisors(dp_shard)
        if experts % ep == 0
    ]


def coordinates(rank: int, topology: Topology) -> dict[str, int]:
    """Every coordinate of a rank by repeated division: an independent definition of the grids."""
    inner, ep = rank % topology.dp_shard, rank % topology.ep
    return {
        "dp_replicate": rank // topology.dp_shard,
        "dp_shard": inner,
        "ep": ep,
        "expert_shard": inner // topology.ep,
        "mp_replicate": rank // topology.mp_shard,
        "mp_shard": rank % topology.mp_shard,
    }


OTHERS = {  # two ranks share a group of a family when they agree on these
    "dp_replicate": ("dp_shard",),
    "dp_shard": ("dp_replicate",),
    "ep": ("dp_replicate", "expert_shard"),
    "expert_shard": ("dp_replicate", "ep"),
    "mp_replicate": ("mp_shard",),
    "mp_shard": ("mp_replicate",),
}


def test_there_are_97_legal_topologies_of_worlds_1_to_8_with_4_experts() -> None:
    assert len(legal_topologies(8, 4)) == 97


@pytest.mark.parametrize("family", OTHERS)
def test_groups_are_the_ranks_that_differ_in_that_coordinate_alone(family: str) -> None:
    for topology in legal_topologies(12, 12):
        expected: dict[tuple[int, ...], list[int]] = {}
        for rank in range(topology.world_size):
            place = coordinates(rank, topology)
            expected.setdefault(tuple(place[other] for other in OTHERS[family]), []).append(rank)
        found = groups(topology)[family].tolist()
        assert sorted(found) == sorted(expected.values())
        for ranks in found:
            assert [coordinates(rank, topology)[family] for rank in ranks] == list(range(len(ranks)))


def test_grids_place_ranks_by_coordinates() -> None:
    topology = Topology(24, 2, 12, 4, 3, 8, 8)
    for rank in range(24):
        place = coordinates(rank, topology)
        assert dense_grid(topology)[place["dp_replicate"], place["dp_shard"]] == rank
        assert expert_grid(topology)[place["dp_replicate"], place["expert_shard"], place["ep"]] == rank
        assert table_grid(topology)[place["mp_replicate"], place["mp_shard"]] == rank


def test_rules_of_an_axis_give_its_groups_and_hosts() -> None:
    for topology in legal_topologies(12, 12):
        placed = dataclasses.replace(topology, ranks_per_node=max(1, topology.world_size // 3))
        expanded = groups(placed)
        for rule in axis_groups(placed):
            listed = expanded[rule.axis].tolist()
            assert [rule.ranks(group) for group in range(rule.groups)] == listed
            hosts = [len({rank // placed.ranks_per_node for rank in ranks}) for ranks in listed]
            assert rule.hosts == (min(hosts), max(hosts))


def test_expert_shards_are_a_family_only_where_experts_are_spread() -> None:
    families = [[rule.axis for rule in axis_groups(Topology(4, 1, 4, ep, 1, 4, 4))] for ep in (1, 2)]
    axes = ["dp_replicate", "dp_shard", "expert_shard", "ep", "mp_replicate", "mp_shard"]
    assert families == [[axis for axis in axes if axis != "expert_shard"], axes]


def test_placing_follows_addresses_not_names_nor_the_order_of_reports() -> None:
    topology = Topology(8, 2, 4, 1, 2, 4, 2)
    hosts = [
        HostReport("n10", 2, "spine.leaf2.n10"),
        HostReport("n2", 2, "spine.leaf10.n2"),
        HostReport("a", 2, "spine.leaf2.n9"),
        HostReport("z", 2, "spine.leaf1.n30"),
    ]
    mesh = place_on_hosts(topology, hosts)
    assert mesh.ranks_by_host() == {"z": [0, 1], "a": [2, 3], "n10": [4, 5], "n2": [6, 7]}
    assert [place.local_rank for place in mesh.ranks()] == [0, 1] * 4
    for seed in range(10):
        assert place_on_hosts(topology, random.Random(seed).sample(hosts, 4)) == mesh


def test_placing_keeps_the_given_order_where_no_address_tells() -> None:
    mesh = place_on_hosts(Topology(3, 1, 3, 1, 1, 3, 1), [HostReport("n10", 1), HostReport("n2", 2)])
    assert mesh.ranks_by_host() == {"n10": [0], "n2": [1, 2]}


def test_a_message_names_eight_hosts_and_counts_the_others() -> None:
    listed = ", ".join(f"n{number}: 1" for number in range(8))
    with pytest.raises(InputError, match=re.escape(f"11 slots ({listed}, … 3 more)")):
        place_on_hosts(Topology(4, 1, 4, 1, 1, 4, 4), [HostReport(f"n{number}", 1) for number in range(11)])


def test_placing_refuses_hosts_that_are_not_the_world() -> None:
    hosts = [HostReport("a", 2), HostReport("a", 1), HostReport("b", 0)]
    with pytest.raises(InputError) as caught:
        place_on_hosts(Topology(4, 1, 4, 1, 1, 4, 4), hosts)
    assert caught.value.problems == [
        "the mesh needs 4 ranks, the hosts have 3 slots (a: 2, a: 1, b: 0)",
        "host b has 0 slots: it must have at least 1",
        "host a reports 2 times",
    ]


def test_mesh_json_round_trips() -> None:
    topology = Topology(8, 2, 4, 2, 4, 2, 4)
    mesh = place_on_hosts(topology, [HostReport(f"host{number}", 2) for number in range(4)])
    value = json.loads(json.dumps(mesh.to_json()))
    assert Mesh.from_json(value) == mesh


def test_a_rank_elsewhere_than_laid_is_told_both_places() -> None:
    mesh = place_on_hosts(Topology(4, 1, 4, 1, 1, 4, 2), [HostReport("n10", 2, "leaf2"), HostReport("n2", 2, "leaf1")])
    mesh.check_place(2, 4, "n10", 0)
    wrong = [
        (2, 4, "n2", 0, "rank 2 runs on n2 as local rank 0; the mesh places it on n10 as local rank 0"),
        (2, 4, "n10", 1, "rank 2 runs on n10 as local rank 1; the mesh places it on n10 as local rank 0"),
        (1, 2, "n2", 1, "rank 1 is one of 2 ranks, but the mesh has 4"),
    ]
    for rank, world, host, local, told in wrong:
        with pytest.raises(MisplacedError) as caught:
            mesh.check_place(rank, world, host, local)
        assert str(caught.value) == told
