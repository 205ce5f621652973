"""The torch-free counts against the real model: parameters on the meta device, FLOPs counted on real jagged batches."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from gemctl.data.batch import Batch
from gemctl.model.gem import GemModel
from gemctl.specs.count import dense_parameters, module_flops, parameters, step_flops
from tests.model.cases import ALL, LENGTHS, NANO, Case, cast, random_batch, random_dense, random_embedded
from tests.support.small import SPEC


def lengths_of(batch: Batch) -> dict[str, NDArray[np.int64]]:
    return {name: sequence.offsets.diff().numpy() for name, sequence in batch.sequences.items()}


@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_parameters_are_the_models(case: Case) -> None:
    with torch.device("meta"):
        model = GemModel(case.model, case.spec)
    assert all(parameter.is_meta for parameter in model.parameters())
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    counted = parameters(case.model, case.spec)
    assert dict(counted) == found
    assert len(counted) == len(found)
    assert dict(dense_parameters(case.model, case.spec)) == {
        name: tuple(parameter.shape) for name, parameter in model.dense.named_parameters()
    }


@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_flops_are_those_of_a_real_batch(case: Case) -> None:
    """Equal to the last FLOP, forward module by module, but for what the backward of the real model leaves out.

    That are the gradients of dense features and of the events' floats, ages and places, which need none. (Looked-up
    embeddings do need theirs: it goes to the tables.)
    """
    batch = cast(random_batch(case.spec, case.lengths), torch.float32)
    dense = random_dense(case, torch.float32)
    embedded = random_embedded(case.spec, batch, case.model.dim, torch.float32)
    lengths = lengths_of(batch)
    wanted = module_flops(case.model, case.spec, len(batch), lengths)

    with FlopCounterMode(display=False) as forward:
        output = dense(batch, embedded)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert forward.get_total_flops() == sum(wanted.values())
    by_module = forward.get_flop_counts()
    found = {name: sum(by_module.get(f"DenseModel.{name}", {}).values()) for name in wanted}
    assert found == wanted

    not_needed: int = 2 * len(batch) * len(case.spec.dense) * case.model.dim
    for sequence in case.spec.sequences:
        not_needed += 2 * int(lengths[sequence.name].sum()) * (len(sequence.floats) + 3 + 5) * case.model.dim
    total = step_flops(case.model, case.spec, len(batch), lengths)
    assert forward.get_total_flops() + backward.get_total_flops() + not_needed == total


def test_flops_of_gem_nano_by_hand() -> None:
    """A row of 5 events: 5 tokens of width 32 (3 ids, floats, domain), 4 summary tokens, heads of 512 → 64 → 3."""
    found = module_flops(NANO, SPEC, 1, {"history": np.array([5])})
    assert found == {
        "tokens.dense": 2 * (2 * 32 + 32 * 32),
        "events.history": 2 * 5 * (1 + 3 + 5) * 32,
        "layers.0.x_sum": 2 * 4 * 5 * 32,
        "layers.0.sequence.history.ffn": 2 * (4 * 32) * (2 * 16 * 32) + 4 * 32 * 5 * 16,
        "layers.0.sequence.history.attention": 2 * 5 * 32 * (3 * 32 + 32) + 4 * 32 * 5 * 5,
        "layers.0.summary.history": 2 * 5 * 32 * 32 + 4 * 32 * 4 * 5,
        "layers.0.interaction": 2 * 2 * 9 * 32 * 8 + 2 * (72 * 128 + 128 * 256) + 2 * 32 * (8 * 9 + 16 * 9),
        "heads.tasks.0": 2 * (512 * 64 + 64 * 3),
        "heads.tasks.1": 2 * (512 * 64 + 64 * 3),
    }


def test_flops_add_up_over_rows_and_count_nothing_for_none() -> None:
    def flops(*lengths: int) -> float:
        return step_flops(NANO, SPEC, len(lengths), {"history": np.array(lengths, np.int64)})

    assert flops() == 0
    assert flops(*LENGTHS) == sum(flops(length) for length in LENGTHS)


def test_a_thousand_rows_are_counted_in_a_millisecond() -> None:
    lengths = {"history": np.random.default_rng(0).integers(0, 500, 1024)}
    assert fastest(lambda: step_flops(NANO, SPEC, 1024, lengths)) < 1e-3


def fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of 20 calls: others' work on the machine only adds."""
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
