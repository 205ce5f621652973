"""Worlds, batch sizes and accumulation give the steps of one process."""

import math
import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gemctl.config.schema import LauncherConfig, TopologyConfig
from gemctl.data.batch import Batch
from gemctl.errors import GemctlError
from gemctl.failpoints import failpoint
from gemctl.mesh.topology import resolve
from gemctl.parallel.assemble import assemble
from gemctl.run.base import RolledBack
from gemctl.specs.data import FeatureSpec
from gemctl.specs.model import LayerSpec
from gemctl.specs.sequence import BlockAttentionSpec, JaggedAttentionSpec, KunlunSpec
from gemctl.train.ledger import Ledger
from gemctl.train.optim import DenseOptimizer
from gemctl.train.policy import LEAST, NanStop, RollBack, Spikes
from gemctl.train.step import Flags, Stepper
from tests.support.full_state import gather_full
from tests.support.small import SPEC, local_batch, small_config
from tests.support.world import run_world


@dataclass(frozen=True)
class Case:
    """One way to train the same 20 steps."""

    dp_replicate: int = 1
    global_batch: int = 16
    accumulate: int = 1
    steps: int = 20
    sharding: str = "row_wise"
    poison: tuple[int, int] | None = None  # (step, rank) whose labels make a NaN loss
    nan: str = "skip"
    spike: tuple[int, int] | None = None  # (step, rank) whose labels make a finite loss far above the others
    without: str = ""  # "dense" or "sequences": a part that the spec does not have
    attention: str = "jagged_flash_attention"
    label: float | None = None  # of every row; None: as they are

    def spec(self) -> FeatureSpec:
        if self.without == "sequences":
            return replace(SPEC, sequences=[])
        return replace(SPEC, dense=[]) if self.without == "dense" else SPEC

    def batch(self, step: int, rank: int, world: int) -> Batch:
        found = local_batch(step, self.global_batch, rank, world)
        if self.without == "dense":
            found = replace(found, dense=found.dense[:, :0])
        if self.without == "sequences":
            found = replace(found, sequences={})
        if self.label is not None:
            found.labels.fill_(self.label)
        return found


