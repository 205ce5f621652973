"""Degrees of the 5D mesh: their rules, all checked at once, and what `auto` stands for.

World = dp_replicate·dp_shard = mp_replicate·mp_shard; that product is all that couples the dense side to the
tables'. `ep` splits `dp_shard`.

    gemctl plan topology.dp_replicate=2 topology.mp_shard=3 launcher.ranks_per_node=4     # exit 2, says why
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from gemctl.config.schema import LauncherConfig, TopologyConfig
from gemctl.errors import InputError


class Axis(StrEnum):
    """An axis of parallelism. The first two and `ep`, which splits `dp_shard`, are the dense part's."""

    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    EP = "ep"
    MP_REPLICATE = "mp_replicate"
    MP_SHARD = "mp_shard"


EXPERT_SHARD = "expert_shard"
"""The groups over which experts' parameters are sharded: `dp_shard` without its `ep` factor (dp_shard / ep ranks)."""
WORLD = "world"
"""The single group of all ranks, for what they agree on in each step."""
CLOCKS, CLOCKS_EVERY = 11, 5
"""Clock readings that each rank adds to that all-reduce to detect stragglers, and every how many steps."""


@dataclass(frozen=True)
class Topology:
    """A legal set of degrees. Rank r's place: dense (r // dp_shard, r % dp_shard), tables alike with mp_shard."""

    world_size: int
    dp_replicate: int
    dp_shard: int
    ep: int
    mp_replicate: int
    mp_shard: int
    ranks_per_node: int

    @property
    def expert_shard(self) -> int:
        """Ranks over which one expert's parameters are sharded."""
        return self.dp_shard // self.ep

    def degree(self, axis: Axis) -> int:
        """Ranks of one group of `axis`."""
        return int(getattr(self, axis.value))


class Rule(StrEnum):
    """A constraint on the degrees. It is checked only if its operands are legal themselves."""

    SIZE = "size"
    WORLD = "world"
    DENSE = "dense product"
    TABLES = "table product"
    EP_SHARD = "ep divides dp_shard"
    EP_EXPERTS = "ep divides experts"


@dataclass(frozen=True)
class Violation:
    """One broken rule, with its numbers and the values that would be allowed."""

    rule: Rule
    message: str


Degree = int | str  # a positive integer or "auto"
AUTO = "auto"


def resolve(topology: TopologyConfig, launcher: LauncherConfig, experts: int | None = None) -> Topology:
    """The topology that the configuration asks for.

    `auto`: one free degree of a side takes what the other leaves; two free ones mean replicate = 1; `ep` takes the
    largest degree that divides dp_shard, the experts and the ranks per node (so it stays inside a host).
    `experts` is the model's number of experts (None: it has none). Raises InputError with every broken rule.
    """
    found, violations = check(topology, launcher, experts)
    if found is None:
        raise InputError([violation.message for violation in violations])
    return found


def check(
    topology: TopologyConfig, launcher: LauncherConfig, experts: int | None = None
) -> tuple[Topology | None, list[Violation]]:
    """As `resolve`, without raising: the topology, or None and every broken rule (sizes first)."""
    violations = _sizes(topology, launcher)
    started = _product([launcher.nodes, launcher.ranks_per_node])
    world = started if topology.world_size == AUTO else _legal(topology.world_size)
    violations += _world(world, started, launcher)
    dense = _side(Rule.DENSE, world, {Axis.DP_REPLICATE: topology.dp_replicate, Axis.DP_SHARD: topology.dp_shard})
    tables = _side(Rule.TABLES, world, {Axis.MP_REPLICATE: topology.mp_replicate, Axis.MP_SHARD: topology.mp_shard})
    violations += dense.violations + tables.violations
    shard = dense.degrees[1] if dense.degrees else _legal(topology.dp_shard)
    ep, broken = _experts(topology.ep, shard, experts, _legal(launcher.ranks_per_node))
    violations += broken
    if violations or world is None or ep is None or dense.degrees is None or tables.degrees is None:
        return None, violations
    return Topology(world, *dense.degrees, ep, *tables.degrees, launcher.ranks_per_node), []


@dataclass(frozen=True)
class _Side:
    """(replicate, shard) of one side, or None, and its violations."""

    degrees: tuple[int, int] | None
    violations: list[Violation]


