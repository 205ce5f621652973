"""Every legal topology trains as one process does, losses, gradient norms and final full state."""

import sys
from itertools import combinations

import pytest

from gemctl.mesh.topology import Axis, Topology
from tests.parallel.any_layout import TABLES, Case, assert_same, compare, legal_topologies, optimizer_for

WORLDS = range(1, 9)
# world, dp_replicate, dp_shard, ep, mp_replicate, mp_shard: every axis > 1 with every other one; two worlds, as each
# costs seconds to start; on six ranks one has no row
TWELVE = [
    Topology(4, 2, 2, 2, 2, 2, 4),
    Topology(4, 1, 4, 4, 1, 4, 4),
    Topology(4, 1, 4, 2, 2, 2, 4),
    Topology(4, 4, 1, 1, 4, 1, 4),
    Topology(4, 2, 2, 1, 1, 4, 4),
    Topology(4, 1, 4, 1, 4, 1, 4),
    Topology(4, 2, 2, 2, 1, 4, 4),
    Topology(4, 1, 4, 1, 2, 2, 4),
    Topology(6, 1, 6, 2, 2, 3, 6),
    Topology(6, 3, 2, 2, 3, 2, 6),
    Topology(6, 1, 6, 2, 1, 6, 6),
    Topology(6, 2, 3, 1, 6, 1, 6),
]


def check_all(chosen: list[Case], timeout: float = 110.0) -> None:
    """All cases are of one world."""
    for case, found in zip(chosen, compare(chosen[0].topology.world_size, chosen, timeout), strict=True):
        assert_same(case, found)


def test_twelve_topologies_cover_every_pair_of_axes() -> None:
    assert all(topology in legal_topologies(topology.world_size) for topology in TWELVE) and len(set(TWELVE)) == 12
    for first, second in combinations(Axis, 2):
        assert any(topology.degree(first) > 1 and topology.degree(second) > 1 for topology in TWELVE)


@pytest.mark.parametrize("world", sorted({topology.world_size for topology in TWELVE}))
def test_twelve_topologies_train_like_one_process(world: int) -> None:
    kinds = list(TABLES)
    chosen = [
        Case(topology, kinds[number % len(kinds)], optimizer_for(topology))
        for number, topology in enumerate(TWELVE)
        if topology.world_size == world
    ]
    check_all(chosen)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", WORLDS)
def test_all_legal_topologies_train_like_one_process(world: int, capsys: pytest.CaptureFixture[str]) -> None:
    legal = {size: legal_topologies(size) for size in WORLDS}
    assert sum(map(len, legal.values())) == 97
    chosen = [Case(topology, kind, optimizer_for(topology)) for topology in legal[world] for kind in TABLES]
    check_all(chosen, timeout=570)
    with capsys.disabled():
        sys.stdout.write(
            f" world {world}: {len(legal[world])} of 97 legal topologies of worlds 1 to 8, each with "
            f"{len(TABLES)} kinds of tables\n"
        )
