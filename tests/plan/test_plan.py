"""The plan as a value: totals, classes, size at scale, hash, what does not fit, what cannot be trained yet."""

import dataclasses
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from gemctl.cluster.host import Host
from gemctl.config.schema import (
    MOST_NODES,
    ClusterConfig,
    Config,
    DataConfig,
    LauncherConfig,
    SyntheticConfig,
    TopologyConfig,
    TrainConfig,
)
from gemctl.errors import DoesNotFit, InputError
from gemctl.plan.build import Plan, build, check_fits, to_json
from gemctl.plan.data_facts import data_facts
from gemctl.plan.fit import USABLE
from gemctl.plan.memory import MemoryObject, run_lengths, totals
from gemctl.render.plan import plan as render
from gemctl.specs.data import TableSpec
from gemctl.specs.model import EventTypeSpec, LayerSpec, ModelConfig
from gemctl.specs.sequence import BlockAttentionSpec, KunlunSpec
from tests.support.small import SPEC

GIB = 1 << 30


def config_of(**groups: Any) -> Config:
    launcher = groups.pop("launcher", LauncherConfig(ranks_per_node=4))
    return Config(data=DataConfig(spec="unused", train="unused"), launcher=launcher, **groups)


def host_of(memory: int) -> Host:
    return Host(2, memory, memory, GIB, [])


def by_rank(item: MemoryObject, plan: Plan) -> list[int]:
    return [item.at(rank) for rank in range(plan.topology.world_size)]


def test_totals_are_the_sums_of_their_parts_on_every_rank() -> None:
    config = config_of(topology=TopologyConfig(dp_replicate=2, tables={"user": "table_wise"}))
    plan = build(config, SPEC)
    parts = np.sum([by_rank(item, plan) for item in plan.objects], axis=0)
    assert (totals(plan.objects, plan.topology) == parts).all()
    assert sum(found.ranks for found in plan.classes.listed) == 4 and plan.classes.count == len(plan.classes.listed)
    for found in plan.classes.listed:
        assert found.total == sum(found.bytes.values()) == parts[found.first_rank]
        assert set(found.bytes) == {item.name for item in plan.objects}
    assert [found.total for found in plan.classes.listed] == sorted(
        (f.total for f in plan.classes.listed), reverse=True
    )


def test_classes_are_exactly_the_ranks_with_equal_bytes() -> None:
    for dp_replicate, sharding in ((1, "row_wise"), (2, "table_wise"), (4, "row_wise"), (8, "table_wise")):
        topology = TopologyConfig(dp_replicate=dp_replicate, table_sharding=sharding)  # type: ignore[arg-type]
        plan = build(config_of(topology=topology, launcher=LauncherConfig(ranks_per_node=8)), SPEC)
        vectors = list(zip(*(by_rank(item, plan) for item in plan.objects), strict=True))
        assert plan.classes.count == len(set(vectors))
        for found in plan.classes.listed:
            assert vectors.count(tuple(found.bytes.values())) == found.ranks
            assert vectors.index(tuple(found.bytes.values())) == found.first_rank


def test_run_lengths_expand_to_what_they_came_from() -> None:
    values = np.array([5, 5, 5, 2, 2, 9])
    assert run_lengths(values) == [[3, 5], [2, 2], [1, 9]]
    assert run_lengths(np.array([7])) == [[1, 7]]


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_sixteen_thousand_ranks_stay_small(sharding: str) -> None:
    tables = [TableSpec(f"t{number}", 1_000_000 + 1_003 * number) for number in range(500)]
    spec = dataclasses.replace(SPEC, tables=[*SPEC.tables, *tables])
    config = config_of(
        launcher=LauncherConfig(nodes=2048, ranks_per_node=8),
        topology=TopologyConfig(dp_replicate=64, table_sharding=sharding),  # type: ignore[arg-type]
        cluster=ClusterConfig(device="cuda", gpu="H200", memory_gb=2000),
        train=TrainConfig(global_batch=1 << 24),
    )
    plan = build(config, spec)
    text = to_json(plan)
    assert len(text) < 5_000_000
    assert json.loads(text)["topology"]["world_size"] == 16_384
    assert totals(plan.objects, plan.topology).max() == plan.classes.listed[0].total
    assert len(screen(plan).splitlines()) < 80


