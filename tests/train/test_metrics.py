"""NE, AUC and calibration against direct formulas, scikit-learn, and the same rows on four ranks."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor

from gemctl.train.metrics import TaskMetrics
from tests.support.world import run_world

TASKS = ["click", "like"]
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_rows(count: int, seed: int = 0, spread: float = 1.0) -> Rows:
    """Logits, labels, masks [B, 2], weights and true probabilities [B]; labels are drawn from the true ones."""
    draw = torch.Generator().manual_seed(seed)
    truth = torch.randn(count, 2, generator=draw) * spread - 1
    labels = (torch.rand(count, 2, generator=draw) < truth.sigmoid()).float()
    mask = (torch.rand(count, 2, generator=draw) < 0.8).float()
    weight = torch.randint(1, 4, (count,), generator=draw).float()
    logits = truth + 0.5 * spread * torch.randn(count, 2, generator=draw)
    return logits, labels, mask, weight, truth[:, 0].sigmoid()


def of(rows: Rows) -> dict[str, Any]:
    metrics = TaskMetrics(TASKS)
    metrics.update(*rows)
    return metrics.compute()


def pair_auc(score: Tensor, label: Tensor, weight: Tensor) -> float:
    """AUC over all pairs: the weighted share that is in the right order, ties one half."""
    positive, negative = label == 1, label == 0
    difference = score[positive][:, None] - score[negative][None, :]
    pair = weight[positive][:, None] * weight[negative][None, :]
    return float((((difference > 0) + 0.5 * (difference == 0)) * pair).sum() / pair.sum())


def test_every_figure_matches_its_definition_with_masks_and_weights() -> None:
    rows = make_rows(1500)
    logits, labels, mask, weight, truth = rows
    for task, got in enumerate(of(rows).values()):
        keep = mask[:, task] > 0
        score, label, w = logits[keep, task].double(), labels[keep, task], weight[keep].double()
        base = float((w * label).sum() / w.sum())
        entropy = -base * math.log(base) - (1 - base) * math.log(1 - base)
        loss = log_loss(label.numpy(), score.sigmoid().numpy(), sample_weight=w.numpy())
        assert got["examples"] == int(keep.sum()) and got["weight"] == float(w.sum())
        assert got["base_rate"] == pytest.approx(base, rel=1e-12)
        assert got["logloss"] == pytest.approx(loss, rel=1e-9)
        assert got["ne"] == pytest.approx(loss / entropy, rel=1e-9)
        assert got["calibration"] == pytest.approx(float((w * score.sigmoid()).sum() / (w * label).sum()), rel=1e-9)
        assert got["auc"] == pytest.approx(pair_auc(score, label, w), abs=1e-5)
        if task == 0:
            best = log_loss(label.numpy(), truth[keep].double().numpy(), sample_weight=w.numpy()) / entropy
            assert got["best_ne"] == pytest.approx(best, rel=1e-9)
            assert got["gap_closed"] == pytest.approx((1 - loss / entropy) / (1 - best), rel=1e-9)
        else:
            assert got["best_ne"] is None and got["gap_closed"] is None


@pytest.mark.parametrize("spread", [0.2, 1.0, 8.0])
def test_auc_is_within_its_reported_bound_of_the_exact_one_and_the_bound_below_1e_4(spread: float) -> None:
    rows = make_rows(200_000, spread=spread)
    keep = (rows[2][:, 0] > 0).numpy()
    exact = roc_auc_score(rows[1][:, 0].numpy()[keep], rows[0][:, 0].numpy()[keep], sample_weight=rows[3].numpy()[keep])
    got = of(rows)["click"]
    assert abs(got["auc"] - exact) <= got["auc_error"] + 1e-12
    assert got["auc_error"] < 1e-4


def test_logits_in_one_bin_report_a_large_error_instead_of_hiding_it() -> None:
    logits, labels, mask, weight, truth = make_rows(1000)
    got = of((logits * 1e-7, labels, mask, weight, truth))["click"]
    assert got["auc_error"] > 0.1


def test_equal_scores_are_ties() -> None:
    labels = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    metrics = TaskMetrics(["click"])
    metrics.update(torch.full((4, 1), -2.5), labels, torch.ones(4, 1), torch.ones(4))
    assert metrics.compute()["click"]["auc"] == 0.5


def test_batches_in_any_split_add_up_to_the_same() -> None:
    rows = make_rows(3000)
    metrics = TaskMetrics(TASKS)
    for start, stop in [(0, 1), (1, 1), (1, 1700), (1700, 3000)]:
        logits, labels, mask, weight, truth = (column[start:stop] for column in rows)
        metrics.update(logits, labels, mask, weight, truth)
    assert_equal(metrics.compute(), of(rows))


def rank_part(count: int) -> dict[str, Any]:
    """Runs on each of 4 ranks: uneven parts, none for rank 2."""

    cut = [0, 17, 1900, 1900, count]
    start, stop = cut[dist.get_rank()], cut[dist.get_rank() + 1]
    logits, labels, mask, weight, truth = (column[start:stop] for column in make_rows(count))
    metrics = TaskMetrics(TASKS)
    metrics.update(logits, labels, mask, weight, truth)
    metrics.reduce()
    return metrics.compute()


def test_world_4_equals_world_1() -> None:
    for result in run_world(4, rank_part, 3000):
        assert_equal(result, of(make_rows(3000)))


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_only_leaves_the_undefined_figures_out(label: float) -> None:
    got = TaskMetrics(["click"])
    got.update(torch.zeros(3, 1), torch.full((3, 1), label), torch.ones(3, 1), torch.ones(3), torch.full((3,), 0.5))
    quality = got.compute()["click"]
    assert quality["ne"] is None and quality["auc"] is None and quality["gap_closed"] is None
    assert quality["base_rate"] == label and quality["logloss"] == pytest.approx(math.log(2))


def test_no_row_at_all_and_fully_masked_rows_give_no_figures() -> None:
    metrics = TaskMetrics(["click"])
    metrics.update(torch.zeros(0, 1), torch.zeros(0, 1), torch.zeros(0, 1), torch.zeros(0))
    metrics.update(torch.zeros(2, 1), torch.full((2, 1), math.nan), torch.zeros(2, 1), torch.ones(2))
    quality = metrics.compute()["click"]
    assert quality["examples"] == 0 and quality["base_rate"] is None and quality["logloss"] is None


def test_a_logit_that_is_not_finite_is_counted_and_left_out() -> None:
    logits, labels, mask, weight, truth = make_rows(500)
    broken = logits.clone()
    broken[:5] = torch.tensor([math.nan, math.inf])
    without = of((logits[5:], labels[5:], mask[5:], weight[5:], truth[5:]))
    got = of((broken, labels, mask, weight, truth))
    assert got["click"]["nonfinite"] == int(mask[:5, 0].sum()) > 0
    assert got["click"]["auc"] == pytest.approx(without["click"]["auc"], abs=1e-12)
    assert got["like"]["logloss"] == pytest.approx(without["like"]["logloss"], rel=1e-12)


def test_rows_without_a_true_probability_leave_the_bound_out() -> None:
    logits, labels, mask, weight, truth = make_rows(100)
    mask[0] = 1
    truth[0] = math.nan
    assert of((logits, labels, mask, weight, truth))["click"]["best_ne"] is None


def test_ne_alone_without_histograms_is_the_same() -> None:
    rows = make_rows(400)
    metrics = TaskMetrics(TASKS, auc=False)
    metrics.update(*rows)
    got = metrics.compute()["click"]
    assert got["auc"] is None and got["ne"] == of(rows)["click"]["ne"]
    metrics.reset()
    assert metrics.compute()["click"]["examples"] == 0


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for task, quality in left.items():
        for name, value in quality.items():
            assert value == (None if right[task][name] is None else pytest.approx(right[task][name], rel=1e-12)), name


def test_the_true_probabilities_beat_the_noisy_model() -> None:
    got = of(make_rows(100_000))["click"]
    assert got["best_ne"] is not None and got["best_ne"] < got["ne"] < 1
    assert np.isclose(got["calibration"], 1.0, atol=0.15)
