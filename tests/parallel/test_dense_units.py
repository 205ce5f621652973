"""Layers that are FSDP2 units of their own: gradients of every block are those of the unsharded model.

A unit's gather before backward and its reduction after hang on its tensors, among them those of the histories.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gemctl.config.schema import PrecisionConfig
from gemctl.mesh.topology import Topology
from gemctl.model.gem import DenseModel
from gemctl.parallel import dense as parallel
from gemctl.parallel.dense import local_slices, shard_dense
from tests.model.cases import MORE, Case, random_batch, random_dense, random_embedded
from tests.support.world import run_world

WORLD = 2
NAMES = ["CompSkip, even", "interformer", "hstu", "event types with CLS"]


def _worst_errors(names: list[str]) -> dict[str, float]:
    """By case: the largest relative error of a parameter's gradient."""
    return {name: max(_errors(MORE[name]).values()) for name in names}


def _errors(case: Case) -> dict[str, float]:
    whole = random_dense(case)
    with torch.device("meta"):
        sharded = DenseModel(case.model, case.spec).to(torch.float64)
    with mock.patch.object(parallel, "UNIT_PARAMETERS", 400):
        shard_dense(sharded, Topology(WORLD, 1, WORLD, 1, 1, WORLD, WORLD), PrecisionConfig(), torch.device("cpu"))
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in sharded.named_parameters():
            for part in local_slices(parameter):
                full = values[name] if part.tensor.dim() == parameter.dim() else values[name].flatten(0, 1)
                part.tensor.copy_(full[part.first_row : part.first_row + len(part.tensor)])
    for rank in range(WORLD):  # FSDP2 averages over the ranks
        (_loss(whole, case, rank) / WORLD).backward()
    _loss(sharded, case, dist.get_rank()).backward()
    errors = {}
    for name, parameter in sharded.named_parameters():
        wanted, found = values[name].grad, parameter.grad.full_tensor()  # type: ignore[union-attr]
        assert wanted is not None
        errors[name] = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return errors


def _loss(dense: DenseModel, case: Case, rank: int) -> Tensor:
    batch = random_batch(case.spec, case.lengths[rank::WORLD], seed=rank)
    return dense(batch, random_embedded(case.spec, batch, case.model.dim)).square().sum()


@pytest.mark.timeout(240)
def test_gradients_of_units_are_those_of_the_whole() -> None:
    for errors in run_world(WORLD, _worst_errors, NAMES, timeout=200.0):
        assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
