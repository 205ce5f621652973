"""The nano presets side by side: NE and AUC of each task over several seeds, trained and scored by gemctl itself.

    python -m gemctl.bench.presets experiment=ml100k            # or experiment=synthetic; more KEY=VALUE for all runs

Four presets × three seeds, a training and an evaluation each: on 2 cores minutes each on MovieLens 100K
(`gemctl data import ml-100k data/ml100k` first). Every run lies below runs/, named PRESET-SEED.
"""

import statistics
import sys
from dataclasses import dataclass
from typing import Any

from gemctl.bench.quality import gemctl, main
from gemctl.render.sections import Section
from gemctl.units import number

PRESETS = ("gem_nano", "kunlun_nano", "interformer_nano", "hstu_nano")
SEEDS = (0, 1, 2)


@dataclass
class Comparison:
    """Evaluations (`gemctl eval --json`) by preset, one a seed; `versions` of what matters."""

    words: list[str]
    scored: dict[str, list[dict[str, Any]]]
    versions: dict[str, str]


def compare(words: list[str]) -> Comparison:
    """Trains and scores all. CalledProcessError if a command fails (its output was shown)."""
    scored: dict[str, list[dict[str, Any]]] = {}
    versions: dict[str, str] = {}
    for preset in PRESETS:
        for seed in SEEDS:
            own = [f"model={preset}", f"run.seed={seed}", f"run.name={preset}-{seed}"]
            run = gemctl("train", *words, *own)
            scored.setdefault(preset, []).append(gemctl("eval", run["path"]))
            versions = run["run"]["versions"]
    return Comparison(words, scored, versions)


def sections(value: Comparison) -> list[Section]:
    """One table a task, the regression last, and what made them."""
    evaluations = next(iter(value.scored.values()))
    head = ["predictor", "NE: mean", "lowest", "highest", "AUC: mean"]
    found = []
    for task, first in evaluations[0]["tasks"].items():
        rows = [[preset, *_spread([one["tasks"][task] for one in runs])] for preset, runs in value.scored.items()]
        if evaluations[0]["baseline"]:
            rows.append(["logistic regression", *_spread([evaluations[0]["baseline"][task]])])
        title = f"Task {task}: {first['examples']:,} rows, base rate {first['base_rate']:.4f}, seeds {SEEDS}"
        found.append(Section(title, head, rows))
    command = " ".join(["gemctl train", *value.words, "model=PRESET run.seed=SEED, then gemctl eval RUN"])
    versions = ", ".join(f"{name} {version}" for name, version in value.versions.items())
    return [*found, Section("Made by", ["", ""], [["command", command], ["versions", versions]])]


def _spread(qualities: list[dict[str, Any]]) -> list[str]:
    entropies, areas = [one["ne"] for one in qualities], [one["auc"] for one in qualities]
    figures = (statistics.mean(entropies), min(entropies), max(entropies), statistics.mean(areas))
    return [number(figure) for figure in figures]


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", lambda words: sections(compare(words))))
