"""Placement of tables: TorchRec's own row blocks, a packing that is never far from the best, and what is refused."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchrec.distributed.sharding_plan import _calculate_rw_shard_sizes_and_offsets

from gemctl.config.compose import compose
from gemctl.config.schema import Config, LauncherConfig, TopologyConfig
from gemctl.errors import InputError
from gemctl.mesh.topology import resolve
from gemctl.plan.tables import TablePlan, dummy_tables, fills, place, replication, row_block
from gemctl.specs.data import CategoricalSpec, EventIdSpec, FeatureSpec, LabelSpec, SequenceSpec, TableSpec
from tests.support.small import small_config

STATE = 1 + 8  # floats of a row of 8 columns with row-wise AdaGrad


def spec_of(rows: dict[str, int]) -> FeatureSpec:
    return FeatureSpec("t", [TableSpec(name, count) for name, count in rows.items()], [LabelSpec("click")])


def config_of(dim: int = 8, **topology: object) -> Config:
    config = small_config()
    return replace(config, model=replace(config.model, dim=dim), topology=TopologyConfig(**topology))  # type: ignore[arg-type]


def placed(spec: FeatureSpec, config: Config, ranks: int, nodes: int = 1) -> dict[str, TablePlan]:
    launcher = LauncherConfig(nodes=nodes, ranks_per_node=ranks // nodes)
    return place(spec, config, resolve(config.topology, launcher))


def test_row_wise_blocks_are_torchrecs() -> None:
    for rows, shards in itertools.product([2, 3, 5, 7, 8, 9, 64, 100, 101, 1000], [1, 2, 3, 4, 7, 8, 16]):
        sizes, _ = _calculate_rw_shard_sizes_and_offsets(rows, shards, 8)
        table = placed(spec_of({"t": rows}), config_of(), shards)["t"]
        assert table.rows_by_shard(shards).tolist() == [size for size, _ in sizes]
        assert fills(rows, shards) == all(size > 0 for size, _ in sizes)


def test_a_table_that_leaves_ranks_without_rows_brings_a_dummy_table_of_one_row_per_rank() -> None:
    tables = placed(spec_of({"big": 100, "small": 5, "tiny": 2}), config_of(tables={"tiny": "table_wise"}), 4)
    assert [table.sharding for table in tables.values()] == ["row_wise", "row_wise", "table_wise"]
    assert tables["small"].rows_by_shard(4).tolist() == [2, 2, 1, 0]
    (dummy,) = dummy_tables(tables.values())
    assert "/" in dummy.name  # no name of a spec has one
    assert dummy.rows_by_shard(4).tolist() == [1, 1, 1, 1]
    assert (dummy.weight_bytes, dummy.state_bytes) == (4 * 8 * 4, 4 * 4)


def test_named_shardings_stand_over_the_default() -> None:
    config = config_of(4, table_sharding="table_wise", tables={"b": "row_wise"})
    tables = placed(spec_of({"a": 50, "b": 80, "c": 20}), config, 4)
    assert [table.sharding for table in tables.values()] == ["table_wise", "row_wise", "table_wise"]
    # b leaves all four ranks with the same bytes; the larger of the others goes to the first of them
    assert (tables["a"].first_rank, tables["c"].first_rank) == (0, 1)


def test_a_table_on_one_host_is_cut_over_its_ranks() -> None:
    kinds = {"a": "table_row_wise", "b": "table_row_wise", "c": "table_wise"}
    tables = placed(spec_of({"a": 50, "b": 9, "c": 20, "d": 42}), config_of(tables=kinds), 6, nodes=2)
    assert tables["a"].rows_by_shard(6).tolist() == [17, 17, 16, 0, 0, 0]
    assert tables["b"].rows_by_shard(6).tolist() == [0, 0, 0, 3, 3, 3]
    assert tables["c"].first_rank == 3  # the first rank of the lighter host
    small = placed(spec_of({"a": 2, "d": 42}), config_of(tables={"a": "table_row_wise"}), 6, nodes=2)
    assert [dummy.rows_by_shard(6).tolist() for dummy in dummy_tables(small.values())] == [[1, 1, 1, 0, 0, 0]]


def test_packing_is_deterministic_and_within_four_thirds_of_the_best() -> None:
    """Graham's bound of largest-first: the fullest rank has at most 4/3 of the best possible."""
    generator = random.Random(1)
    for _ in range(30):
        rows = {f"t{number}": generator.randint(2, 1000) for number in range(7)}
        config = config_of(table_sharding="table_wise")
        tables = placed(spec_of(rows), config, 3)
        names = list(rows)
        generator.shuffle(names)
        again = placed(spec_of({name: rows[name] for name in names}), config, 3)
        assert {name: tables[name].first_rank for name in rows} == {name: again[name].first_rank for name in rows}
        fullest = max(sum(table.rows_by_shard(3)[rank] for table in tables.values()) for rank in range(3))
        best = min(
            max(sum(size for size, home in zip(rows.values(), homes, strict=True) if home == rank) for rank in range(3))
            for homes in itertools.product(range(3), repeat=7)
        )
        assert fullest <= 4 / 3 * best


