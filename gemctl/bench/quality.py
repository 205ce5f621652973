"""Quality benchmarks, trained and scored by gemctl itself: the ladder on the synthetic log, and the nano presets.

    make bench-quality                                          # the ladder, or
    python -m gemctl.bench.quality [KEY=VALUE …]                # with overrides of the main job, for all its trainings
    python -m gemctl.bench.quality presets experiment=ml100k    # or experiment=synthetic; more KEY=VALUE for all runs

The ladder shows how much of the gap between the base rate and the best possible NE each predictor closes: the base
rate, a logistic regression on running means (at most 40%, or the log would be too easy), the model without event
histories, the model, and the generator's true probabilities, all on the same rows of data.eval. It takes two trainings
and two evaluations: a few minutes on 2 cores.

The presets are compared by NE and AUC of each task over several seeds. Four presets × three seeds are minutes each on 2
cores with MovieLens 100K (`gemctl data import ml-100k data/ml100k` first). The runs are in runs/PRESET-SEED.
"""

import json
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from gemctl.process import python
from gemctl.render.sections import Section, rich
from gemctl.units import number, percent

MAIN = "experiment=synthetic"
WITHOUT_HISTORIES = ["data.histories=empty", "run.name=synthetic-empty"]  # a name of its own, to tell the runs apart
PRESETS = ("gem_nano", "kunlun_nano", "interformer_nano", "hstu_nano")
SEEDS = (0, 1, 2)


@dataclass
class Rung:
    """One predictor's metrics on the eval rows of the first task."""

    name: str
    quality: dict[str, Any]


@dataclass
class Ladder:
    """`rungs` from the weakest to the strongest; `commands` and `versions`: how they were produced."""

    task: str
    rows: int
    base_rate: float
    rungs: list[Rung]
    commands: list[str]
    versions: dict[str, str]


def climb(overrides: list[str]) -> Ladder:
    """Trains both models and scores all rungs. CalledProcessError if a command fails (its output was shown)."""
    model, without = [[MAIN, *overrides], [MAIN, *overrides, *WITHOUT_HISTORIES]]
    runs = [gemctl("train", *words) for words in (model, without)]
    scored = [gemctl("eval", run["path"]) for run in runs]
    commands = [shlex.join(["gemctl", "train", *words]) for words in (model, without)]
    return ladder(scored[0], scored[1], [*commands, "gemctl eval RUN (of each)"], runs[0]["run"]["versions"])


def ladder(model: dict[str, Any], without: dict[str, Any], commands: list[str], versions: dict[str, str]) -> Ladder:
    """The ladder from two evaluations (`gemctl eval --json`): of the model, and of the one without histories."""
    task, quality = next(iter(model["tasks"].items()))
    rungs = [
        Rung("base rate", {"ne": 1.0, "auc": 0.5, "gap_closed": 0.0}),
        Rung("logistic regression", model["baseline"][task]),
        Rung("model without histories", without["tasks"][task]),
        Rung("model", quality),
        Rung("best possible", {"ne": quality["best_ne"], "auc": None, "gap_closed": 1.0}),
    ]
    return Ladder(task, quality["examples"], quality["base_rate"], rungs, commands, versions)


def ladder_sections(value: Ladder) -> list[Section]:
    """The rungs, and how they were produced."""
    rows = [[rung.name, number(rung.quality["ne"]), number(rung.quality["auc"]), percent(rung.quality["gap_closed"])]
            for rung in value.rungs]  # fmt: skip
    title = f"Task {value.task}: {value.rows:,} rows, base rate {value.base_rate:.4f}"
    return [Section(title, ["predictor", "NE", "AUC", "gap closed"], rows), _made_by(value.commands, value.versions)]


@dataclass
class Comparison:
    """Evaluations (`gemctl eval --json`) by preset, one per seed; `words`: the overrides of all runs."""

    words: list[str]
    scored: dict[str, list[dict[str, Any]]]
    versions: dict[str, str]


def compare_presets(words: list[str]) -> Comparison:
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


def preset_sections(value: Comparison) -> list[Section]:
    """One table per task, with the logistic regression last, and how they were produced."""
    evaluations = next(iter(value.scored.values()))
    columns = ["predictor", "NE: mean", "lowest", "highest", "AUC: mean"]
    tables = []
    for task, first in evaluations[0]["tasks"].items():
        rows = [[preset, *_spread([one["tasks"][task] for one in runs])] for preset, runs in value.scored.items()]
        if evaluations[0]["baseline"]:
            rows.append(["logistic regression", *_spread([evaluations[0]["baseline"][task]])])
        title = f"Task {task}: {first['examples']:,} rows, base rate {first['base_rate']:.4f}, seeds {SEEDS}"
        tables.append(Section(title, columns, rows))
    command = " ".join(["gemctl train", *value.words, "model=PRESET run.seed=SEED, then gemctl eval RUN"])
    return [*tables, _made_by([command], value.versions)]


def _spread(qualities: list[dict[str, Any]]) -> list[str]:
    entropies, areas = [one["ne"] for one in qualities], [one["auc"] for one in qualities]
    figures = (statistics.mean(entropies), min(entropies), max(entropies), statistics.mean(areas))
    return [number(figure) for figure in figures]


def _made_by(commands: list[str], versions: dict[str, str]) -> Section:
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Section("Made by", ["", ""], [["commands", "\n".join(commands)], ["versions", named]])


def gemctl(*words: str) -> dict[str, Any]:
    """The JSON output of a command; its progress goes to standard error."""
    command = python("-m", "gemctl", *words, "--json")
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace", check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(words: list[str]) -> int:
    """Runs the benchmark of the command line and shows its tables; returns the exit code of a command that fails."""
    if {"-h", "--help"} & set(words):
        sys.stdout.write(__doc__ or "")
        return 0
    try:
        if words[:1] == ["presets"]:
            tables = preset_sections(compare_presets(words[1:]))
        else:
            tables = ladder_sections(climb(words))
    except subprocess.CalledProcessError as failed:  # the command has reported the reason
        return int(failed.returncode)
    Console(width=120).print(rich(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
