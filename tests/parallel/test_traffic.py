"""Bytes counted in real steps against the plan's, axis by axis, and what axes of degree 1 cost."""

from collections import Counter
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gemctl.config.schema import ClusterConfig
from gemctl.mesh.topology import CLOCKS, CLOCKS_EVERY, EXPERT_SHARD, WORLD, Axis, Topology
from gemctl.plan.build import build
from gemctl.plan.traffic import INT
from tests.parallel.any_layout import Case, configured, drop_groups, made, optimizer_for, take_step
from tests.support.small import SPEC
from tests.support.world import run_world

Sent = dict[tuple[str, str], tuple[int, int]]
WORLD_SIZE, ROWS = 4, 16
CASES = [
    Case(topology, tables, optimizer_for(topology), ROWS, accumulate, precision)
    for topology, tables, accumulate, precision in [
        (Topology(4, 1, 4, 2, 1, 4, 4), "row-wise", 1, "fp32"),
        (Topology(4, 2, 2, 2, 2, 2, 4), "mixed", 2, "fp32"),
        (Topology(4, 1, 4, 4, 4, 1, 4), "row-wise", 1, "bf16"),
        (Topology(4, 4, 1, 1, 1, 4, 4), "table-wise", 1, "fp32"),
        (Topology(4, 2, 2, 1, 2, 2, 4), "row-wise", 2, "bf16"),
    ]
]


def count_all(cases: list[Case]) -> list[Sent]:
    found = []
    for case in cases:
        stepper = made(case)
        take_step(stepper, 0)
        stepper.model.traffic.take()
        take_step(stepper, 1)
        counts, steps = stepper.model.traffic.take()
        assert steps == 1
        found.append(counts)
        drop_groups()
    return found


def planned(case: Case) -> Sent:
    config = replace(configured(case), cluster=ClusterConfig(memory_gb=64))
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for part in build(config, SPEC).traffic:
        calls[part.axis, part.collective] += part.messages
        sent[part.axis, part.collective] += part.bytes
    clocks = 2 * (WORLD_SIZE - 1) * CLOCKS / CLOCKS_EVERY * INT  # told every few steps, not in this one
    sent["world", "all-reduce"] = round(sent["world", "all-reduce"] - clocks)
    return {key: (calls[key], sent[key]) for key in calls}


@pytest.fixture(scope="module")
def counted() -> list[list[Sent]]:
    """By rank, what it sent in a step of each case."""
    found: list[list[Sent]] = run_world(WORLD_SIZE, count_all, CASES)
    return found


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_step_sends_what_the_plan_says(number: int, counted: list[list[Sent]]) -> None:
    """To the byte, but for all-to-alls of tables: those follow from the rows' own ids, of which the plan has no data
    here. Tables' replicas differ in what they hold: the plan counts the fullest."""
    plan, ranks = planned(CASES[number]), [rank[number] for rank in counted]
    replicas = Axis.MP_REPLICATE.value, "all-reduce"
    for found in ranks:
        assert found.keys() == plan.keys()
        for key in plan.keys() - {replicas}:
            calls, sent = found[key]
            assert calls == plan[key][0]
            assert sent == plan[key][1] or key == (Axis.MP_SHARD.value, "all-to-all")
    if replicas in plan:
        assert max(found[replicas] for found in ranks) == plan[replicas]


def groups_and_calls(case: Case) -> tuple[list[list[int]], Sent]:
    """Ranks of every group made for the model that this rank is in, and what a step sends."""
    stepper = made(case)
    take_step(stepper, 0)
    made_groups = [
        sorted(dist.get_process_group_ranks(group))
        for group in distributed_c10d._world.pg_map
        if group is not dist.group.WORLD
    ]
    return made_groups, stepper.model.traffic.take()[0]


@pytest.mark.parametrize(
    ("topology", "of_one"),
    [
        (Topology(1, 1, 1, 1, 1, 1, 1), 0),
        (Topology(2, 1, 2, 1, 1, 2, 2), 0),
        # FSDP2 needs a shard axis beside replicas, and beside experts: a group of one rank, which sends nothing.
        (Topology(2, 2, 1, 1, 1, 2, 2), 1),
        (Topology(2, 1, 2, 2, 1, 2, 2), 1),
    ],
)
def test_axes_of_degree_one_cost_nothing(topology: Topology, of_one: int) -> None:
    for made_groups, sent in run_world(topology.world_size, groups_and_calls, Case(topology)):
        assert sum(len(ranks) == 1 for ranks in made_groups) == of_one
        axes = {axis for axis, _ in sent}
        degrees = {axis.value: topology.degree(axis) for axis in Axis}
        degrees |= {EXPERT_SHARD: topology.expert_shard, WORLD: topology.world_size}
        assert all(degrees[axis] > 1 for axis in axes), axes
