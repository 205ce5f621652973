"""The baseline that a model has to beat: a logistic regression on running means of the label.

    baseline = fit(train_batches, spec)
    for batch in batches:                     # later rows, in order
        logits = baseline.score(batch)        # float32 [B, T], comparable with the model's

Features: the dense features (standardised), the domain (one-hot), and for every categorical feature and task the
log-odds of the smoothed mean label over all strictly earlier rows with the same id (for a multi-valued feature, the
mean over the row's ids). Earlier refers to file order: the training rows, then the rows scored so far, so no row sees
its own label. Event histories are not used.

Ids that do not occur in the training rows stay at the base rate, as a model knows nothing about them either. To learn
what the features are worth on later rows, with their share of new ids, the regression is fitted on the last fifth of
the training rows, where ids that are missing from the first four fifths count as new. (On MovieLens, where most users
of the test part are new, a fit on all rows is worse than the base rate.)
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from gemctl.data.batch import Batch
from gemctl.specs.data import FeatureSpec

SMOOTHING = 20.0  # pseudo-rows at the base rate with which every id starts
Floats = np.ndarray
Ids = np.ndarray


class _RunningMeans:
    """Label sums and counts of one categorical feature over the rows seen so far, by table row: [rows, T] each."""

    def __init__(self, table_rows: int, base: Floats) -> None:
        self._base = base
        self._positives = np.zeros((table_rows, len(base)))
        self._counts = np.zeros((table_rows, len(base)))
        self._rows = np.zeros(table_rows)
        self._new = np.zeros(table_rows, bool)

    def next(self, ids: Ids, offsets: Ids, labels: Floats, weight: Floats) -> Floats:
        """Log-odds [B, T] of the next rows, each from the rows before it; then adds these rows."""
        row = np.repeat(np.arange(len(labels)), np.diff(offsets))
        positives, counts = (labels * weight)[row], weight[row]
        before_positives, before_counts = np.hsplit(_earlier(ids, row, np.hstack([positives, counts])), 2)
        odds = _log_odds(self._positives[ids] + before_positives, self._counts[ids] + before_counts, self._base)
        for total, values in ((self._positives, positives), (self._counts, counts)):
            for task, column in enumerate(values.T):
                total[:, task] += np.bincount(ids, column, len(total))
        self._rows += np.bincount(ids, minlength=len(self._rows))
        return _row_means(np.where(self._new[ids][:, None], 0.0, odds), offsets)

    def close_vocabulary(self) -> None:
        """From now on, ids without a row so far are new: they stay at the base rate."""
        self._new = self._rows == 0


@dataclass(frozen=True)
class Baseline:
    """One fitted logistic regression per task; None for a task whose training labels have only one class."""

    spec: FeatureSpec
    base: Floats  # [T]
    means: dict[str, _RunningMeans]
    centre: Floats  # [F]
    scale: Floats  # [F]
    models: list[LogisticRegression | None]

    def score(self, batch: Batch) -> Tensor:
        """Log-odds float32 [B, T] of the rows that follow those seen so far; afterwards their labels count."""
        scores = np.zeros((len(batch), len(self.models)), np.float32)
        if len(batch) == 0:
            return torch.from_numpy(scores)
        labels, weight = _labels(batch)
        known = {name: means.next(*_ids(batch, name), labels, weight) for name, means in self.means.items()}
        dense = (batch.dense.double().numpy() - self.centre) / self.scale
        for task, model in enumerate(self.models):
            features = _join(dense, batch.domain.numpy(), known, self.spec, task)
            scores[:, task] = _logit(self.base[task]) if model is None else model.decision_function(features)
        return torch.from_numpy(scores)


def fit(batches: Iterable[Batch], spec: FeatureSpec) -> Baseline:
    """Fits on all rows of `batches`, in order; takes a few seconds for a million rows."""
    parts = list(batches)
    dense = np.concatenate([batch.dense.double().numpy() for batch in parts])
    domain = np.concatenate([batch.domain.numpy() for batch in parts])
    pairs = [_labels(batch) for batch in parts]
    labels, weight = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
    total = weight.sum(0)
    base = np.divide((labels * weight).sum(0), total, out=np.full(len(total), 0.5), where=total > 0)
    rows = {table.name: table.rows for table in spec.tables}
    means = {feature.name: _RunningMeans(rows[feature.table], base) for feature in spec.categorical}
    split = len(labels) * 4 // 5
    running = {name: _out_of_time(one, *_joined_ids(parts, name), labels, weight, split) for name, one in means.items()}
    centre, scale = dense.mean(0), dense.std(0)
    scale[scale == 0] = 1.0
    models = []
    for task in range(len(spec.labels)):
        features = _join((dense[split:] - centre) / scale, domain[split:], running, spec, task)
        models.append(_fit_task(features, labels[split:, task], weight[split:, task]))
    return Baseline(spec, base, means, centre, scale, models)


def _out_of_time(means: _RunningMeans, ids: Ids, offsets: Ids, labels: Floats, weight: Floats, split: int) -> Floats:
    """Log-odds of the training rows from `split` on, with the rows before it as vocabulary; adds all of them."""
    edge = offsets[split]
    means.next(ids[:edge], offsets[: split + 1], labels[:split], weight[:split])
    means.close_vocabulary()
    running = means.next(ids[edge:], offsets[split:] - edge, labels[split:], weight[split:])
    means.close_vocabulary()
    return running


def _fit_task(features: Floats, label: Floats, weight: Floats) -> LogisticRegression | None:
    counted = weight > 0
    if len(np.unique(label[counted])) < 2:
        return None
    model = LogisticRegression(max_iter=200)
    return model.fit(features[counted], label[counted], sample_weight=weight[counted])


def _earlier(ids: Ids, row: Ids, values: Floats) -> Floats:
    """For each entry the sum of `values` [N, T] over the entries with the same id in strictly earlier rows.

    `row` [N] never decreases. Entries are sorted by (id, row); the result is the running sum at the start of the row's
    entries minus the one at the start of the id's.
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


def _labels(batch: Batch) -> tuple[Floats, Floats]:
    """Labels and weights [B, T]; a label that does not count has weight 0."""
    return batch.labels.double().numpy(), (batch.label_mask * batch.weight[:, None]).double().numpy()


def _ids(batch: Batch, feature: str) -> tuple[Ids, Ids]:
    jagged = batch.categorical[feature]
    return jagged.values.numpy(), jagged.offsets.numpy()


def _joined_ids(parts: list[Batch], feature: str) -> tuple[Ids, Ids]:
    pieces = [_ids(batch, feature) for batch in parts]
    lengths = np.concatenate([np.diff(offsets) for _, offsets in pieces])
    return np.concatenate([ids for ids, _ in pieces]), np.concatenate([[0], np.cumsum(lengths)])
