"""NE, AUC and calibration per task, from sums over batches and ranks, so they do not depend on the world size.

    metrics = TaskMetrics(["click", "like"], device)
    metrics.update(logits, batch.labels, batch.label_mask, batch.weight, batch.true_probability)
    metrics.reduce(group)          # one all-reduce of float64 sums
    metrics.compute()["click"]["ne"]

NE (normalized entropy) is logloss / entropy of the base rate of the same rows: 1 is a constant guess, lower is better.

AUC is computed from two histograms per task (positives, negatives) over the logit, with 2¹⁸ bins of equal width in
[−16, 16); values outside count in the outer bins. Scores in one bin count as ties, so the result differs from the exact
AUC by at most ½·Σ_b P_b·N_b / (P·N), which is reported as `auc_error`: 2e-5 for logits with standard deviation 1, below
1e-4 down to a deviation of 0.2 (the actual error is far smaller, as scores within a bin are in nearly random order).
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

AUC_BINS = 2**18
AUC_RANGE = 16.0
Quality = dict[str, float | int | None]

# The sums of a task, in this order.
_SUMS = ("examples", "weight", "positive", "loss", "probability", "best_weight", "best_loss", "nonfinite")
_DERIVED = ("base_rate", "logloss", "ne", "auc", "auc_error", "calibration", "best_ne", "gap_closed")


class TaskMetrics:
    """Weighted sums of T tasks; masked labels do not count.

    `auc=False` leaves out the histograms (4 MiB per task): enough for NE during training.
    """

    def __init__(self, tasks: Sequence[str], device: torch.device | str = "cpu", *, auc: bool = True) -> None:
        self.tasks = list(tasks)
        count = len(self.tasks)
        bins = AUC_BINS if auc else 0
        # One flat tensor, so that `reduce` is one collective.
        self.flat = torch.zeros(count * (len(_SUMS) + 2 * bins), dtype=torch.float64, device=device)
        self._sums = self.flat[: count * len(_SUMS)].view(count, len(_SUMS))
        self._histograms = self.flat[count * len(_SUMS) :].view(count, 2, bins) if auc else None

    @torch.no_grad()
    def update(
        self, logits: Tensor, labels: Tensor, label_mask: Tensor, weight: Tensor, true_probability: Tensor | None = None
    ) -> None:
        """Adds B rows: `logits`, `labels`, `label_mask` [B, T], `weight` [B], `true_probability` [B] (NaN: unknown).

        `true_probability` belongs to the first task. A label that counts but has a non-finite logit is left out of all
        sums and counted in `nonfinite`.
        """
        if logits.shape[0] == 0:
            return
        score = logits.double()
        asked = label_mask > 0
        counted = asked & score.isfinite()
        score, label = torch.where(counted, score, 0.0), torch.where(counted, labels.double(), 0.0)
        row_weight = torch.where(counted, weight.double().unsqueeze(1), 0.0)
        loss = torch.nn.functional.softplus(score) - label * score
        columns = [
            counted.double(), row_weight, row_weight * label, row_weight * loss, row_weight * score.sigmoid(),
            torch.zeros_like(score), torch.zeros_like(score), (asked & ~counted).double(),
        ]  # fmt: skip
        if true_probability is not None:
            known, best = _best_loss(true_probability.double(), label[:, 0], row_weight[:, 0])
            columns[5][:, 0], columns[6][:, 0] = known, best
        self._sums += torch.stack([column.sum(0) for column in columns], dim=1)
        if self._histograms is not None:
            self._add_to_histograms(score, label, row_weight)

    def _add_to_histograms(self, score: Tensor, label: Tensor, row_weight: Tensor) -> None:
        bins = ((score + AUC_RANGE) * (AUC_BINS / (2 * AUC_RANGE))).floor().clamp(0, AUC_BINS - 1).long()
        for task, (positives, negatives) in enumerate(self._histograms):  # type: ignore[arg-type]
            positives.index_add_(0, bins[:, task], row_weight[:, task] * label[:, task])
            negatives.index_add_(0, bins[:, task], row_weight[:, task] * (1 - label[:, task]))

    def reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Sums over the ranks of `group` (None: all, if there is a process group). Call once, before `compute`."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.flat, group=group)

    def reset(self) -> None:
        """Clears all sums."""
        self.flat.zero_()

    def compute(self) -> dict[str, Quality]:
        """By task: `examples`, `weight`, `base_rate`, `logloss`, `ne`, `auc`, `auc_error`, `calibration`, `best_ne`,
        `gap_closed`, `nonfinite`; None where the rows leave it undefined (no row, labels of one class, ...).

        `best_ne` is the NE of the generator's own probabilities: the logloss of `true_probability` on the actual labels
        of the same rows (not its expectation), so that model and bound see the same label noise.
        `gap_closed` = (1 − NE) / (1 − best NE).
        """
        return {task: self._compute_task(index) for index, task in enumerate(self.tasks)}

    def _compute_task(self, index: int) -> Quality:
        sums = dict(zip(_SUMS, self._sums[index].tolist(), strict=True))
        result: Quality = {name: int(sums[name]) for name in ("examples", "nonfinite")} | {"weight": sums["weight"]}
        result |= dict.fromkeys(_DERIVED)
        if sums["weight"] <= 0:
            return result
        base = sums["positive"] / sums["weight"]
        result["base_rate"] = base
        result["logloss"] = sums["loss"] / sums["weight"]
        result["calibration"] = sums["probability"] / sums["positive"] if base > 0 else None
        if not 0 < base < 1:
            return result
        entropy = -(base * math.log(base) + (1 - base) * math.log1p(-base))
        ne = sums["loss"] / sums["weight"] / entropy
        result["ne"] = ne
        # Only if all rows have a true probability: bound and model must cover the same rows.
        if math.isclose(sums["best_weight"], sums["weight"]):
            best = sums["best_loss"] / sums["weight"] / entropy
            result["best_ne"] = best
            result["gap_closed"] = (1 - ne) / (1 - best) if best < 1 else None
        if self._histograms is not None:
            result["auc"], result["auc_error"] = _auc(self._histograms[index])
        return result


def _best_loss(probability: Tensor, label: Tensor, row_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [B] of rows whose true probability is known (0 for others), and their weighted logloss [B]."""
    known = torch.where(probability.isnan(), 0.0, row_weight)
    probability = torch.where(probability.isnan(), 0.5, probability)
    loss = torch.nn.functional.binary_cross_entropy(probability, label, reduction="none")
    return known, known * loss


def _auc(histograms: Tensor) -> tuple[float | None, float | None]:
    """AUC and its error bound, from [2, bins] positives and negatives; ties count one half."""
    positives, negatives = histograms
    pairs = float(positives.sum() * negatives.sum())
    if pairs <= 0:
        return None, None
    tied = float(positives @ negatives)
    below = negatives.cumsum(0) - negatives
    return (float(positives @ below) + tied / 2) / pairs, tied / 2 / pairs
