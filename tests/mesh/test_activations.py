"""The plan's activation estimate against what autograd keeps for the backward of the real dense model."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gemctl.model.embeddings import gather, kjt_inputs
from gemctl.model.gem import GemModel
from gemctl.plan.activations import activation_floats
from gemctl.specs.model import LayerSpec, ModelConfig
from tests.models.cases import MORE
from tests.small import SPEC, rows_batch

ROWS = 256


def saved_bytes(model: ModelConfig) -> tuple[int, int]:
    """(bytes of the distinct storages that autograd keeps, parameters and looked-up embeddings apart; events)."""
    torch.manual_seed(0)
    gem = GemModel(model, SPEC)
    batch = rows_batch(list(range(ROWS)))
    pooled, sequence = kjt_inputs(batch, SPEC, ROWS)
    embedded = gather(batch, SPEC, gem.tables.pooled(pooled), gem.tables.sequence(sequence)).detached()  # type: ignore[misc]
    known = {tensor.untyped_storage().data_ptr() for tensor in [*gem.parameters(), *embedded.tensors()]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = gem.dense(batch, embedded)  # noqa: F841 (its graph must live while the storages are counted)
    return sum(kept.values()), batch.tokens()


MODELS = {
    "narrow": ModelConfig(dim=8),
    "deep": ModelConfig(dim=32, layers=[LayerSpec(repeat=3)]),
    "wide": ModelConfig(dim=64, heads=4, head_hidden=[256, 128]),
} | {name: replace(case.model, dim=24, heads=2) for name, case in MORE.items() if case.spec == SPEC}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_estimate_is_within_a_fifth_of_what_autograd_keeps(model: ModelConfig) -> None:
    """A fifth: the count leaves out offsets, masks and copies that a kernel makes for its own layout."""
    measured, events = saved_bytes(model)
    per_event, per_row = activation_floats(model, SPEC)
    estimate = 4 * (per_event["history"] * events + per_row * ROWS)
    assert 0.8 < estimate / measured < 1.2
