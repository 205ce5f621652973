"""The model against the padded float64 oracle: outputs and the gradient of every parameter and embedding."""

import pytest
import torch
from torch import Tensor

from gemctl.model.embeddings import Embedded
from gemctl.model.gem import DenseModel
from tests.models import oracle_gem
from tests.models.cases import CASES, Case, cast, model_logits, random_batch, random_dense, random_embedded


def gradients(output: Tensor, dense: DenseModel, embedded: Embedded) -> dict[str, Tensor]:
    """Of a fixed random combination of the logits, by parameter and embedding."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = {**dict(dense.named_parameters()), **embedded.categorical, **embedded.events}
    found = torch.autograd.grad((output * weights.to(output.dtype)).sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    difference, size = (found.double() - wanted).norm().item(), wanted.norm().item()
    return difference / size if size else difference


def _doubles(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_logits_and_all_gradients(case: Case, dtype: torch.dtype, bound: float) -> None:
    """The oracle works in float64 on the very numbers that the model has in `dtype`."""
    batch = cast(random_batch(case.spec, case.lengths), dtype)
    dense, embedded = random_dense(case, dtype), random_embedded(case.spec, batch, case.model.dim, dtype)
    found = model_logits(dense, batch, embedded)
    found_gradients = gradients(found, dense, embedded)

    dense.double()
    exact = Embedded(_doubles(embedded.categorical), _doubles(embedded.events))
    state: dict[str, Tensor] = dict(dense.named_parameters())
    args = case.model, case.spec, cast(batch, torch.float64), exact.categorical, exact.events
    wanted = oracle_gem.logits(state, *args)
    assert wanted.shape == (len(batch), len(case.spec.labels))
    errors = {"logits": relative_error(found, wanted)}
    for name, gradient in gradients(wanted, dense, exact).items():
        errors[name] = relative_error(found_gradients[name], gradient)
    assert not {name: error for name, error in errors.items() if not error <= bound}
