"""Two training steps of a small model with experts under any topology, on forked ranks, and what must be equal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from gemctl.checkpoint.pieces import state_pieces
from gemctl.config.schema import Config, LauncherConfig, PrecisionConfig, TopologyConfig
from gemctl.mesh.topology import Axis, Topology, check
from gemctl.parallel.assemble import assemble
from gemctl.specs.interaction import WukongExpertsSpec
from gemctl.specs.model import LayerSpec
from gemctl.train.ledger import Ledger
from gemctl.train.optim import DenseOptimizer
from gemctl.train.step import Flags, Stepper, StepResult
from tests.support.full_state import gather_full
from tests.support.small import SPEC, local_batch, small_config
from tests.support.world import run_world

EXPERTS, STEPS = 4, 2
INTERACTION = WukongExpertsSpec(experts=EXPERTS, tokens=6, fm_tokens=2, lc_tokens=3, rank=3, hidden=[8])
TABLES = {  # how the three tables (41, 23 and 7 rows) are cut
    "row-wise": TopologyConfig(table_sharding="row_wise"),
    "table-wise": TopologyConfig(table_sharding="table_wise"),
    "mixed": TopologyConfig(table_sharding="row_wise", tables={"item": "table_wise"}),
}


@dataclass(frozen=True)
class Case:
    """One way to train the two steps. Tables' optimizer `sgd` is exact to the global batch for any mp_replicate."""

    topology: Topology
    tables: str = "row-wise"
    optimizer: str = "rowwise_adagrad"
    global_batch: int = 5  # from six ranks on, some have no row
    accumulate: int = 1
    precision: str = "fp32"
    recompute: str = "none"
    layers: int = 1


@dataclass(frozen=True)
class Trained:
    """Losses and gradient norms by step; on rank 0 the full state."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Compared:
    """Losses and gradient norms by step, and how far the full state is from the expected one, by tensor: relative
    distance, all ranks' copies counted."""

    losses: list[float]
    norms: list[float]
    distance: dict[str, float]


@cache
def legal_topologies(world: int) -> list[Topology]:
    """Every topology of a world that the rules accept, of all sets of degrees."""
    sets: Iterator[dict[str, Any]] = (
        dict(zip(map(str, Axis), degrees, strict=True)) for degrees in product(range(1, world + 1), repeat=len(Axis))
    )
    found = (check(TopologyConfig(**degrees), LauncherConfig(ranks_per_node=world), EXPERTS)[0] for degrees in sets)
    return [topology for topology in found if topology is not None]


def single(case: Case) -> Case:
    """The same training in one process."""
    return replace(case, topology=Topology(1, 1, 1, 1, 1, 1, 1), tables="row-wise", accumulate=1, recompute="none")


def optimizer_for(topology: Topology) -> str:
    """Row-wise AdaGrad over replicas has semantics of its own (tests/parallel/test_tables_2d.py)."""
    return "sgd" if topology.mp_replicate > 1 else "rowwise_adagrad"


def reference(case: Case) -> Trained:
    """`case` in one process."""
    return _single(single(case))


@cache
def _single(case: Case) -> Trained:
    return run(1, [case])[0]


def run(world: int, cases: Sequence[Case], timeout: float = 120.0) -> list[Trained]:
    """Rank 0's results of all cases, one after the other in one world of forked ranks."""
    found: list[Trained] = run_world(world, _train_all, list(cases), timeout=timeout)[0]
    return found


def compare(world: int, cases: Sequence[Case], timeout: float = 120.0) -> list[Compared]:
    """Every case, trained in one world of forked ranks, against its reference."""
    expected = {single(case): reference(case).state for case in cases}
    found: list[Compared] = run_world(world, _compare_all, list(cases), expected, timeout=timeout)[0]
    return found


def _train_all(cases: list[Case]) -> list[Trained]:
    return [train(case) for case in cases]


def _compare_all(cases: list[Case], expected: dict[Case, dict[str, Tensor]]) -> list[Compared]:
    found = []
    for case in cases:
        losses, norms, state = _trained(case)
        found.append(Compared(losses, norms, distances(state, expected[single(case)])))
        drop_groups()
    return found


