"""Rules of the topology against an independent brute force, and the named cases of wrong topologies."""

import random
import re
import time
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from gemctl.config.schema import LauncherConfig, TopologyConfig
from gemctl.errors import InputError
from gemctl.mesh.topology import Axis, Rule, Topology, check, divisors, resolve

AXES = tuple(Axis)


def launcher(nodes: int = 1, ranks: int = 4) -> LauncherConfig:
    return LauncherConfig(nodes=nodes, ranks_per_node=ranks)


def brute_force(topology: TopologyConfig, experts: int | None, nodes: int, ranks: int) -> set[Rule]:
    """Rules that no choice of integers for the autos can keep; a rule with an operand below 1 is not judged."""
    broken: set[Rule] = set()
    values: dict[str, Any] = {axis: getattr(topology, axis) for axis in AXES}
    if any(value != "auto" and value < 1 for value in [*values.values(), topology.world_size, nodes, ranks]):
        broken.add(Rule.SIZE)
    started = nodes * ranks
    if min(nodes, ranks) < 1:
        started = 0
    world = started if topology.world_size == "auto" else topology.world_size
    if world >= 1 and started >= 1 and world != started:
        broken.add(Rule.WORLD)
    shards = [values["dp_shard"]] if values["dp_shard"] != "auto" else []
    if world >= 1:
        for rule, first, second in (
            (Rule.DENSE, "dp_replicate", "dp_shard"),
            (Rule.TABLES, "mp_replicate", "mp_shard"),
        ):
            choices = [range(1, world + 1) if values[axis] == "auto" else [values[axis]] for axis in (first, second)]
            if any(value != "auto" and value < 1 for value in (values[first], values[second])):
                continue
            fitting = [pair for pair in product(*choices) if pair[0] * pair[1] == world]
            if not fitting:
                broken.add(rule)
            elif rule == Rule.DENSE:
                shards = [max(shard for _, shard in fitting)]
    ep = values["ep"]
    if ep != "auto" and ep >= 1:
        if shards and shards[0] >= 1 and not any(ep * other == shards[0] for other in range(1, shards[0] + 1)):
            broken.add(Rule.EP_SHARD)
        if (experts is None and ep != 1) or (experts is not None and ep not in divisors(experts)):
            broken.add(Rule.EP_EXPERTS)
    return broken


