"""The baseline that a model has to beat: a logistic regression on what a table of running averages knows.

    baseline = fit(train_batches, spec)
    logits = baseline.logits(batch)       # float32 [B, T], comparable with the model's

Features: the dense ones (standardised), the domain (one-hot), and for every categorical feature and task the log-odds
of the smoothed mean of the label over the earlier rows with the same id (for a multi-valued feature: the mean over
the row's ids). For training rows "earlier" means strictly earlier in the order of the training file, so no row sees
its own label; rows to score see the means over the whole training file. Event histories are not used.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gemctl.data.batch import Batch
from gemctl.specs.data import FeatureSpec

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

SMOOTHING = 20.0  # pseudo-rows at the base rate that every id starts with
Floats = np.ndarray
Ids = np.ndarray


@dataclass(frozen=True)
class _IdMeans:
    """Per table row: summed label and count of one categorical feature, [rows, T] each."""

    positives: Floats
    counts: Floats

    def log_odds(self, ids: Ids, offsets: Ids, base: Floats) -> Floats:
        return _row_means(_log_odds(self.positives[ids], self.counts[ids], base), offsets)


@dataclass(frozen=True)
class Baseline:
    """A fitted logistic regression per task; `None` models are tasks whose training labels have one class only."""

    spec: FeatureSpec
    base: Floats  # [T]
    means: dict[str, _IdMeans]
    centre: Floats  # [F]
    scale: Floats  # [F]
    models: "list[LogisticRegression | None]"

    def logits(self, batch: Batch) -> Tensor:
        """Log-odds float32 [B, T] of rows that come after the training file."""
        known = {name: self.means[name].log_odds(*_ids(batch, name), self.base) for name in self.means}
        scores = np.zeros((len(batch), len(self.models)), np.float32)
        if len(batch):
            for task, model in enumerate(self.models):
                features = self._features(batch, known, task)
                scores[:, task] = _logit(self.base[task]) if model is None else model.decision_function(features)
        return torch.from_numpy(scores)

    def _features(self, batch: Batch, known: dict[str, Floats], task: int) -> Floats:
        dense = (batch.dense.double().numpy() - self.centre) / self.scale
        return _join(dense, batch.domain.numpy(), known, self.spec, task)


def fit(batches: Iterable[Batch], spec: FeatureSpec) -> Baseline:
    """Fits on all rows of `batches`, taken in their order; some seconds for a million rows."""
    parts = list(batches)
    dense = np.concatenate([batch.dense.double().numpy() for batch in parts])
    domain = np.concatenate([batch.domain.numpy() for batch in parts])
    labels = np.concatenate([batch.labels.double().numpy() for batch in parts])
    weight = np.concatenate([(batch.label_mask * batch.weight[:, None]).double().numpy() for batch in parts])
    total = weight.sum(0)
    base = np.divide((labels * weight).sum(0), total, out=np.full(len(total), 0.5), where=total > 0)
    rows = {table.name: table.rows for table in spec.tables}
    means, running = {}, {}
    for feature in spec.categorical:
        ids, offsets = _joined_ids(parts, feature.name)
        running[feature.name], means[feature.name] = _fit_means(ids, offsets, labels, weight, base, rows[feature.table])
    centre, scale = dense.mean(0), dense.std(0)
    scale[scale == 0] = 1.0
    models = []
    for task in range(len(spec.labels)):
        features = _join((dense - centre) / scale, domain, running, spec, task)
        models.append(_fit_task(features, labels[:, task], weight[:, task]))
    return Baseline(spec, base, means, centre, scale, models)


def _fit_task(features: Floats, label: Floats, weight: Floats) -> "LogisticRegression | None":
    counted = weight > 0
    if len(np.unique(label[counted])) < 2:
        return None
    from sklearn.linear_model import LogisticRegression  # 1 s

    model = LogisticRegression(max_iter=200)
    return model.fit(features[counted], label[counted], sample_weight=weight[counted])


def _fit_means(
    ids: Ids, offsets: Ids, labels: Floats, weight: Floats, base: Floats, table_rows: int
) -> tuple[Floats, _IdMeans]:
    """For the training rows their running log-odds [B, T], and the sums over all of them."""
    row = np.repeat(np.arange(len(labels)), np.diff(offsets))
    positives, counts = (labels * weight)[row], weight[row]
    before_positives, before_counts = np.hsplit(_earlier(ids, row, np.hstack([positives, counts])), 2)
    running = _row_means(_log_odds(before_positives, before_counts, base), offsets)
    return running, _IdMeans(_sum_by_id(ids, positives, table_rows), _sum_by_id(ids, counts, table_rows))


def _sum_by_id(ids: Ids, values: Floats, table_rows: int) -> Floats:
    """[table_rows, T]: `values` [N, T] added up by id."""
    return np.stack([np.bincount(ids, column, table_rows) for column in values.T], axis=1)


def _earlier(ids: Ids, row: Ids, values: Floats) -> Floats:
    """For each entry the sum of `values` [N, T] over the entries with the same id in strictly earlier rows.

    `row` [N] does not fall. Entries are sorted by (id, row); a running sum, read where a row's run starts, minus the
    one where the id starts.
    """
    order = np.argsort(ids, kind="stable")
    sorted_ids, sorted_rows = ids[order], row[order]
    before = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values[order], axis=0)])[:-1]
    new_id = np.concatenate([[True], sorted_ids[1:] != sorted_ids[:-1]])[: len(ids)]
    new_row = new_id | np.concatenate([[True], sorted_rows[1:] != sorted_rows[:-1]])[: len(ids)]
    position = np.arange(len(ids))
    id_start = np.maximum.accumulate(np.where(new_id, position, 0))
    row_start = np.maximum.accumulate(np.where(new_row, position, 0))
    result = np.empty_like(values)
    result[order] = before[row_start] - before[id_start]
    return result


def _log_odds(positives: Floats, counts: Floats, base: Floats) -> Floats:
    """Log-odds of the smoothed means, relative to those of the base rate."""
    prior = np.clip(base, 1e-6, 1 - 1e-6)
    smoothed = (positives + SMOOTHING * prior) / (counts + SMOOTHING)
    return _logit(smoothed) - _logit(prior)


def _logit(probability: Floats) -> Floats:
    clipped = np.clip(probability, 1e-6, 1 - 1e-6)
    return np.log(clipped) - np.log1p(-clipped)


def _row_means(values: Floats, offsets: Ids) -> Floats:
    """Mean over each row's entries [B, T]; 0 (the base rate) for a row without any."""
    sums = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])
    return (sums[offsets[1:]] - sums[offsets[:-1]]) / np.maximum(np.diff(offsets), 1)[:, None]


def _join(dense: Floats, domain: Ids, known: dict[str, Floats], spec: FeatureSpec, task: int) -> Floats:
    columns = [dense, *(log_odds[:, task : task + 1] for log_odds in known.values())]
    if spec.domain is not None:
        columns.append(np.eye(spec.domain.count)[domain])
    return np.concatenate(columns, axis=1)


def _ids(batch: Batch, feature: str) -> tuple[Ids, Ids]:
    jagged = batch.categorical[feature]
    return jagged.values.numpy(), jagged.offsets.numpy()


def _joined_ids(parts: list[Batch], feature: str) -> tuple[Ids, Ids]:
    pieces = [_ids(batch, feature) for batch in parts]
    lengths = np.concatenate([np.diff(offsets) for _, offsets in pieces])
    return np.concatenate([ids for ids, _ in pieces]), np.concatenate([[0], np.cumsum(lengths)])