def distances(state: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """‖state − expected‖ / ‖expected‖ by tensor, over the pieces of all ranks. Raises if a part is nowhere. Collective.

    This needs one message, where gathering the full state needs one for each piece.
    """
    squares = torch.zeros(2, len(expected), dtype=torch.float64)  # squared distance, elements
    pieces = state_pieces(state)
    for index, (name, full) in enumerate(expected.items()):
        for piece in pieces.get(name, []):
            ends = zip(piece.offsets, piece.tensor.shape, strict=True)
            box = full[tuple(slice(start, start + size) for start, size in ends)]
            squares[0, index] += (piece.tensor - box).double().square().sum()
            squares[1, index] += piece.tensor.numel()
    dist.all_reduce(squares)
    missing = [name for name, held in zip(expected, squares[1], strict=True) if held < expected[name].numel()]
    if missing or pieces.keys() - expected.keys():
        raise AssertionError(f"in part on no rank: {missing}; not expected: {pieces.keys() - expected.keys()}")
    return {
        name: float(square.sqrt() / full.double().norm().clamp(min=1e-12))
        for (name, full), square in zip(expected.items(), squares[0], strict=True)
    }


def configured(case: Case) -> Config:
    """The configuration of a case, as a user would write it."""
    config = small_config(case.global_batch, case.accumulate, STEPS)
    degrees: dict[str, Any] = {axis.value: case.topology.degree(axis) for axis in Axis}
    optimizer: Any = case.optimizer
    recompute: Any = case.recompute
    return replace(
        config,
        train=replace(config.train, recompute=recompute),
        model=replace(config.model, layers=[LayerSpec(interaction=INTERACTION, repeat=case.layers)]),
        optim=replace(config.optim, tables=replace(config.optim.tables, kind=optimizer)),
        precision=PrecisionConfig(case.precision),  # type: ignore[arg-type]
        topology=replace(TABLES[case.tables], **degrees),
        launcher=LauncherConfig(ranks_per_node=case.topology.world_size),
    )


def made(case: Case) -> Stepper:
    """A model on this rank, initialised, ready for its first step."""
    config = configured(case)
    model = assemble(config, SPEC, case.topology, torch.device("cpu"))
    model.initialise(seed=7)
    return Stepper(config, model, DenseOptimizer(model.dense, config.optim.dense), Ledger())


def take_step(stepper: Stepper, step: int) -> StepResult:
    """A step over this rank's rows; the most that a rank holds is the lookup's padded row count."""
    rows, rank, world = stepper.config.train.global_batch, dist.get_rank(), dist.get_world_size()
    return stepper.step(step, local_batch(step, rows, rank, world), max(1, -(-rows // world)), Flags())


def train(case: Case) -> Trained:
    """On every rank of a world; the state is on rank 0."""
    losses, norms, state = _trained(case)
    found = Trained(losses, norms, gather_full(state))
    drop_groups()
    return found


def _trained(case: Case) -> tuple[list[float], list[float], dict[str, Tensor]]:
    stepper = made(case)
    results = [take_step(stepper, step) for step in range(STEPS)]
    state = stepper.model.state() | stepper.optimizer.state()
    return [result.loss for result in results], [result.grad_norm or 0.0 for result in results], state


def drop_groups() -> None:
    """Destroys every process group but the default one."""
    dist.barrier()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def assert_same(case: Case, found: Compared, loss: float = 1e-5, state: float = 1e-4) -> None:
    """|Δloss|/loss and |Δnorm|/norm ≤ `loss`, every tensor of the full state ≤ `state` relative: sums in another order,
    amplified by AdamW's division."""
    one = reference(case)
    for a, b in zip(one.losses + one.norms, found.losses + found.norms, strict=True):
        assert abs(a - b) <= loss * abs(a), (case, one.losses, found.losses, one.norms, found.norms)
    worst = max(found.distance, key=lambda name: found.distance[name])
    assert found.distance[worst] <= state, (case, worst, found.distance[worst])