def test_replicas_add_their_share_of_the_bytes() -> None:
    """S·(M−1)/T more on a rank than one replica over all ranks (arXiv 2508.03854)."""
    spec, launcher = spec_of({"a": 640, "b": 64}), LauncherConfig(ranks_per_node=8)
    one, many = (config_of(mp_replicate=replicas, tables={"b": "table_wise"}) for replicas in (1, 4))
    held = {}
    for config in (one, many):
        topology = resolve(config.topology, launcher)
        tables = place(spec, config, topology)
        held[topology.mp_replicate] = sum(table.rows_by_shard(topology.mp_shard) for table in tables.values())
    found = replication(place(spec, many, resolve(many.topology, launcher)), resolve(many.topology, launcher))
    row = STATE * 4
    assert found.replica_bytes == 704 * row
    assert found.added_bytes == (np.mean(held[4]) - np.mean(held[1])) * row == 704 * row * 3 // 8
    assert found.imbalance == pytest.approx((320 + 64) / 352)


def test_sgd_keeps_no_state() -> None:
    config = config_of()
    config.optim.tables.kind = "sgd"
    assert placed(spec_of({"a": 50}), config, 2)["a"].state_bytes == 0


def test_what_a_table_on_one_host_cannot_be_is_refused_with_the_way_out() -> None:
    spec = replace(
        spec_of({"user": 50, "item": 60}),
        categorical=[CategoricalSpec("user", "user")],
        sequences=[SequenceSpec("seen", [EventIdSpec("item", "item")], "seen_time", [], max_length=5)],
    )
    with pytest.raises(InputError) as caught:
        placed(spec, config_of(table_sharding="table_row_wise", tables={"usr": "table_wise"}), 6, nodes=2)
    unknown, events = caught.value.problems
    assert unknown == "topology.tables.usr: t has no such table (user, item); did you mean user?"
    assert events.startswith("topology.table_sharding=table_row_wise: event sequences look up item unpooled")
    assert events.endswith("topology.tables.item=row_wise")
    on_host = {"user": "table_row_wise"}
    for shard, ranks, words in (
        (6, 4, "does not fill whole hosts of 4 ranks"),
        (3, 4, "span parts of several hosts of 4 ranks"),
    ):
        config = config_of(mp_shard=shard, mp_replicate="auto", tables=on_host)
        with pytest.raises(InputError, match=words):
            placed(spec, config, 3 * ranks, nodes=3)
    for shard, ranks in ((2, 4), (4, 4), (12, 4), (1, 4)):
        assert placed(spec, config_of(mp_shard=shard, mp_replicate="auto", tables=on_host), 3 * ranks, nodes=3)


@pytest.mark.parametrize(
    ("kind", "reason", "nearest"),
    [
        ("column_wise", "one AdaGrad state per shard of columns", "table_wise"),
        ("grid_shard", "one AdaGrad state per shard of columns", "table_row_wise"),
        ("data_parallel", "no fused optimizer", "table_wise"),
    ],
)
def test_kinds_that_would_change_the_result_are_refused_with_the_reason(kind: str, reason: str, nearest: str) -> None:
    for setting in (f"topology.table_sharding={kind}", f"topology.tables={{item: {kind}}}"):
        with pytest.raises(InputError) as caught:
            compose(None, ["experiment=synthetic", setting])
        (problem,) = caught.value.problems
        assert "must be row_wise, table_wise or table_row_wise" in problem
        assert reason in problem and f"nearest: {nearest}" in problem


def test_row_block_matches_torch_chunk() -> None:
    for rows, shards in itertools.product(range(1, 30), range(1, 9)):
        assert row_block(rows, shards) == torch.empty(rows).chunk(shards)[0].numel()
