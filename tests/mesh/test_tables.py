"""Placement of tables: TorchRec's own row blocks, and a deterministic packing that is never far from the best."""

import itertools
import random

import pytest
import torch
from torchrec.distributed.sharding_plan import _calculate_rw_shard_sizes_and_offsets

from gemctl.config.schema import TopologyConfig
from gemctl.errors import InputError
from gemctl.plan.tables import fills, place, row_block, table_bytes
from gemctl.specs.data import FeatureSpec, LabelSpec, TableSpec


def spec_of(rows: dict[str, int]) -> FeatureSpec:
    return FeatureSpec("t", [TableSpec(name, count) for name, count in rows.items()], [LabelSpec("click")])


def test_row_wise_blocks_are_torchrecs() -> None:
    for rows, shards in itertools.product([2, 3, 5, 7, 8, 9, 64, 100, 101, 1000], [1, 2, 3, 4, 7, 8, 16]):
        sizes, _ = _calculate_rw_shard_sizes_and_offsets(rows, shards, 8)
        assert fills(rows, shards) == all(size > 0 for size, _ in sizes)
        if fills(rows, shards):
            table = place(spec_of({"t": rows}), 8, TopologyConfig(), shards)["t"]
            assert table.sharding == "row_wise" and table.rank is None
            assert table.rows_by_shard(shards).tolist() == [size for size, _ in sizes]


def test_a_table_too_small_for_every_rank_is_placed_whole_and_says_so() -> None:
    small = place(spec_of({"big": 100, "small": 5}), 8, TopologyConfig(), 4)
    assert (small["big"].sharding, small["big"].note) == ("row_wise", "")
    assert small["small"].sharding == "table_wise" and "5 rows in blocks of 2" in small["small"].note
    with pytest.raises(InputError) as caught:
        place(spec_of({"user": 5}), 8, TopologyConfig(tables={"user": "row_wise", "usr": "table_wise"}), 4)
    assert len(caught.value.problems) == 2
    assert "topology.tables.user=row_wise: 5 rows in blocks of 2" in caught.value.problems[0]
    assert "topology.tables.usr: t has no such table (user); did you mean user?" in caught.value.problems[1]


def test_named_shardings_stand_over_the_default() -> None:
    topology = TopologyConfig(table_sharding="table_wise", tables={"b": "row_wise"})
    placed = place(spec_of({"a": 50, "b": 80, "c": 20}), 4, topology, 4)
    assert [table.sharding for table in placed.values()] == ["table_wise", "row_wise", "table_wise"]
    # b leaves all four ranks with the same bytes; the larger of the others goes to the first of them
    assert (placed["a"].rank, placed["c"].rank) == (0, 1)


def test_packing_is_deterministic_and_within_four_thirds_of_the_best() -> None:
    """Graham's bound of largest-first: the fullest rank has at most 4/3 of the best possible."""
    generator = random.Random(1)
    for _ in range(30):
        rows = {f"t{number}": generator.randint(2, 1000) for number in range(7)}
        topology = TopologyConfig(table_sharding="table_wise")
        placed = place(spec_of(rows), 8, topology, 3)
        names = list(rows)
        generator.shuffle(names)
        again = place(spec_of({name: rows[name] for name in names}), 8, topology, 3)
        assert {name: table.rank for name, table in placed.items()} == {name: again[name].rank for name in rows}
        sizes = [table_bytes(count, 8) for count in rows.values()]
        ranks = [table.rank for table in placed.values()]
        fullest = max(sum(size for size, home in zip(sizes, ranks, strict=True) if home == rank) for rank in range(3))
        best = min(
            max(sum(size for size, home in zip(sizes, homes, strict=True) if home == rank) for rank in range(3))
            for homes in itertools.product(range(3), repeat=7)
        )
        assert fullest <= 4 / 3 * best


def test_row_block_matches_torch_chunk() -> None:
    for rows, shards in itertools.product(range(1, 30), range(1, 9)):
        assert row_block(rows, shards) == torch.empty(rows).chunk(shards)[0].numel()