@pytest.mark.parametrize(("nodes", "replicas", "seconds"), [(256, 1, 1.5), (MOST_NODES, 1, 5), (MOST_NODES, 8192, 5)])
def test_plans_of_up_to_a_million_ranks_take_seconds(nodes: int, replicas: int, seconds: float) -> None:
    """Processor time of the slowest case, which does not fit, so that every change is tried; ≥ 3 times what it took."""
    config = config_of(
        launcher=LauncherConfig(nodes=nodes, ranks_per_node=64),
        topology=TopologyConfig(dp_replicate=replicas, mp_replicate=2 * replicas),
    )
    start = time.process_time()
    plan = build(config, SPEC, host_of(GIB))
    text = screen(plan)
    assert time.process_time() - start < seconds
    assert plan.topology.world_size == nodes * 64 and plan.fits is False and "DOES NOT FIT" in text
    assert "as cluster.memory_gb (memory per host) is not set" in " ".join(text.split())
    assert sum(found.ranks for found in plan.classes.listed) == nodes * 64 or plan.classes.count > 16


def test_the_hash_depends_on_the_configuration_alone() -> None:
    config = config_of()
    plans = [build(config, SPEC, host_of(memory)) for memory in (GIB, 64 * GIB)]
    assert plans[0].fits is False and plans[1].fits is True
    assert plans[0].hash == plans[1].hash
    assert build(config_of(train=TrainConfig(global_batch=4097)), SPEC).hash != plans[0].hash


def test_what_does_not_fit_names_class_objects_and_a_change_that_fits() -> None:
    train = TrainConfig(global_batch=1 << 17)
    config = config_of(train=train, cluster=ClusterConfig(memory_gb=6.0))
    plan = build(config, SPEC)
    assert plan.fits is False and plan.exit_code == 3
    with pytest.raises(DoesNotFit) as caught:
        check_fits(plan)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert "host0 needs" in message and "rank class (first rank 0" in message and "activations" in message
    change = message.rsplit("nearest change that fits: ", 1)[1]
    assert change.startswith("train.accumulate=")
    train.accumulate = int(change.partition("=")[2])
    assert build(config, SPEC).fits is True
    train.accumulate //= 2
    assert build(config, SPEC).fits is False  # a smaller change would not do


