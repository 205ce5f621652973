"""The one-GPU experiments: what their shapes promise, counted on the logs that they are measured on."""

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gemctl.bench.log import SHAPES, Shape, seq_lengths, write
from gemctl.config.compose import compose
from gemctl.config.schema import Config
from gemctl.plan.build import build
from gemctl.specs import feature_spec
from gemctl.specs.contradictions import contradictions
from gemctl.specs.count import module_flops, modules, parameters
from gemctl.specs.data import FeatureSpec
from gemctl.specs.interaction import TokenMixerSpec
from gemctl.specs.model import LayerSpec, ModelConfig
from tests.support.small import SPEC


def load(name: str, folder: Path) -> tuple[Config, FeatureSpec]:
    """The experiment on a short log of its shape."""
    whole = SHAPES[name]
    write(Shape(400, whole.mean, whole.sigma, whole.longest, whole.items, whole.users), folder)
    words = [f"experiment={name}", f"data.spec={folder}/spec.yaml", f"data.train={folder}/train.parquet"]
    config = compose(None, words)
    return config, feature_spec.load(config.data.spec)


def flops(config: Config, spec: FeatureSpec, shape: Shape) -> tuple[float, float, float]:
    """Shares of a step: attention and GDPA, and products of rows with matrices of at least 2,048 by 2,048."""
    rows = config.train.global_batch
    lengths = seq_lengths(shape, rows, 0)
    whole = sum(module_flops(config.model, spec, rows, {"history": lengths}).values())
    found = modules(config.model, spec)
    pairs = sum(pair.flops(lengths) for module in found for pair in module.counts.pairs)
    block = config.model.layers[0].interaction
    tokens = block.wide if isinstance(block, TokenMixerSpec) else 1
    wide = [
        weight
        for module in found
        for weight in module.counts.by_row
        if weight.times == 1 and weight.name and min(weight.shape[0] // tokens, weight.shape[1]) >= 2048
    ]
    return whole, pairs / whole, rows * sum(weight.flops for weight in wide) / whole


@pytest.mark.parametrize("name", SHAPES)
def test_it_fits_one_h200_by_the_plan(name: str, tmp_path: Path) -> None:
    plan = build(*load(name, tmp_path))
    assert plan.topology.world_size == 1
    assert plan.fits, plan.fit


@pytest.mark.parametrize(
    ("name", "parameters_at_least", "attention_at_least", "wide_at_least"),
    [
        ("gem_1gpu_long", 1e9, 0.12, 0.0),
        ("gem_1gpu_short", 1e9, 0.0, 0.3),
        ("kunlun_1gpu", 1e9, 0.20, 0.0),
        ("tokenmixer_1gpu", 1e9, 0.0, 0.4),
    ],
)
def test_shapes_are_what_they_are_measured_for(
    name: str, parameters_at_least: float, attention_at_least: float, wide_at_least: float, tmp_path: Path
) -> None:
    config, spec = load(name, tmp_path)
    dense = sum(math.prod(shape) for key, shape in parameters(config.model, spec) if key.startswith("dense."))
    assert parameters_at_least <= dense <= 3e9
    _, attention, wide = flops(config, spec, SHAPES[name])
    assert attention >= attention_at_least
    assert wide >= wide_at_least


@pytest.mark.parametrize("name", ["kunlun_1gpu", "tokenmixer_1gpu"])
def test_tables_are_large_and_looked_up_often(name: str, tmp_path: Path) -> None:
    config, spec = load(name, tmp_path)
    assert sum(table.rows for table in spec.tables) * config.model.dim * 4 >= 20e9
    events = int(seq_lengths(SHAPES[name], config.train.global_batch, 0).sum())
    lookups = events * len(spec.sequences[0].ids) + config.train.global_batch * len(spec.categorical)
    assert lookups >= (1e6 if name == "kunlun_1gpu" else 6e5)


@pytest.mark.parametrize(("name", "mean"), [("gem_1gpu_long", 1000), ("kunlun_1gpu", 512), ("gem_1gpu_short", 26)])
def test_lengths_have_the_mean_and_the_longest_after_the_cut(name: str, mean: float) -> None:
    lengths = seq_lengths(SHAPES[name], 100_000, 0)
    assert lengths.mean() == pytest.approx(mean, rel=0.03)
    assert lengths.max() <= SHAPES[name].longest
    logs = np.log(lengths[(lengths > 0) & (lengths < SHAPES[name].longest)])
    assert logs.std() == pytest.approx(SHAPES[name].sigma, rel=0.05)


def test_the_log_has_the_lengths_and_ids_of_its_shape(tmp_path: Path) -> None:
    shape = Shape(rows=5_000, mean=30, sigma=0.5, longest=64, items=1000, users=50)
    rows, events = write(shape, tmp_path)
    table = pq.read_table(tmp_path / "train.parquet")
    lengths = np.diff(table["history_item"].combine_chunks().offsets.to_numpy())
    assert (rows, events) == (len(table), int(lengths.sum()))
    assert lengths.max() == 64
    assert table["history_item"].combine_chunks().values.to_numpy().max() < 1000
    assert table["user"].to_numpy().max() < 50
    times, now = table["history_time"].combine_chunks(), table["time"].to_numpy()
    newest = times.values.to_numpy()[times.offsets.to_numpy()[1:][lengths > 0] - 1]
    assert (newest < now[lengths > 0]).all()


@pytest.mark.parametrize(
    ("mixer", "problem"),
    [
        (TokenMixerSpec(tokens=10, group=4), "group = 4 does not divide tokens = 10"),
        (TokenMixerSpec(tokens=12, group=2), "6 wide tokens (tokens/group) cannot cut their width, 16 (group"),
        (TokenMixerSpec(tokens=8, group=2), None),
    ],
)
def test_wide_tokens_that_cannot_be_cut_are_refused(mixer: TokenMixerSpec, problem: str | None) -> None:
    found = contradictions(ModelConfig(dim=8, layers=[LayerSpec(interaction=mixer)]), SPEC)
    assert len(found) == (problem is not None)
    assert all(f"model.layers.0.interaction: token_mixer: {problem}" in text for text in found)
