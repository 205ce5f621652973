"""The presets: counts against the meta-device model, FLOPs of their small twins on a real batch, what is learnt."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gemctl.config.compose import compose
from gemctl.config.groups import Groups
from gemctl.model.gem import GemModel
from gemctl.plan.build import build
from gemctl.specs import feature_spec
from gemctl.specs.contradictions import contradictions
from gemctl.specs.count import module_flops, parameters
from gemctl.specs.data import FeatureSpec
from gemctl.specs.model import ModelConfig, experts
from tests.model.cases import LENGTHS, LONG, SEVERAL, Case, cast, random_batch, random_dense, random_embedded
from tests.model.shrink import shrunk

PRESETS = Groups().choices("model")
FULL = feature_spec.load("gemctl:feature_specs/gem_xl.yaml")


def preset(name: str) -> ModelConfig:
    return compose(None, [f"model={name}"]).model


def spec_of(name: str) -> FeatureSpec:
    return FULL if name == "gem_xl" else SEVERAL


def test_all_presets_are_there() -> None:
    sizes = {"gem_nano", "gem_tiny", "gem_1gpu", "gem_host", "gem_xl"}
    assert set(PRESETS) >= sizes | {"kunlun_nano", "kunlun_1gpu", "interformer_nano", "hstu_nano"}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_meta_model(name: str) -> None:
    model, spec = preset(name), spec_of(name)
    assert model.name == name
    assert contradictions(model, spec) == []
    with torch.device("meta"):
        built = GemModel(model, spec)
    found = [(key, tuple(parameter.shape)) for key, parameter in built.named_parameters()]
    assert sorted(found) == sorted(parameters(model, spec))


@pytest.mark.parametrize("name", PRESETS)
def test_flops_of_the_small_twin_are_those_of_a_real_batch(name: str) -> None:
    model, spec = shrunk(preset(name)), spec_of(name)
    case = Case(model, spec, tuple(LONG[3:5] if "gem" in name else LENGTHS))
    batch = cast(random_batch(spec, case.lengths), torch.float32)
    dense, embedded = random_dense(case, torch.float32), random_embedded(spec, batch, model.dim, torch.float32)
    lengths = {key: sequence.offsets.diff().numpy() for key, sequence in batch.sequences.items()}
    with FlopCounterMode(display=False) as counter:
        dense(batch, embedded)
    assert counter.get_total_flops() == sum(module_flops(model, spec, len(batch), lengths).values())


def test_sizes_are_what_the_names_say() -> None:
    def dense(name: str) -> int:
        shapes = parameters(preset(name), spec_of(name))
        return sum(math.prod(shape) for key, shape in shapes if key.startswith("dense."))

    assert dense("gem_nano") < 1e6 < dense("gem_tiny") < 1e7
    assert 1e9 < dense("gem_1gpu") < dense("gem_host") < 1e10
    assert 1e10 < dense("gem_xl") < 1e11
    assert experts(preset("gem_host")) == 8
    assert experts(preset("gem_xl")) == 16


def test_the_largest_is_planned_with_trillions_of_table_parameters() -> None:
    config = compose(None, ["experiment=gem_xl"])
    plan = build(config, FULL)
    assert plan.topology.world_size == 1024
    assert sum(table.rows * table.dim for table in plan.tables.values()) > 2e12
    assert sum(unit.parameters for unit in plan.units) > 1e10
    assert plan.fits, plan.fit