def test_what_no_single_change_can_fit_says_so() -> None:
    assert "no single change of the configuration fits" in build(config_of(), SPEC, host_of(GIB // 2)).fit.message


def test_hosts_of_a_local_run_share_the_machine() -> None:
    one = build(config_of(launcher=LauncherConfig(nodes=1, ranks_per_node=2)), SPEC, host_of(64 * GIB))
    two = build(config_of(launcher=LauncherConfig(nodes=2, ranks_per_node=2)), SPEC, host_of(64 * GIB))
    sized = config_of(launcher=LauncherConfig(nodes=2, ranks_per_node=2), cluster=ClusterConfig(memory_gb=64))
    per_host = build(sized, SPEC)
    assert "2 hosts" in two.fit.needs[0].pool and two.fit.needs[0].needed > one.fit.needs[0].needed
    assert per_host.fit.needs[0].needed < two.fit.needs[0].needed
    whole = totals(two.objects, two.topology).sum()
    assert whole < two.fit.needs[0].needed < USABLE * 64 * GIB


def test_gpu_memory_is_a_pool_of_its_own_and_may_be_unknown() -> None:
    known = build(config_of(cluster=ClusterConfig(device="cuda", gpu="H100", memory_gb=500)), SPEC)
    assert [need.pool for need in known.fit.needs] == ["host0", "the fullest GPU"]
    assert known.fits is True and known.fit.needs[1].available == 80 * 10**9
    unknown = build(config_of(cluster=ClusterConfig(device="cuda", memory_gb=500)), SPEC, host_of(64 * GIB))
    assert unknown.fits is None and unknown.exit_code == 0
    check_fits(unknown)
    overfull = build(config_of(cluster=ClusterConfig(device="cuda", memory_gb=0.1)), SPEC, host_of(64 * GIB))
    assert overfull.fits is False


def test_a_model_that_contradicts_itself_is_refused_with_all_its_problems() -> None:
    blocks = [LayerSpec(sequence=KunlunSpec(attention=BlockAttentionSpec()))]
    own = {"history": EventTypeSpec(window=3)}
    with pytest.raises(InputError) as error:
        build(config_of(model=ModelConfig(dim=32, heads=3, layers=blocks, event_types=own)), SPEC)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "model.heads is 3, which does not divide model.dim = 32",
        "model.event_types.history.window is 3, but block_attention has no window",
    ]
    build(config_of(model=ModelConfig(event_types=own)), SPEC)


def screen(plan: Plan) -> str:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as shown:
        console.print(render(plan))
    return shown.get()


def test_the_screen_shows_hosts_groups_objects_and_totals() -> None:
    plan = build(config_of(topology=TopologyConfig(dp_replicate=2)), SPEC, host_of(64 * GIB))
    text = screen(plan)
    words = [" ".join(line.split()) for line in text.splitlines()]
    assert {"dp_shard 2 2 [0–1] [2–3] 1 host", "mp_shard 4 1 [0–3] 1 host", "host0 0–3 0–1 0–1 0"} <= set(words)
    for item in plan.objects:
        assert item.name in text
    assert "fits" in text and "DOES NOT FIT" not in text and "until measured" in text
    assert len(text.splitlines()) < 60
    assert "DOES NOT FIT" in screen(build(config_of(), SPEC, host_of(GIB // 2)))


def write_log(path: Path, lengths: list[int]) -> None:
    times = [[1.0] * length for length in lengths]
    tags = [[1, 2, 3]] * len(lengths)
    pq.write_table(pa.table({"history_time": times, "tags": tags, "click": [0] * len(lengths)}), path, row_group_size=3)


def test_mean_lengths_come_from_the_footers(tmp_path: Path) -> None:
    write_log(tmp_path / "a.parquet", [4, 8, 3, 5])
    data = DataConfig(spec="unused", train=str(tmp_path))
    facts = data_facts(data, SPEC)
    assert (facts.source, facts.mean_events, facts.mean_ids) == ("Parquet footers", {"history": 5.0}, {"tags": 3.0})
    assert (facts.group_rows, facts.groups) == (3, 2)
    write_log(tmp_path / "a.parquet", [40, 80])  # longer than the spec's max_length of 9
    assert data_facts(data, SPEC).mean_events == {"history": 9.0}
    assert data_facts(dataclasses.replace(data, histories="empty"), SPEC).mean_events == {"history": 0.0}


def test_mean_lengths_do_not_depend_on_the_order_of_columns(tmp_path: Path) -> None:
    columns = {
        "history_time.raw": [[1]] * 2,
        "user": [{"a": 1, "b": [1, 2]}] * 2,
        "history_time": [[1] * 5] * 2,
        "tags": [[1, 2]] * 2,
    }
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    pq.write_table(pa.table(columns).select(["tags", "history_time"]), tmp_path / "1.parquet")
    facts = data_facts(DataConfig(spec="unused", train=str(tmp_path)), SPEC)
    assert (facts.mean_events, facts.mean_ids) == ({"history": 5.0}, {"tags": 2.0})


def test_absent_data_is_assumed_and_said(tmp_path: Path) -> None:
    data = DataConfig(spec="unused", train=str(tmp_path / "none"), synthetic=SyntheticConfig(rows=50_000))
    facts = data_facts(data, SPEC)
    assert facts.source.startswith("assumed") and facts.mean_events == {"history": 9.0} and facts.groups == 3
    (tmp_path / "none").write_bytes(b"not parquet")
    assert data_facts(data, SPEC).source.startswith("assumed")


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys; from gemctl.plan.build import build; from gemctl.render.plan import plan; "
        "from gemctl.cluster.checks import check_machine; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("rows", [10**7, 2**62])
def test_numbers_beyond_any_machine_do_not_fit(rows: int) -> None:
    huge = config_of(train=TrainConfig(global_batch=rows), model=ModelConfig(dim=2**24))
    with pytest.raises(DoesNotFit, match=r"parameters|more than any machine has: "):
        check_fits(build(huge, SPEC))
    wide = config_of(model=ModelConfig(head_hidden=[2**24] * 9))
    with pytest.raises(DoesNotFit):
        check_fits(build(wide, SPEC))
    tables = dataclasses.replace(SPEC, tables=[*SPEC.tables, TableSpec("vast", 2**62)])
    with pytest.raises(DoesNotFit, match="largest table"):
        build(config_of(), tables)
