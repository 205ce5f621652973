"""The published line's nano presets learn: a few steps on the synthetic log beat the regression on running means.

60 steps of 2,048 rows each, once over 123,000 rows, about a minute of one core a preset. What they reach in a whole
run: python -m gemctl.bench.quality presets experiment=synthetic
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemctl.config.compose import compose
from gemctl.config.schema import Config
from gemctl.data import synthetic
from gemctl.data.batch import Batch
from gemctl.data.loader import Loader, eval_batches
from gemctl.model.embeddings import gather, kjt_inputs
from gemctl.model.gem import GemModel
from gemctl.model.init import init_rules
from gemctl.parallel.init import Slice, fill
from gemctl.specs import feature_spec
from gemctl.specs.data import FeatureSpec
from gemctl.train import baseline
from gemctl.train.metrics import TaskMetrics

STEPS, ROWS, EVAL_ROWS = 60, 2048, 10_000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("log")
    files = [f"data.{key}={folder / name}" for key, name in FILES.items()]
    config = compose(None, [*files, f"data.synthetic.rows={STEPS * ROWS}", f"data.synthetic.eval_rows={EVAL_ROWS}"])
    assert synthetic.ensure(config.data)
    return config


FILES = {"spec": "spec.yaml", "train": "train.parquet", "eval": "eval.parquet"}


@pytest.fixture(scope="module")
def regression(log: Config) -> float:
    """NE of the first task by the baseline that `gemctl eval` shows."""
    spec = feature_spec.load(log.data.spec)
    rows = replace(log.data, eval=log.data.train, histories="empty")
    fitted = baseline.fit(eval_batches(rows, spec, global_batch=65_536, rank=0, world=1), spec)
    return entropy(spec, log, fitted.score)


def entropy(spec: FeatureSpec, config: Config, score: Callable[[Batch], Tensor]) -> float:
    metrics = TaskMetrics([label.name for label in spec.labels])
    for batch in eval_batches(config.data, spec, global_batch=ROWS, rank=0, world=1):
        with torch.no_grad():
            logits = score(batch)
        metrics.update(logits, batch.labels, batch.label_mask, batch.weight, batch.true_probability)
    found = metrics.compute()[spec.labels[0].name]["ne"]
    assert found is not None
    return float(found)


def trained(config: Config, spec: FeatureSpec, steps: int) -> GemModel:
    """The main job's settings in a plain loop: AdamW, and row-wise AdaGrad on dense gradients of the tables."""
    model = GemModel(config.model, spec)
    rules = init_rules(model)
    for name, parameter in model.named_parameters():
        fill(Slice(parameter.data, 0), rules[name], 0, name)
    optim = config.optim
    adamw = torch.optim.AdamW(model.dense.parameters(), lr=optim.dense.lr, weight_decay=0.0)
    squares = {name: torch.zeros(len(table), 1) for name, table in model.tables.named_parameters()}
    loader = Loader(config.data, spec, global_batch=ROWS, seed=0, rank=0, world=1)
    for step, batch in itertools.islice(loader, steps):
        factor = min(1.0, (step + 1) / max(1, optim.dense.warmup))
        adamw.param_groups[0]["lr"] = optim.dense.lr * factor
        model.zero_grad()
        counts = batch.label_mask * batch.weight[:, None]
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            logits_of(model, spec, batch), batch.labels, reduction="none"
        )
        ((losses * counts).sum(0) / counts.sum(0).clamp(min=1e-12)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.dense.parameters(), 1.0)
        adamw.step()
        with torch.no_grad():
            for name, table in model.tables.named_parameters():
                assert table.grad is not None
                squares[name] += table.grad.square().mean(1, keepdim=True)
                table.sub_(optim.tables.lr * factor * table.grad / (squares[name].sqrt() + 1e-8))
    loader.close()
    return model


def logits_of(model: GemModel, spec: FeatureSpec, batch: Batch) -> Tensor:
    pooled, sequence = kjt_inputs(batch, spec, len(batch))
    looked_up = [table(ids) for table, ids in ((model.tables.pooled, pooled), (model.tables.sequence, sequence))]  # type: ignore[misc]
    logits: Tensor = model.dense(batch, gather(batch, spec, looked_up[0], looked_up[1]))
    return logits


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("preset", ["kunlun_nano", "interformer_nano", "hstu_nano"])
def test_a_short_training_beats_the_regression(preset: str, log: Config, regression: float) -> None:
    spec = feature_spec.load(log.data.spec)
    config = replace(log, model=compose(None, [f"model={preset}"]).model)
    model = trained(config, spec, STEPS)
    reached = entropy(spec, config, lambda batch: logits_of(model, spec, batch))
    assert reached < regression - 0.002
