"""The plan's bytes and messages against the real thing: FSDP2 and TorchRec on four ranks, one real training step."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gemctl.config.schema import ClusterConfig, Config, LauncherConfig, PrecisionConfig, TopologyConfig
from gemctl.data.batch import Batch, Jagged
from gemctl.model.gem import GemModel
from gemctl.parallel.assemble import assemble
from gemctl.parallel.tables import local_slices
from gemctl.plan.build import Plan, build
from gemctl.specs.count import dense_parameters
from gemctl.specs.data import CategoricalSpec, TableSpec
from gemctl.specs.interaction import WukongExpertsSpec
from gemctl.specs.model import LayerSpec
from gemctl.train.ledger import Ledger
from gemctl.train.optim import DenseOptimizer
from gemctl.train.step import Flags, Stepper
from tests.support.small import SPEC, local_batch, small_config
from tests.support.world import run_world

WORLD, ROWS = 4, 16
TINY_SPEC = replace(
    SPEC,
    tables=[*SPEC.tables, TableSpec("parity", 2)],  # too few rows for four ranks: row-wise it brings a dummy table
    categorical=[*SPEC.categorical, CategoricalSpec("parity", "parity")],
)
KINDS = {  # dispatcher's name of a collective → the plan's
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
}


@dataclass(frozen=True)
class Case:
    """A layout of the small model; `heads` makes the heads large enough to be a unit of their own."""

    dp_replicate: int
    sharding: str
    accumulate: int = 1
    heads: int = 16
    precision: str = "fp32"
    tables: tuple[tuple[str, str], ...] = ()
    mp_replicate: int = 1
    hosts: int = 1
    ep: int = 1
    experts: int = 0


CASES = {
    "mixed, 2 × 2, two micro-batches": Case(2, "row_wise", accumulate=2, heads=1100, tables=(("item", "table_wise"),)),
    "table-wise, 1 × 4, bf16": Case(1, "table_wise", heads=1100, precision="bf16"),
    "row-wise, replicas alone": Case(4, "row_wise"),
    "two replicas of the tables, each on a host": Case(
        2, "row_wise", tables=(("user", "table_row_wise"), ("tag", "table_wise")), mp_replicate=2, hosts=2
    ),
    "experts, 1 × 4": Case(1, "row_wise", ep=2, experts=4),
    "experts that two shards cut unevenly, 1 × 4, bf16": Case(1, "row_wise", ep=2, experts=2, precision="bf16"),
    "whole experts, stacked, 2 × 2": Case(2, "row_wise", experts=3),
}


def configured(case: Case) -> Config:
    config = small_config(ROWS, accumulate=case.accumulate)
    block = WukongExpertsSpec(experts=case.experts, tokens=5, fm_tokens=2, lc_tokens=3, rank=3, hidden=[9])
    layer = LayerSpec(interaction=block) if case.experts else LayerSpec()
    return replace(
        config,
        model=replace(config.model, head_hidden=[case.heads, case.heads], layers=[layer]),
        topology=TopologyConfig(
            dp_replicate=case.dp_replicate,
            ep=case.ep,
            mp_replicate=case.mp_replicate,
            table_sharding=case.sharding,  # type: ignore[arg-type]
            tables=dict(case.tables),  # type: ignore[arg-type]
        ),
        precision=PrecisionConfig(case.precision),  # type: ignore[arg-type]
        launcher=LauncherConfig(nodes=case.hosts, ranks_per_node=WORLD // case.hosts),
        cluster=ClusterConfig(memory_gb=64),
    )


class Collectives(TorchDispatchMode):
    """Counts collectives by kind, and the bytes that all-gathers and reduce-scatters send (all but the own shard)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = KINDS.get(func._opname, func._opname)
            self.calls[kind] += 1
            if kind in {"all-gather", "reduce-scatter"}:
                self.bytes[kind] += abs(total_bytes(args[0]) - total_bytes(args[1]))
        return func(*args, **(kwargs or {}))


def total_bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else sum(map(total_bytes, value))


def measure_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [measure(case) for case in cases]


def measure(case: Case) -> dict[str, Any]:
    """Bytes of every exact object on this rank, and the collectives of one step."""
    config = configured(case)
    plan = build(config, TINY_SPEC)
    model = assemble(config, TINY_SPEC, plan.topology, torch.device("cpu"))
    model.initialise(seed=1)
    optimizer = DenseOptimizer(model.dense, config.optim.dense)
    stepper = Stepper(config, model, optimizer, Ledger())
    gradients: dict[int, int] = {}
    drop = optimizer.zero_grad

    def zero_grad() -> None:
        gradients.update(storages([p.grad for p in model.dense.parameters() if p.grad is not None]))
        drop()

    stepper.step(0, batch_of(0), ROWS // WORLD, Flags())
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    with Collectives() as counted:
        stepper.step(1, batch_of(1), ROWS // WORLD, Flags())
    state = [*optimizer.moments["exp_avg"], *optimizer.moments["exp_avg_sq"], *optimizer.steps]
    tables = model.tables.state()
    weights = [value for name, value in tables.items() if not name.startswith("optim.")]
    moments = [value for name, value in tables.items() if name.startswith("optim.")]
    return {
        "dense weights": sum(storages(list(model.dense.parameters())).values()),
        "dense gradients": sum(gradients.values()),
        "AdamW state": sum(storages(state).values()),
        "tables": sum(storages(shards_of(weights)).values()),
        "tables' AdaGrad state": sum(storages(shards_of(moments)).values()),
        "calls": dict(counted.calls),
        "bytes": dict(counted.bytes),
    }


def batch_of(step: int) -> Batch:
    """This rank's rows, with ids for the table of two rows."""
    batch = local_batch(step, ROWS, dist.get_rank(), WORLD)
    batch.categorical["parity"] = Jagged(batch.rows % 2, torch.arange(len(batch) + 1))
    return batch


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes by storage, padding included."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    found = [tensor.untyped_storage() for tensor in local]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def shards_of(values: list[Tensor]) -> list[Tensor]:
    """This rank's shards of tables; dummies share their storage."""
    return [part.tensor for value in values for part in local_slices(value)]


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank measured."""
    ranks = run_world(WORLD, measure_all, list(CASES.values()), timeout=100)
    return {name: [rank[number] for rank in ranks] for number, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_and_messages_are_those_of_a_real_step(
    name: str, measured: dict[str, list[dict[str, Any]]]
) -> None:
    plan, ranks = build(configured(CASES[name]), TINY_SPEC), measured[name]
    exact = [item for item in plan.objects if item.name in ranks[0]]
    assert len(exact) == 5
    for item in exact:
        assert [item.at(rank) for rank in range(len(ranks))] == [found[item.name] for found in ranks], item.name
    calls, sent = planned_traffic(plan)
    fullest = max(ranks, key=lambda found: found["tables"])  # another may have no table of a kind to average
    assert calls == fullest["calls"]
    assert {kind: sent[kind] for kind in ranks[0]["bytes"]} == ranks[0]["bytes"]


def planned_traffic(plan: Plan) -> tuple[dict[str, int], Counter[str]]:
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for part in plan.traffic:
        calls[part.collective] += part.messages
        sent[part.collective] += part.bytes
    return dict(calls), sent


def test_parameters_are_the_models() -> None:
    for case in CASES.values():
        config = configured(case)
        with torch.device("meta"):
            dense = GemModel(config.model, TINY_SPEC).dense
        found = [(name, tuple(parameter.shape)) for name, parameter in dense.named_parameters()]
        assert sorted(found) == sorted(dense_parameters(config.model, TINY_SPEC))
