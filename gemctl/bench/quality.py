"""The ladder: how much of the gap between base rate and best possible NE each rung closes on the synthetic log.

    make bench-quality                                    # or
    python -m gemctl.bench.quality [KEY=VALUE …]          # overrides of the main job, for all its rungs

Rungs: the base rate; a logistic regression on running means (it must close at most 40%, else the log is too easy);
the model with every event history emptied; the model; the generator's own probabilities. All are scored on the same
rows of data.eval. Two trainings and two evaluations: some minutes on 2 cores.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemctl.process import python
from gemctl.render.sections import Section, rich
from gemctl.units import number, percent

MAIN = "experiment=synthetic"
# One name each, so that the two runs are told apart in runs/.
WITHOUT_HISTORIES = ["data.histories=empty", "run.name=synthetic-empty"]


@dataclass
class Rung:
    """One predictor's figures on the eval rows of the first task."""

    name: str
    quality: dict[str, Any]


@dataclass
class Ladder:
    """`rungs` from the weakest to the strongest; `commands`: what made them; `versions` of what matters."""

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
    """The ladder of two evaluations (`gemctl eval --json`): the model's, and that of the one without histories."""
    task, quality = next(iter(model["tasks"].items()))
    rungs = [
        Rung("base rate", {"ne": 1.0, "auc": 0.5, "gap_closed": 0.0}),
        Rung("logistic regression", model["baseline"][task]),
        Rung("the model, histories emptied", without["tasks"][task]),
        Rung("the model", quality),
        Rung("best possible", {"ne": quality["best_ne"], "auc": None, "gap_closed": 1.0}),
    ]
    return Ladder(task, quality["examples"], quality["base_rate"], rungs, commands, versions)


def sections(value: Ladder) -> list[Section]:
    """The table, and what made it."""
    rows = [[rung.name, number(rung.quality["ne"]), number(rung.quality["auc"]), percent(rung.quality["gap_closed"])]
            for rung in value.rungs]  # fmt: skip
    title = f"Task {value.task}: {value.rows:,} rows, base rate {value.base_rate:.4f}"
    made = [["commands", "\n".join(value.commands)]]
    made += [["versions", ", ".join(f"{name} {version}" for name, version in value.versions.items())]]
    return [Section(title, ["predictor", "NE", "AUC", "gap closed"], rows), Section("Made by", ["", ""], made)]


def gemctl(*words: str) -> dict[str, Any]:
    """The JSON of a command, whose progress goes to standard error."""
    command = python("-m", "gemctl", *words, "--json")
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace", check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show(make: Callable[[], list[Section]]) -> int:
    """Shows the tables that `make` gets from commands; returns the exit code of one that failed."""
    from rich.console import Console  # noqa: PLC0415

    try:
        Console(width=120).print(rich(make()))
    except subprocess.CalledProcessError as failed:  # the command has said why
        return int(failed.returncode)
    return 0


def main(doc: str, make: Callable[[list[str]], list[Section]]) -> int:
    """A command line of KEY=VALUE words, for which `make` trains; --help shows `doc`."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        sys.stdout.write(doc)
        return 0
    return show(lambda: make(words))


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", lambda words: sections(climb(words))))
