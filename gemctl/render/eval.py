"""The table of `gemctl eval`: model and logistic regression on the same rows."""

from typing import Any

from gemctl.render.report import Section, rich
from gemctl.report.scores import Evaluation
from gemctl.units import count, number, percent

COLUMNS = ["task", "scorer", "examples", "base rate", "NE", "AUC", "calibration", "best possible NE", "gap closed"]
BASELINE = "logistic regression"


def evaluation(value: Evaluation) -> Any:
    """For a terminal."""
    return rich(sections(value))


def sections(value: Evaluation) -> list[Section]:
    rows = []
    for task, quality in value.tasks.items():
        rows.append([task, "model", *_figures(quality)])
        if value.baseline is not None:
            rows.append(["", BASELINE, *_figures(value.baseline[task])])
    facts = [
        ["run", value.run],
        ["checkpoint", f"{value.checkpoint} (step {value.step})"],
        ["rows", f"{value.data}: {value.rows:,} in {value.seconds:.1f} s"],
    ]
    if value.out is not None:
        facts.append(["scores", value.out])
    if value.baseline_reason is not None:
        facts.append([BASELINE, f"none: {value.baseline_reason}"])
    facts += [["note", note] for note in value.notes]
    note = (
        "NE: logloss / entropy of the base rate of these rows. The regression, fitted on the training rows, sees the "
        "dense features, the domain and each id's smoothed mean label over strictly earlier rows, no event histories."
    )
    return [Section("Evaluation", ["", ""], facts), Section("Quality", COLUMNS, rows, note)]


def _figures(quality: dict[str, Any]) -> list[str]:
    return [
        count(quality["examples"]), number(quality["base_rate"]), number(quality["ne"]), number(quality["auc"]),
        number(quality["calibration"], 3), number(quality["best_ne"]), percent(quality["gap_closed"]),
    ]  # fmt: skip