def _train(case: Case) -> tuple[list[float], list[bool], dict[str, torch.Tensor]]:
    """Losses, skips and the full state (rank 0) after the case's steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = small_config(case.global_batch, case.accumulate, case.steps)
    config.train.nan = case.nan  # type: ignore[assignment]
    config.train.spike = None if case.spike is None else 3.0
    config.topology = TopologyConfig(dp_replicate=case.dp_replicate, table_sharding=case.sharding)  # type: ignore[arg-type]
    topology = resolve(config.topology, LauncherConfig(ranks_per_node=world))
    attention = {"block_attention": BlockAttentionSpec}.get(case.attention, JaggedAttentionSpec)()
    config.model.layers = [LayerSpec(sequence=KunlunSpec(attention=attention))]
    model = assemble(config, case.spec(), topology, torch.device("cpu"))
    model.initialise(seed=7)
    optimizer = DenseOptimizer(model.dense, config.optim.dense)
    stepper = Stepper(config, model, optimizer, Ledger())
    stepper.spikes.restore([1.3] * LEAST)
    padded_rows = max(1, -(-case.global_batch // world))
    losses, skipped = [], []
    for step in range(case.steps):
        batch = case.batch(step, rank, world)
        if case.poison == (step, rank):
            batch.labels[-1, 0] = float("nan")
        if case.spike == (step, rank):
            batch.labels[-1, 0] = 1e4
        result = stepper.step(step, batch, padded_rows, Flags())
        losses.append(result.loss)
        skipped.append(result.skipped)
    return losses, skipped, gather_full(model.state() | optimizer.state())


@cache
def _run(world: int, case: Case) -> tuple[list[float], list[bool], dict[str, torch.Tensor]]:
    result: tuple[list[float], list[bool], dict[str, torch.Tensor]] = run_world(world, _train, case)[0]
    return result


def _assert_same(one: Any, other: Any) -> None:
    """|Δloss|/loss ≤ 1e-5 and full state ≤ 1e-4 relative per tensor: sums in another order, amplified by AdamW."""
    assert one[1] == other[1]
    for a, b in zip(one[0], other[0], strict=True):
        assert abs(a - b) <= 1e-5 * abs(a)
    assert one[2].keys() == other[2].keys()
    for name, tensor in one[2].items():
        difference = float((tensor - other[2][name]).norm() / tensor.norm().clamp(min=1e-12))
        assert difference <= 1e-4, (name, difference)


def test_worlds_train_alike() -> None:
    single = _run(1, Case())
    assert single[0][-1] != single[0][0]
    _assert_same(single, _run(2, Case()))
    _assert_same(single, _run(4, Case(dp_replicate=2)))


@pytest.mark.parametrize("global_batch", [7, 3])
def test_uneven_and_empty_ranks_train_alike(global_batch: int) -> None:
    """On four ranks G = 7 is uneven and G = 3 leaves one rank without a row in every step."""
    case = Case(global_batch=global_batch)
    _assert_same(_run(1, case), _run(4, replace(case, dp_replicate=2)))


def test_table_wise_trains_like_row_wise() -> None:
    _assert_same(_run(1, Case(steps=8)), _run(4, Case(steps=8, sharding="table_wise", dp_replicate=4)))


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_changes_nothing(accumulate: int) -> None:
    """Tables included: they are looked up and updated once a step. 7 rows over 2 ranks leave empty micro-batches."""
    for global_batch in (16, 7):
        one = _run(2, Case(global_batch=global_batch, steps=6))
        _assert_same(one, _run(2, Case(global_batch=global_batch, steps=6, accumulate=accumulate)))


def test_one_row_in_three_micro_batches_on_four_ranks() -> None:
    case = Case(global_batch=1, accumulate=3, steps=4)
    _assert_same(_run(1, replace(case, accumulate=1)), _run(4, case))


def test_block_attention_and_whole_tables_on_five_ranks() -> None:
    case = Case(global_batch=13, steps=4, attention="block_attention")
    _assert_same(_run(1, case), _run(5, replace(case, sharding="table_wise")))


@pytest.mark.parametrize("without", ["dense", "sequences"])
def test_specs_without_a_part_train(without: str) -> None:
    case = Case(global_batch=7, steps=6, without=without)
    _assert_same(_run(1, case), _run(2, case))


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_labels_of_one_class_are_learnt(label: float) -> None:
    losses, skipped, _ = _run(1, Case(label=label))
    assert losses[-1] < losses[0] / 2 and not any(skipped)


def _initial(dp_replicate: int, sharding: str) -> dict[str, torch.Tensor]:
    return _train(Case(dp_replicate=dp_replicate, sharding=sharding, steps=0))[2]


def test_initial_state_is_bit_equal_in_every_world() -> None:
    single = run_world(1, _initial, 1, "row_wise")[0]
    weights = [name for name in single if name.endswith("weight")]
    assert len(weights) > 5
    assert all(single[name].unique().numel() > 1 for name in weights if name.startswith("tables."))
    for world, replicate, sharding in [
        (2, 1, "row_wise"),
        (4, 2, "row_wise"),
        (4, 1, "table_wise"),
        (3, 1, "row_wise"),
    ]:
        other = run_world(world, _initial, replicate, sharding)[0]
        assert single.keys() == other.keys()
        assert all(torch.equal(single[name], other[name]) for name in single), (world, sharding)


@pytest.mark.parametrize(
    ("kind", "world", "accumulate"),
    [
        ("poison", 2, 1),
        ("poison", 2, 2),
        ("spike", 2, 2),
        pytest.param("spike", 2, 1, marks=pytest.mark.slow),
        pytest.param("poison", 4, 3, marks=pytest.mark.slow),
        pytest.param("spike", 4, 3, marks=pytest.mark.slow),
    ],
)
def test_a_skipped_step_touches_nothing(kind: str, world: int, accumulate: int) -> None:
    """The state after 3 steps of which the last is skipped, on all ranks for one rank's loss, is bit-equal to the state
    after 2: weights, tables, AdamW's and AdaGrad's moments. With micro-batches it shows in the last one."""
    case = Case(steps=2, accumulate=accumulate, dp_replicate=world // 2)
    before = _run(world, case)
    skipped = _run(world, replace(case, steps=3, **{kind: (2, 1)}))  # type: ignore[arg-type]
    assert skipped[1] == [False, False, True] and math.isfinite(skipped[0][2]) == (kind == "spike")
    assert before[2].keys() == skipped[2].keys() and any(key.endswith("momentum1") for key in before[2])
    assert all(torch.equal(before[2][name], skipped[2][name]) for name in before[2])


def test_a_spike_is_measured_by_the_median_of_enough_losses_that_were_taken() -> None:
    spikes = Spikes(2.0)
    for _ in range(LEAST - 1):
        spikes.add(1.0)
    assert not spikes.is_spike(100.0), "too few to say"
    spikes.add(50.0)
    assert spikes.is_spike(2.1) and not spikes.is_spike(1.9)
    again = Spikes(2.0)
    again.restore(spikes.position()["losses"])
    assert again.is_spike(2.1) and not again.is_spike(1.9)
    never = Spikes(None)
    never.add(1.0)
    assert never.position() == {} and not never.is_spike(1e9)


def test_training_goes_on_after_a_skipped_step() -> None:
    for accumulate in (1, 2):
        case = Case(steps=5, accumulate=accumulate, poison=(2, 1))
        losses, skipped, state = _run(2, case)
        assert skipped == [False, False, True, False, False]
        assert all(tensor.isfinite().all() for tensor in state.values())
        reference = _run(1, replace(case, poison=(2, 0), accumulate=1))
        _assert_same((losses[3:], skipped, state), (reference[0][3:], reference[1], reference[2]))


def _stop_on_nan() -> str:
    try:
        _train(Case(steps=2, poison=(1, 0), nan="stop"))
    except GemctlError as error:
        return str(error)
    return ""


def test_nan_stop_ends_all_ranks_with_the_reason() -> None:
    assert all("step 1" in message and "train.nan" in message for message in run_world(2, _stop_on_nan))


def _not_finite(nan: str, where: str) -> tuple[type[BaseException] | None, str, RolledBack | None, bool]:
    """A gradient of the tables' outputs, or a weight, turns NaN on rank 1; how the step ends, and is all as before."""
    config = small_config()
    config.train.nan = nan  # type: ignore[assignment]
    topology = resolve(TopologyConfig(), LauncherConfig(ranks_per_node=2))
    model = assemble(config, SPEC, topology, torch.device("cpu"))
    model.initialise(seed=7)
    optimizer = DenseOptimizer(model.dense, config.optim.dense)
    rank = dist.get_rank()
    if where == "state" and rank == 1:
        next(iter(model.dense.parameters())).detach().to_local().fill_(math.nan)  # type: ignore[attr-defined]
    before = {name: tensor.clone() for name, tensor in gather_full(model.state() | optimizer.state()).items()}
    os.environ["GEMCTL_INJECT"] = "grad_nan:rank=1,step=3" if where == "gradient" else ""
    failpoint("step", 3)
    try:
        Stepper(config, model, optimizer, Ledger()).step(3, local_batch(0, 16, rank, 2), 8, Flags())
    except GemctlError as error:
        after = gather_full(model.state() | optimizer.state())
        same = all(torch.equal(before[name], after[name]) or bool(before[name].isnan().any()) for name in before)
        return type(error), str(error), getattr(error, "cause", None), same
    return None, "", None, False


def test_a_gradient_that_is_not_finite_rolls_back_before_anything_is_updated() -> None:
    for kind, message, found, _ in run_world(2, _not_finite, "skip", "gradient"):
        assert kind is RollBack and found == RolledBack(3, "gradient", [1])
        assert message.startswith("rank 1: step 3: a gradient is not finite although the loss is; nothing was updated")
    assert run_world(2, _not_finite, "skip", "gradient")[0][3], "something was updated"


def test_train_nan_stop_ends_at_a_gradient_too() -> None:
    for kind, message, _, _ in run_world(2, _not_finite, "stop", "gradient"):
        assert kind is NanStop and "train.nan=stop" in message and "nothing was updated" in message


def test_a_state_that_is_not_finite_is_not_blamed_on_the_batch() -> None:
    for kind, message, found, _ in run_world(2, _not_finite, "skip", "state"):
        assert kind is RollBack and "step 3: the state is not finite" in message
        assert found is not None and (found.step, found.what) == (3, "state") and 1 in found.ranks  # FSDP has gathered
