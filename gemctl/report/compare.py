"""Two runs side by side: both reports, the settings that differ, and why the speed differs.

gemctl report RUN --diff RUN
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from gemctl.config.compose import from_yaml
from gemctl.errors import InputError
from gemctl.report.report import Report, build
from gemctl.run.directory import RunDir
from gemctl.run.files import read_text


@dataclass
class Setting:
    """A configuration key whose values differ between two runs."""

    key: str
    first: str
    second: str


@dataclass
class Factor:
    """A factor of examples/s, in both runs; `changes`: by how much it multiplies examples/s in the second run."""

    name: str
    first: float
    second: float
    changes: float


@dataclass
class Diff:
    """`settings`: those in which the last attempts differ. `factors`: of examples/s, which is the last one and the
    product of the others; empty if a run has no speed. `parts`: seconds of a step by part, in the first run and the
    second, and their difference."""

    runs: list[Report]
    settings: list[Setting]
    factors: list[Factor]
    parts: dict[str, tuple[float, float, float]]


def compare(first: RunDir, second: RunDir) -> Diff:
    """Reads both runs."""
    flat = [_settings(run) for run in (first, second)]
    keys = [key for key in dict.fromkeys([*flat[0], *flat[1]]) if flat[0].get(key) != flat[1].get(key)]
    settings = [Setting(key, flat[0].get(key, ""), flat[1].get(key, "")) for key in keys]
    reports = [build(first), build(second)]
    return Diff(reports, settings, _factors(*reports), _parts(*(report.step_seconds for report in reports)))


def _factors(first: Report, second: Report) -> list[Factor]:
    """examples/s = ranks × peak of one rank × local MFU × scaling ratio / FLOPs per example."""
    known = all(report.throughput.scaling_ratio is not None for report in (first, second))
    values = [_factor_values(report, split=known) for report in (first, second)]
    if any(value is None or not value for one in values for value in one.values()):
        return []
    found = []
    for name in values[0]:
        a, b = (float(one[name] or 0) for one in values)
        found.append(Factor(name, a, b, a / b if name == "FLOPs per example" else b / a))
    return found


def _factor_values(report: Report, split: bool) -> dict[str, float | None]:
    t = report.throughput
    mfu = {"local MFU": t.local_mfu, "scaling ratio": t.scaling_ratio} if split else {"effective MFU": t.effective_mfu}
    ranks = {"ranks": float(report.attempts[-1].ranks), "peak of one rank (FLOP/s)": t.rank_peak}
    return {"FLOPs per example": t.flops_per_example, **mfu, **ranks, "examples/s": t.examples_per_s}


def _parts(first: dict[str, float], second: dict[str, float]) -> dict[str, tuple[float, float, float]]:
    """A part that only one run has took no time in the other."""
    if not first or not second:
        return {}
    pairs = {name: (first.get(name, 0.0), second.get(name, 0.0)) for name in dict.fromkeys([*first, *second])}
    pairs["a step"] = (sum(first.values()), sum(second.values()))
    return {name: (a, b, b - a) for name, (a, b) in pairs.items()}


def _settings(run: RunDir) -> dict[str, str]:
    """The last attempt's configuration with dotted keys; entries of a list of mappings are numbered from 0."""
    attempt = run.configured()
    if attempt is None:
        raise InputError(f"{run.path}: the run has no attempt yet, so there is nothing to compare")

    flat: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                walk(item, f"{path}.{index}")
        else:
            flat[path] = value if isinstance(value, str) else json.dumps(value)

    walk(asdict(from_yaml(read_text(attempt.config), str(attempt.config))), "")
    return flat
