"""What the ranks of an attempt sent in a step, by axis and collective, beside what its plan says.

gemctl report RUN        # "Traffic"
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemctl.report.journal import Journal
from gemctl.run.files import read_whole


@dataclass(frozen=True)
class TrafficReport:
    """Calls, and bytes that one rank sends, per step. Counted: means over ranks and steps. Planned: the rank with most
    rows, at the data's mean lengths; None where the attempt has no plan, or none that says it."""

    axis: str
    collective: str
    calls: float
    bytes: float
    planned_calls: int | None
    planned_bytes: int | None


def traffic(journal: Journal) -> list[TrafficReport]:
    """Of all steps that the attempt's ledger tells of; empty if no rank sent anything."""
    steps, calls, sent = 0, defaultdict[tuple[str, str], float](float), defaultdict[tuple[str, str], float](float)
    for line in journal.ledger:
        counted = line.get("traffic", {"steps": 0, "sent": []})
        steps += counted["steps"]
        for axis, collective, count, size in counted["sent"]:
            calls[axis, collective] += count
            sent[axis, collective] += size
    planned = _planned(journal.attempt.plan)
    return [
        TrafficReport(axis, collective, calls[axis, collective] / steps, sent[axis, collective] / steps,
                      *planned.get((axis, collective), (None, None)))
        for axis, collective in sorted(calls)
    ]  # fmt: skip


def _planned(path: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """(calls, bytes) by axis and collective."""
    plan = read_whole(path)
    parts: list[dict[str, Any]] = [] if plan is None else plan.get("traffic", [])
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for part in parts:
        key = part["axis"], part["collective"]
        calls, size = found.get(key, (0, 0))
        found[key] = calls + part["messages"], size + part["bytes"]
    return found
