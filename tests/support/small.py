"""A small data set in memory for tests of model, tables and step: every row is a function of its number."""

import numpy as np
import torch

from gemctl.config.schema import (
    Config,
    DataConfig,
    DenseOptimConfig,
    OptimConfig,
    TablesOptimConfig,
    TrainConfig,
)
from gemctl.data.batch import Batch, EventSequence, Jagged
from gemctl.data.order import local_slice
from gemctl.specs.data import (
    CategoricalSpec,
    DenseSpec,
    DomainSpec,
    EventIdSpec,
    FeatureSpec,
    LabelSpec,
    SequenceSpec,
    TableSpec,
)
from gemctl.specs.model import ModelConfig

SPEC = FeatureSpec(
    name="small",
    tables=[TableSpec("user", 23), TableSpec("item", 41), TableSpec("tag", 7)],
    categorical=[
        CategoricalSpec("user", "user"),
        CategoricalSpec("candidate", "item"),
        CategoricalSpec("tags", "tag", multi=True),
    ],
    dense=[DenseSpec("price"), DenseSpec("hour")],
    sequences=[
        SequenceSpec("history", [EventIdSpec("item", "item")], "history_time", [DenseSpec("dwell")], max_length=9)
    ],
    labels=[LabelSpec("click"), LabelSpec("like", mask="liked")],
    timestamp="time",
    domain=DomainSpec("surface", 3),
)


def small_config(global_batch: int = 16, accumulate: int = 1, steps: int = 20) -> Config:
    """A nano model whose every part is exercised, in sizes that divide by nothing."""
    return Config(
        data=DataConfig(spec="unused", train="unused"),
        train=TrainConfig(global_batch=global_batch, accumulate=accumulate, steps=steps),
        model=ModelConfig(dim=8),
        optim=OptimConfig(dense=DenseOptimConfig(lr=3e-3, warmup=4), tables=TablesOptimConfig(lr=0.05)),
    )


def rows_batch(rows: list[int]) -> Batch:
    """The batch of these row numbers; histories of 0 to 9 events, tags 0 to 3."""
    draws = [np.random.default_rng(1000 + row) for row in rows]
    lengths = [int(draw.integers(0, 10)) for draw in draws]
    tags = [draw.integers(0, 7, draw.integers(0, 4)) for draw in draws]
    items = [draw.integers(0, 41, length) for draw, length in zip(draws, lengths, strict=True)]
    dwell = [draw.random(length) for draw, length in zip(draws, lengths, strict=True)]
    ages = [np.sort(draw.random(length) * 1e4)[::-1] + 1 for draw, length in zip(draws, lengths, strict=True)]
    one = torch.arange(len(rows) + 1)
    return Batch(
        rows=torch.tensor(rows, dtype=torch.int64),
        categorical={
            "user": Jagged(_ids([draw.integers(0, 23, 1) for draw in draws]), one),
            "candidate": Jagged(_ids([draw.integers(0, 41, 1) for draw in draws]), one),
            "tags": Jagged(_ids(tags), _offsets([len(tag) for tag in tags])),
        },
        dense=_floats([draw.random(2) for draw in draws]).view(-1, 2),
        sequences={
            "history": EventSequence(
                _offsets(lengths),
                {"item": _ids(items)},
                {"dwell": _floats(dwell)},
                _floats(ages),
                max([*lengths, 0]),
            )
        },
        labels=torch.tensor([[float(draw.random() < 0.4), float(draw.random() < 0.3)] for draw in draws]).view(-1, 2),
        label_mask=torch.tensor([[1.0, float(draw.random() < 0.7)] for draw in draws]).view(-1, 2),
        weight=_floats([draw.random(1) + 0.5 for draw in draws]),
        domain=_ids([draw.integers(0, 3, 1) for draw in draws]),
        true_probability=torch.full((len(rows),), float("nan")),
        unknown_ids={},
    )


def local_batch(step: int, global_batch: int, rank: int, world: int) -> Batch:
    """This rank's rows of global batch `step`."""
    start, stop = local_slice(global_batch, rank, world)
    first = step * global_batch
    return rows_batch(list(range(first + start, first + stop)))


def _ids(lists: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*lists, np.zeros(0, np.int64)]).astype(np.int64))


def _floats(lists: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*lists, np.zeros(0)]).astype(np.float32))


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
