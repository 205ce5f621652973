"""Random batches of a feature spec to measure with, and history lengths for them.

    batch = random_batch(spec, {"history": filled(64, 512, 0.3)}, seed=0)

Ids follow Zipf's law over the rows of their table, so that rows repeat as they do in training.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gemctl.data.batch import Batch, EventSequence, Jagged
from gemctl.specs.data import FeatureSpec

Ints = NDArray[np.int64]
ZIPF = 1.1


def filled(rows: int, longest: int, fill: float, seed: int = 0) -> Ints:
    """int64 [rows]: lengths with mean `fill` · `longest` (0 < fill < 1); the first one is `longest`."""
    draw = np.random.default_rng(seed)
    lengths = np.rint(draw.random(rows) ** (1 / fill - 1) * longest).astype(np.int64)
    lengths[0] = longest
    return lengths


def random_batch(spec: FeatureSpec, lengths: dict[str, Ints], seed: int) -> Batch:
    """A batch whose history `name` has `lengths[name]` [B] events; a multi-valued feature has 0 to 3 ids per row."""
    draw = np.random.default_rng(seed)
    rows = len(next(iter(lengths.values())))
    sizes = {table.name: table.rows for table in spec.tables}

    def ids(table: str, count: int) -> Tensor:
        return torch.from_numpy((draw.zipf(ZIPF, count) - 1) % sizes[table])

    def floats(*shape: int) -> Tensor:
        return torch.from_numpy(draw.random(shape, np.float32))

    categorical = {}
    for feature in spec.categorical:
        counts = draw.integers(0, 4, rows) if feature.multi else np.ones(rows, np.int64)
        categorical[feature.name] = Jagged(ids(feature.table, int(counts.sum())), _offsets(counts))
    sequences = {}
    for sequence in spec.sequences:
        own = lengths[sequence.name]
        events = int(own.sum())
        sequences[sequence.name] = EventSequence(
            _offsets(own),
            {feature.name: ids(feature.table, events) for feature in sequence.ids},
            {feature.name: floats(events) for feature in sequence.floats},
            floats(events) * 1e5,
            int(own.max(initial=0)),
        )
    return Batch(
        rows=torch.arange(rows),
        categorical=categorical,
        dense=floats(rows, len(spec.dense)),
        sequences=sequences,
        labels=floats(rows, len(spec.labels)).round(),
        label_mask=torch.ones(rows, len(spec.labels)),
        weight=torch.ones(rows),
        domain=torch.from_numpy(draw.integers(0, spec.domain.count if spec.domain else 1, rows)),
        true_probability=torch.full((rows,), float("nan")),
        unknown_ids={},
    )


def _offsets(lengths: Ints) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
