"""The padded baseline of `gemctl bench model` gives the jagged model's logits and gradients, so the race is fair."""

import pytest
import torch

from gemctl.bench.padded import pad, pad_embedded, padded
from tests.model.cases import ALL, Case, model_logits, random_batch, random_dense, random_embedded
from tests.model.test_oracle import gradients, relative_error


@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_padding_changes_nothing(case: Case) -> None:
    batch = random_batch(case.spec, case.lengths)
    dense, embedded = random_dense(case), random_embedded(case.spec, batch, case.model.dim)
    wanted = model_logits(dense, batch, embedded)
    with padded(dense):
        found = model_logits(dense, pad(batch), pad_embedded(batch, embedded))
    errors = {"logits": relative_error(found, wanted)}
    exact = gradients(wanted, dense, embedded)
    for name, gradient in gradients(found, dense, embedded).items():
        errors[name] = relative_error(gradient, exact[name])
    assert not {name: error for name, error in errors.items() if not error <= 1e-9}
    assert torch.equal(model_logits(dense, batch, embedded), wanted), "the model is itself again"