def _legal(degree: Degree) -> int | None:
    """The degree if it is a size (an integer ≥ 1), else None (`auto` too)."""
    return degree if isinstance(degree, int) and not isinstance(degree, bool) and degree >= 1 else None


def _product(sizes: Iterable[Degree]) -> int | None:
    legal = [_legal(size) for size in sizes]
    return None if None in legal else math.prod(size for size in legal if size is not None)


def _sizes(topology: TopologyConfig, launcher: LauncherConfig) -> list[Violation]:
    free = {f"topology.{name}": getattr(topology, name) for name in ("world_size", *(axis.value for axis in Axis))}
    fixed: dict[str, Degree] = {"launcher.nodes": launcher.nodes, "launcher.ranks_per_node": launcher.ranks_per_node}
    return [
        Violation(Rule.SIZE, f"{key} is {value!r}: it must be an integer ≥ 1" + (" or auto" if key in free else ""))
        for key, value in {**free, **fixed}.items()
        if _legal(value) is None and not (key in free and value == AUTO)
    ]


def _world(world: int | None, started: int | None, launcher: LauncherConfig) -> list[Violation]:
    if world is None or started is None or world == started:
        return []
    return [
        Violation(
            Rule.WORLD,
            f"topology.world_size is {world}, but the launcher starts launcher.nodes × launcher.ranks_per_node = "
            f"{launcher.nodes} × {launcher.ranks_per_node} = {started} ranks: set it to {started} or auto",
        )
    ]


def _side(rule: Rule, world: int | None, degrees: dict[Axis, Degree]) -> _Side:
    """Resolves one side; its product is judged when both degrees are `auto` or legal."""
    (first, replicate), (second, shard) = degrees.items()
    if world is None or any(value != AUTO and _legal(value) is None for value in degrees.values()):
        return _Side(None, [])
    if replicate == AUTO and shard == AUTO:
        return _Side((1, world), [])
    if AUTO in (replicate, shard):
        fixed_axis, fixed = (second, shard) if replicate == AUTO else (first, replicate)
        size = int(fixed)
        if world % size:
            message = f"topology.{fixed_axis} is {size}, which does not divide the world of {world} ranks"
            return _Side(None, [Violation(rule, f"{message}: allowed are {_divisors(world)}")])
        other = world // size
        return _Side((other, size) if replicate == AUTO else (size, other), [])
    if int(replicate) * int(shard) == world:
        return _Side((int(replicate), int(shard)), [])
    product = int(replicate) * int(shard)
    return _Side(None, [Violation(rule, _wrong_product(world, product, first, second, int(replicate), int(shard)))])


def _wrong_product(world: int, product: int, first: Axis, second: Axis, replicate: int, shard: int) -> str:
    pairs = [f"{world // divisor} × {divisor}" for divisor in divisors(world)]
    shown = ", ".join(pairs if len(pairs) <= 12 else [*pairs[:6], "…", *pairs[-6:]])
    return (
        f"topology.{first} × topology.{second} is {replicate} × {shard} = {product}, but the world has {world} ranks: "
        f"allowed are {shown} (or auto for one of them)"
    )


def _experts(
    ep: Degree, shard: int | None, experts: int | None, ranks_per_node: int | None
) -> tuple[int | None, list[Violation]]:
    """The resolved `ep` and its broken rules; None where it cannot be judged."""
    count = experts or 0
    if ep == AUTO:
        known = shard is not None and ranks_per_node is not None
        return (math.gcd(shard or 0, count, ranks_per_node or 0) if count else 1) if known else None, []
    size = _legal(ep)
    if size is None:
        return None, []
    violations = []
    if shard is not None and shard % size:
        message = f"topology.ep is {size}, which does not divide topology.dp_shard = {shard}"
        violations.append(Violation(Rule.EP_SHARD, f"{message}: allowed are {_divisors(shard)}"))
    if count == 0 and size > 1:
        violations.append(
            Violation(Rule.EP_EXPERTS, f"topology.ep is {size}, but the model has no experts: set it to 1")
        )
    elif count and count % size:
        message = f"topology.ep is {size}, which does not divide the model's {count} experts (those of all blocks: gcd)"
        violations.append(Violation(Rule.EP_EXPERTS, f"{message}: allowed are {_divisors(count)}"))
    return size, violations


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]


def _divisors(number: int) -> str:
    return ", ".join(map(str, divisors(number)))
