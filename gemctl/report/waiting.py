"""Which ranks a run's other ranks waited for, joined from what its attempts wrote (gemctl/train/stragglers.py).

stragglers(read_journals(run))
"""

from dataclasses import dataclass

from gemctl.report.journal import STARTUP, Journal, Line
from gemctl.run.rollup import worst_lost

ASIDE = (*STARTUP, "peak", "eval", "checkpoint_stall")  # of no step


@dataclass
class StragglerReport:
    """A rank that the others waited for. `ratio`: its own time over the others' in `steps` steps, most of it in
    `part`; `lost`: rank-seconds; `share`: of the rank-seconds of its attempt's steps."""

    attempt: int
    rank: int
    host: str | None
    first_step: int  # steps done when it was first named
    steps: int
    ratio: float
    part: str
    lost: float
    share: float


def stragglers(journals: list[Journal]) -> list[StragglerReport]:
    """Of all attempts, those that cost most first."""
    found = [report for journal in journals for report in _of(journal)]
    return sorted(found, key=lambda report: -report.lost)


def _of(journal: Journal) -> list[StragglerReport]:
    lines = [one for line in journal.ledger for one in line.get("stragglers", [])]
    seconds = sum(_step_seconds(line) for line in journal.ledger)
    ranks = dict.fromkeys(one["rank"] for one in lines)
    return [_join(journal, [one for one in lines if one["rank"] == rank], seconds) for rank in ranks]


def _step_seconds(line: Line) -> float:
    """Rank-seconds of an interval's steps."""
    parts: dict[str, list[float]] = line["parts"]
    return sum(stats[1] for name, stats in parts.items() if name not in ASIDE) * int(line["ranks"])


def _join(journal: Journal, lines: list[Line], seconds: float) -> StragglerReport:
    worst = max(lines, key=worst_lost)
    lost = sum(line["lost"] for line in lines)
    return StragglerReport(
        attempt=journal.attempt.number,
        rank=worst["rank"],
        host=worst["host"],
        first_step=min((line["step"] for line in journal.named if line["rank"] == worst["rank"]), default=0),
        steps=sum(line["steps"] for line in lines),
        ratio=sum(line["own"] for line in lines) / sum(line["others"] for line in lines),
        part=worst["part"],
        lost=lost,
        share=lost / seconds,
    )
