"""The baseline's running means against a loop over rows, and that it learns and scores in the right places."""

import math
from itertools import pairwise

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from gemctl.data.batch import Batch, Jagged
from gemctl.specs.data import CategoricalSpec, FeatureSpec, LabelSpec, TableSpec
from gemctl.train import baseline
from gemctl.train.metrics import TaskMetrics
from tests.support.small import SPEC, rows_batch

TRAIN, FITTED_FROM, SCORED = 80, 64, 40  # few enough that some items are new in both later parts


def log_odds(positives: float, count: float, base: float) -> float:
    mean = (positives + baseline.SMOOTHING * base) / (count + baseline.SMOOTHING)
    return math.log(mean / (1 - mean)) - math.log(base / (1 - base))


def loop_features(rows: Batch, task: int) -> np.ndarray:
    """Row by row and id by id what the regression should see; the first TRAIN rows are the training rows."""
    weight = (rows.weight * rows.label_mask[:, task]).tolist()
    label = rows.labels[:, task].tolist()
    base = sum(w * y for w, y in zip(weight[:TRAIN], label[:TRAIN], strict=True)) / sum(weight[:TRAIN])
    dense = rows.dense.double().numpy()
    found = []
    for b in range(FITTED_FROM, len(rows)):
        vocabulary = FITTED_FROM if b < TRAIN else TRAIN
        row = list((dense[b] - dense[:TRAIN].mean(0)) / dense[:TRAIN].std(0))
        for feature in SPEC.categorical:
            every = ids_of(rows, feature.name)
            known = {value for ids in every[:vocabulary] for value in ids}
            odds = []
            for value in every[b]:
                same = [earlier.count(value) for earlier in every[:b]]
                positives = sum(n * weight[other] * label[other] for other, n in enumerate(same))
                if value not in known:
                    positives, same = 0.0, []
                odds.append(log_odds(positives, sum(n * weight[other] for other, n in enumerate(same)), base))
            row.append(sum(odds) / len(odds) if odds else 0.0)
        found.append([*row, *(float(rows.domain[b] == surface) for surface in range(3))])
    return np.array(found)


def ids_of(batch: Batch, feature: str) -> list[list[int]]:
    jagged = batch.categorical[feature]
    edges = jagged.offsets.tolist()
    return [jagged.values[start:stop].tolist() for start, stop in pairwise(edges)]


def test_fit_and_scores_equal_a_regression_on_means_made_row_by_row() -> None:
    rows = rows_batch(list(range(TRAIN + SCORED)))
    spans = [(0, FITTED_FROM), (FITTED_FROM, TRAIN), (0, TRAIN), (TRAIN, TRAIN + SCORED)]
    items = [{item for ids in ids_of(rows, "candidate")[start:stop] for item in ids} for start, stop in spans]
    assert items[1] - items[0] and items[3] - items[2]
    # In uneven pieces, some of them empty: only the order of the rows may count.
    fitted = baseline.fit([rows.slice(0, 7), rows.slice(7, 7), rows.slice(7, TRAIN)], SPEC)
    edges = [TRAIN, TRAIN + 3, TRAIN + 3, TRAIN + SCORED]
    got = torch.cat([fitted.score(rows.slice(start, stop)) for start, stop in pairwise(edges)])
    for task in range(2):
        weight = (rows.weight * rows.label_mask[:, task])[FITTED_FROM:TRAIN].numpy()
        counted = weight > 0
        features = loop_features(rows, task)
        fit, scored = features[: TRAIN - FITTED_FROM], features[TRAIN - FITTED_FROM :]
        labels = rows.labels[FITTED_FROM:TRAIN, task].numpy()
        model = LogisticRegression(max_iter=200).fit(fit[counted], labels[counted], sample_weight=weight[counted])
        np.testing.assert_allclose(got[:, task].numpy(), model.decision_function(scored), atol=2e-3)


def id_batch(ids: torch.Tensor, labels: torch.Tensor) -> Batch:
    rows = len(ids)
    ones = torch.ones(rows)
    return Batch(
        torch.arange(rows), {"item": Jagged(ids, torch.arange(rows + 1))}, torch.zeros(rows, 0), {}, labels[:, None],
        ones[:, None], ones, torch.zeros(rows, dtype=torch.int64), torch.full((rows,), math.nan), {},
    )  # fmt: skip


ITEMS = FeatureSpec("items", [TableSpec("item", 500)], [LabelSpec("click")], [CategoricalSpec("item", "item")])


def test_a_rows_own_label_does_not_reach_its_features() -> None:
    """Labels are coin flips and every id comes twice: whoever sees own labels would learn them; honest means can't."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.arange(1000) % 500
    labels = (torch.rand(1000, generator=draw) < 0.5).float()
    fitted = baseline.fit([id_batch(ids, labels)], ITEMS)
    assert fitted.models[0] is not None and abs(fitted.models[0].coef_[0, 0]) < 1.5
    fresh = (torch.rand(1000, generator=draw) < 0.5).float()
    metrics = TaskMetrics(["click"])
    metrics.update(fitted.score(id_batch(ids, fresh)), fresh[:, None], torch.ones(1000, 1), torch.ones(1000))
    ne = metrics.compute()["click"]["ne"]
    assert ne is not None and 0.995 < ne < 1.03


def test_it_learns_what_the_ids_know() -> None:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (5000,), generator=draw)
    rate = torch.linspace(0.05, 0.95, 500)
    labels = (torch.rand(5000, generator=draw) < rate[ids * 10]).float()
    fitted = baseline.fit([id_batch(ids[:4000], labels[:4000])], ITEMS)
    metrics = TaskMetrics(["click"])
    rest = id_batch(ids[4000:], labels[4000:])
    metrics.update(fitted.score(rest), rest.labels, rest.label_mask, rest.weight, rate[ids[4000:] * 10])
    quality = metrics.compute()["click"]
    assert quality["gap_closed"] is not None and 0.9 < quality["gap_closed"] < 1.02


def test_labels_of_one_class_give_the_base_rate_and_no_rows_no_scores() -> None:
    fitted = baseline.fit([id_batch(torch.arange(10), torch.ones(10))], ITEMS)
    assert fitted.models == [None]
    assert float(fitted.score(id_batch(torch.arange(3), torch.ones(3))).min()) > 10
    assert fitted.score(id_batch(torch.arange(0), torch.ones(0))).shape == (0, 1)
