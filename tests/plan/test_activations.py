"""The plan's activation estimate against what autograd keeps for the backward of the real dense model."""

import gc
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from gemctl.model.embeddings import gather, kjt_inputs
from gemctl.model.gem import GemModel
from gemctl.parallel.dense import recompute_in_backward
from gemctl.specs.count import activation_floats
from gemctl.specs.model import LayerSpec, ModelConfig
from tests.model.cases import MORE
from tests.support.small import SPEC, rows_batch

ROWS = 256


def saved_bytes(model: ModelConfig, recompute: bool = False) -> tuple[int, int]:
    """(bytes of the distinct storages that autograd keeps, parameters and looked-up embeddings apart; events).

    With `recompute` also what layers keep to run again, which are Python's objects.
    """
    torch.manual_seed(0)
    gem = GemModel(model, SPEC)
    batch = rows_batch(list(range(ROWS)))
    pooled, sequence = kjt_inputs(batch, SPEC, ROWS)
    embedded = gather(batch, SPEC, gem.tables.pooled(pooled), gem.tables.sequence(sequence)).detached()  # type: ignore[misc]
    if recompute:
        for layer in gem.dense.layers:
            recompute_in_backward(layer)
    gc.collect()
    before = {id(item) for item in gc.get_objects() if isinstance(item, Tensor)}
    known = {tensor.untyped_storage().data_ptr() for tensor in [*gem.parameters(), *embedded.tensors()]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = gem.dense(batch, embedded)
    if recompute:
        held = (item for item in gc.get_objects() if isinstance(item, Tensor) and id(item) not in before)
        for tensor in (item for item in held if item is not logits):
            pack(tensor)
    return sum(kept.values()), batch.tokens()


DEEP = ModelConfig(dim=32, layers=[LayerSpec(repeat=3)])
MODELS = {
    "narrow": ModelConfig(dim=8),
    "deep": DEEP,
    "wide": ModelConfig(dim=64, heads=4, head_hidden=[256, 128]),
} | {name: replace(case.model, dim=24, heads=2) for name, case in MORE.items() if case.spec == SPEC}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_estimate_is_within_a_fifth_of_what_autograd_keeps(model: ModelConfig) -> None:
    """A fifth: the count leaves out offsets, masks and copies that a kernel makes for its own layout."""
    measured, events = saved_bytes(model)
    per_event, per_row = activation_floats(model, SPEC)
    estimate = 4 * (per_event["history"] * events + per_row * ROWS)
    assert 0.8 < estimate / measured < 1.2


def floats(model: ModelConfig, recompute: Literal["none", "layers"] = "none") -> tuple[int, int]:
    per_event, per_row = activation_floats(model, SPEC, recompute)
    return per_event["history"], per_row


def test_recomputed_layers_keep_their_inputs_and_one_layers_values_at_a_time() -> None:
    """Between forward and backward, which is when it is measured, the values of the one layer are not there."""
    measured, events = saved_bytes(DEEP, recompute=True)
    shallow = replace(DEEP, layers=[LayerSpec()])
    kept, again, one = floats(DEEP), floats(DEEP, "layers"), floats(shallow)
    layer_event, layer_row = (kept[0] - one[0]) // 2, (kept[1] - one[1]) // 2
    estimate = 4 * ((again[0] - layer_event) * events + (again[1] - layer_row) * ROWS)
    assert 0.8 < estimate / measured < 1.2
    assert again[0] < kept[0] / 2 and again[1] < kept[1]
    assert floats(shallow, "layers")[0] == one[0]  # of one layer nothing is saved