def legal_topology(generator: random.Random, world: int, experts: int | None) -> dict[str, Any]:
    """Degrees of a world that keep every rule; some are `auto`."""
    dp_shard, mp_shard = generator.choice(divisors(world)), generator.choice(divisors(world))
    ep = generator.choice([size for size in divisors(dp_shard) if (experts or 1) % size == 0])
    degrees = (world // dp_shard, dp_shard, ep, world // mp_shard, mp_shard)
    values: dict[str, Any] = dict(zip(map(str, AXES), degrees, strict=True))
    values |= {key: "auto" for key in values if generator.random() < 0.15}
    return values | ({"world_size": world} if generator.random() < 0.3 else {})


def edit(generator: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """The same but for one key, whose value is another one."""
    key = generator.choice([*map(str, AXES), "world_size"])
    before = values.get(key, "auto")
    others = [value for value in (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 48, "auto") if value != before]
    return values | {key: generator.choice(others)}


def random_topology(generator: random.Random, edited: bool) -> tuple[dict[str, Any], int | None, int, int]:
    """Degrees, experts, nodes and ranks of a node: one edit away from legal ones, or any."""
    nodes, ranks = generator.choice([1, 1, 2, 3]), generator.choice([1, 2, 3, 4, 6, 8])
    experts = generator.choice([None, 1, 2, 3, 4, 6, 8])
    if edited:
        return edit(generator, legal_topology(generator, nodes * ranks, experts)), experts, nodes, ranks
    choices = ["auto", "auto", 1, 1, 1, 2, 2, 3, 4, 4, 6, 8, 0, -1, 24]
    values = {str(axis): generator.choice(choices) for axis in AXES}
    return values | {"world_size": generator.choice(["auto", "auto", nodes * ranks, 4])}, experts, nodes, ranks


@dataclass
class Tally:
    """What the random topologies came to."""

    seen: set[Rule] = field(default_factory=set)
    legal: int = 0
    illegal: int = 0

    def judge(self, values: dict[str, Any], experts: int | None, nodes: int, ranks: int) -> None:
        """One topology: accepted as a legal one, or refused by `resolve` with just the rules that brute force finds."""
        topology = TopologyConfig(**values)
        expected = brute_force(topology, experts, nodes, ranks)
        found, violations = check(topology, launcher(nodes, ranks), experts)
        assert {violation.rule for violation in violations} == expected, (topology, experts, nodes, ranks)
        self.seen |= expected
        if found is None:
            self.illegal += 1
            messages = problems(experts, ranks, nodes, **values)
            assert messages == [violation.message for violation in violations]
            assert all(re.search(r"-?\d", text) and ALLOWED.search(text) for text in messages), messages
            return
        self.legal += 1
        assert found.dp_replicate * found.dp_shard == found.world_size == found.mp_replicate * found.mp_shard
        assert found.dp_shard % found.ep == 0 and (experts or 1) % found.ep == 0
        assert all(value in ("auto", found.degree(Axis(axis))) for axis, value in values.items() if axis in AXES)


ALLOWED = re.compile("allowed are|must be an integer ≥ 1|set it to")


def test_random_topologies_break_exactly_the_rules_that_brute_force_finds() -> None:
    generator, start = random.Random(0), time.process_time()
    edited, drawn = Tally(), Tally()
    for number in range(20_000):
        tally = edited if number % 2 else drawn
        tally.judge(*random_topology(generator, edited=tally is edited))
    assert edited.legal + edited.illegal == 10_000
    for tally in (edited, drawn):
        assert tally.seen == set(Rule) and min(tally.legal, tally.illegal) > 100
    assert time.process_time() - start < 20


def problems(experts: int | None = None, ranks: int = 4, nodes: int = 1, **degrees: Any) -> list[str]:
    """What `resolve` refuses the degrees for; its exit code is checked."""
    with pytest.raises(InputError) as caught:
        resolve(TopologyConfig(**degrees), launcher(nodes, ranks), experts)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_world_of_six_has_no_groups_of_four() -> None:
    assert problems(ranks=6, dp_shard=4, dp_replicate="auto") == [
        "topology.dp_shard is 4, which does not divide the world of 6 ranks: allowed are 1, 2, 3, 6"
    ]
    assert problems(ranks=6, dp_shard=4, dp_replicate=2) == [
        "topology.dp_replicate × topology.dp_shard is 2 × 4 = 8, but the world has 6 ranks: "
        "allowed are 6 × 1, 3 × 2, 2 × 3, 1 × 6 (or auto for one of them)"
    ]


def test_three_experts_do_not_spread_over_two() -> None:
    assert problems(experts=3, ep=2) == [
        "topology.ep is 2, which does not divide the model's 3 experts (those of all blocks: gcd): allowed are 1, 3"
    ]
    assert problems(ep=2) == ["topology.ep is 2, but the model has no experts: set it to 1"]


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused_by_key(size: int) -> None:
    found = problems(dp_shard=size, mp_replicate=size)
    assert found == [
        f"topology.dp_shard is {size}: it must be an integer ≥ 1 or auto",
        f"topology.mp_replicate is {size}: it must be an integer ≥ 1 or auto",
    ]


def test_group_larger_than_the_world() -> None:
    assert "does not divide the world of 4 ranks: allowed are 1, 2, 4" in problems(mp_shard=8, mp_replicate="auto")[0]


def test_all_violations_come_at_once() -> None:
    found = problems(experts=4, world_size=8, dp_replicate=3, dp_shard=3, ep=8, mp_replicate=0, mp_shard=4)
    assert len(found) == 5
    for words in ("mp_replicate is 0", "= 1 × 4 = 4 ranks", "3 × 3 = 9", "topology.dp_shard = 3", "4 experts"):
        assert any(words in problem for problem in found), words


def test_auto_takes_what_is_left() -> None:
    assert resolve(TopologyConfig(), launcher()) == Topology(4, 1, 4, 1, 1, 4, 4)
    two_free = TopologyConfig(dp_replicate="auto", mp_replicate="auto")
    assert resolve(two_free, launcher()) == Topology(4, 1, 4, 1, 1, 4, 4)
    wide = TopologyConfig(dp_replicate=2, mp_replicate=4, ep="auto")
    assert resolve(wide, launcher(nodes=4, ranks=8), experts=12) == Topology(32, 2, 16, 4, 4, 8, 8)
