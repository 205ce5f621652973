"""Useful FLOPs, three ways: by the spec, by FlopCounterMode on jagged batches, by the oracle's count of its own work.

The presets are counted at their full size without their memory: parameters and values lie on the meta device, while
offsets are real, so that the attention family's formulas read true lengths.
"""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from gemctl.data.batch import Batch
from gemctl.model.embeddings import Embedded
from gemctl.model.gem import DenseModel
from gemctl.specs.count import module_flops, step_flops
from gemctl.specs.data import FeatureSpec
from gemctl.specs.model import EventTypeSpec, ModelConfig
from gemctl.specs.sequence import HstuSpec, JaggedAttentionSpec
from tests.model.cases import SEVERAL, Case, cast, random_batch, random_dense, random_embedded
from tests.model.options import PRESETS, preset, spec_of
from tests.model.oracle import Oracle

OPS = ("gdpa", "jagged_flash_attention", "block_attention", "pooled_attention")
LONG_ROWS = (700, 0, 1, 2000, 64, 129, 333, 1500)


class OnMeta(TorchDispatchMode):
    """Runs what has a meta tensor among its arguments on the meta device, all of it; the rest as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors: list[Tensor] = []
        tree_map_only(Tensor, tensors.append, (args, kwargs or {}))
        if any(tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@dataclass
class Counted:
    """Forward FLOPs by module, and those of the whole backward."""

    modules: dict[str, int]
    forward: int
    backward: int


def counted(model: ModelConfig, spec: FeatureSpec, batch: Batch) -> Counted:
    """By FlopCounterMode over one step of a meta model."""
    with torch.device("meta"):
        dense = DenseModel(model, spec)
        embedded = Embedded(
            {f.name: torch.zeros(len(batch), model.dim, requires_grad=True) for f in spec.categorical},
            {
                f"{s.name}.{f.name}": torch.zeros(len(batch.sequences[s.name].ages), model.dim, requires_grad=True)
                for s in spec.sequences
                for f in s.ids
            },
        )
    with OnMeta():
        with FlopCounterMode(display=False) as forward:
            logits = dense(batch, embedded)
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
    counts = {name: sum(own.values()) for name, own in forward.get_flop_counts().items()}
    by_module = {name.removeprefix("DenseModel."): own for name, own in counts.items() if "." in name}
    return Counted(by_module, forward.get_total_flops(), backward.get_total_flops())


@pytest.fixture
def offsets_beside_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops take offsets on the CPU beside values on the meta device."""
    for op in OPS:
        monkeypatch.setattr(importlib.import_module(f"gemctl.kernels.{op}.op"), "check", lambda *args, **kwargs: None)


FAST = {"gem_nano", "kunlun_nano"}  # the others: make test-slow


@pytest.mark.usefixtures("offsets_beside_meta")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name not in FAST else []) for name in PRESETS]
)
def test_flops_of_a_whole_preset_are_those_of_a_jagged_batch(name: str) -> None:
    """At full size, module by module; in the backward all but the gradients of floats, ages and places."""
    model, spec = preset(name), spec_of(name)
    batch = cast(random_batch(spec, LONG_ROWS), torch.float32)
    lengths = {key: sequence.offsets.diff().numpy() for key, sequence in batch.sequences.items()}
    found, wanted = counted(model, spec, batch), module_flops(model, spec, len(batch), lengths)
    assert {key: found.modules.get(key, 0) for key in wanted} == wanted
    assert found.forward == sum(wanted.values())
    not_needed: int = 2 * len(batch) * len(spec.dense) * model.dim
    for sequence in spec.sequences:
        features = len(sequence.floats) + len(model.age_scales) + 5
        not_needed += 2 * int(lengths[sequence.name].sum()) * features * model.dim
    assert found.forward + found.backward + not_needed == step_flops(model, spec, len(batch), lengths)


def with_window(model: ModelConfig, window: int | None) -> ModelConfig:
    """Every attention of the model with this window."""
    layers = []
    for layer in model.layers:
        block = layer.sequence
        if isinstance(block, HstuSpec):
            layers.append(replace(layer, sequence=replace(block, window=window)))
        else:
            assert isinstance(block.attention, JaggedAttentionSpec)
            attention = replace(block.attention, window=window)
            layers.append(replace(layer, sequence=replace(block, attention=attention)))
    return replace(model, layers=layers)


def with_comp_skip(model: ModelConfig, parity: Any) -> ModelConfig:
    return replace(model, layers=[replace(layer, comp_skip=parity) for layer in model.layers])


KUNLUN = replace(with_comp_skip(with_window(preset("kunlun_nano"), None), None), dim=16)
DEEP = replace(KUNLUN, layers=[replace(layer, repeat=5) for layer in KUNLUN.layers])
HSTU = replace(preset("hstu_nano"), dim=16)
PERSONAL = {"clicks": EventTypeSpec(dim=8, heads=1, tokens=2, depth=2, window=1)}
CHANGES = {  # (the model without it, the model with it)
    "CompSkip, even": (DEEP, with_comp_skip(DEEP, "even")),
    "CompSkip, odd": (DEEP, with_comp_skip(DEEP, "odd")),
    "a window": (KUNLUN, with_window(KUNLUN, 2)),
    "a window, HSTU": (HSTU, with_window(HSTU, 2)),
    "a depth": (DEEP, replace(DEEP, event_types={"clicks": EventTypeSpec(depth=2)})),
    "a width": (KUNLUN, replace(KUNLUN, event_types={"clicks": EventTypeSpec(dim=8)})),
    "fewer tokens": (KUNLUN, replace(KUNLUN, event_types={"clicks": EventTypeSpec(tokens=1)})),
    "an own window": (KUNLUN, replace(KUNLUN, event_types={"clicks": EventTypeSpec(window=1)})),
    "all at once": (DEEP, replace(with_comp_skip(with_window(DEEP, 2), "even"), event_types=PERSONAL)),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES.keys())
def test_what_saves_work_saves_what_the_oracle_counts(before: ModelConfig, after: ModelConfig) -> None:
    """Two FLOPs a multiply-add, and a step is three forwards: by the spec and by FlopCounterMode on the real batch."""
    saved = {}
    for model in (before, after):
        case = Case(model, SEVERAL)
        batch = random_batch(case.spec, case.lengths)
        dense, embedded = random_dense(case), random_embedded(case.spec, batch, model.dim)
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            dense(batch, embedded)
        oracle = Oracle(dict(dense.named_parameters()), model, case.spec)
        with torch.no_grad():
            oracle(batch, embedded.categorical, embedded.events)
        lengths = {key: sequence.offsets.diff().numpy() for key, sequence in batch.sequences.items()}
        step = step_flops(model, case.spec, len(batch), lengths)
        saved[model is after] = np.array([step, 3 * forward.get_total_flops(), 6 * oracle.work.total()])
    spec, counter, oracle_says = saved[False] - saved[True]
    assert spec == counter == oracle_says > 0


def test_a_window_saves_the_pairs_beyond_it_by_hand() -> None:
    """A history of 7 events, ±2: 49 − (3 + 4 + 5 + 5 + 5 + 4 + 3) = 20 pairs less a layer, two layers, width 32."""
    model = with_comp_skip(preset("kunlun_nano"), None)
    one = {name: np.array([7 if name == "history" else 0]) for name in ("history", "clicks", "buys")}
    found = [step_flops(with_window(model, window), SEVERAL, 1, one) for window in (None, 2)]
    assert found[0] - found[1] == 3 * 2 * (4 * 32 * 20)
