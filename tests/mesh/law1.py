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

from gemctl.checkpoint.hash import gather_full
from gemctl.config.schema import Config, LauncherConfig, PrecisionConfig, TopologyConfig
from gemctl.mesh.axes import Axis
from gemctl.mesh.topology import Topology, check
from gemctl.parallel.assemble import assemble
from gemctl.specs.interaction import WukongExpertsSpec
from gemctl.specs.model import LayerSpec
from gemctl.train.ledger import Ledger
from gemctl.train.optim import DenseOptimizer
from gemctl.train.step import Flags, Stepper, StepResult
from tests.small import SPEC, local_batch, small_config
from tests.world import run_world

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


@dataclass(frozen=True)
class Trained:
    """Losses and gradient norms by step; on rank 0 the full state."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


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
    return replace(case, topology=Topology(1, 1, 1, 1, 1, 1, 1), tables="row-wise", accumulate=1)


def optimizer_for(topology: Topology) -> str:
    """Row-wise AdaGrad over replicas has semantics of its own (tests/mesh/test_tables_2d.py)."""
    return "sgd" if topology.mp_replicate > 1 else "rowwise_adagrad"


def reference(case: Case) -> Trained:
    """`case` in one process."""
    return _single(single(case))


@cache
def _single(case: Case) -> Trained:
    return run(1, [case])[0]


def run(world: int, cases: Sequence[Case], timeout: float = 120.0) -> list[Trained]:
    """Rank 0's results of all cases, one after the other in one world of forked ranks."""
    found: list[Trained] = run_world(world, train_all, list(cases), timeout=timeout)[0]
    return found


def train_all(cases: list[Case]) -> list[Trained]:
    return [train(case) for case in cases]


def configured(case: Case) -> Config:
    """The configuration of a case, as a user would write it."""
    config = small_config(case.global_batch, case.accumulate, STEPS)
    degrees: dict[str, Any] = {axis.value: case.topology.degree(axis) for axis in Axis}
    optimizer: Any = case.optimizer
    return replace(
        config,
        model=replace(config.model, layers=[LayerSpec(interaction=INTERACTION)]),
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
    """A step over this rank's rows; the most that a rank holds is the lookup's stride."""
    rows, rank, world = stepper.config.train.global_batch, dist.get_rank(), dist.get_world_size()
    return stepper.step(step, local_batch(step, rows, rank, world), max(1, -(-rows // world)), Flags())


def train(case: Case) -> Trained:
    stepper = made(case)
    losses, norms = [], []
    for step in range(STEPS):
        result = take_step(stepper, step)
        losses.append(result.loss)
        norms.append(result.grad_norm or 0.0)
    state = stepper.model.state() | stepper.optimizer.state()
    found = Trained(losses, norms, gather_full(state))
    drop_groups()
    return found


def drop_groups() -> None:
    """Destroys every process group but the default one."""
    dist.barrier()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def assert_same(case: Case, one: Trained, other: Trained, loss: float = 1e-5, state: float = 1e-4) -> None:
    """|Δloss|/loss and |Δnorm|/norm ≤ `loss`, every tensor of the full state ≤ `state` relative: sums in another order,
    amplified by AdamW's division."""
    for a, b in zip(one.losses + one.norms, other.losses + other.norms, strict=True):
        assert abs(a - b) <= loss * abs(a), (case, one.losses, other.losses, one.norms, other.norms)
    assert one.state.keys() == other.state.keys(), case
    for name, tensor in one.state.items():
        difference = float((tensor - other.state[name]).norm() / tensor.norm().clamp(min=1e-12))
        assert difference <= state, (case, name, difference)
