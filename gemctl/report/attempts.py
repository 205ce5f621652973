"""The attempts of a run: what each one wrote, which of its steps a later attempt repeated, and how it ended.

    for journal in read_journals(run):
        journal.metrics, journal.ledger

A later attempt starts from a checkpoint, so steps of earlier attempts beyond that checkpoint (`limit`) are repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gemctl.run import rollup
from gemctl.run.attempt import Attempt, Base
from gemctl.run.base import rolled_back
from gemctl.run.conclusion import cause_of
from gemctl.run.directory import RunDir
from gemctl.run.files import last_line, read_log

LAUNCH = ("agent_start", "agent_import", "fork")
STARTUP = (*LAUNCH, "import", "process_group", "build", "load", "first_batch", "first_step")
Line = dict[str, Any]


@dataclass
class Journal:
    """The metrics.jsonl and ledger.jsonl of an attempt. In a long one each line sums many (gemctl/run/rollup.py)."""

    attempt: Attempt
    limit: float
    metrics: Sequence[Line]
    ledger: Sequence[Line]
    named: Sequence[Line]  # reports of stragglers

    @property
    def ranks(self) -> int:
        claim = self.attempt.claim()
        return claim.nodes * claim.ranks_per_node

    def base(self) -> Base:
        """What the attempt started from; the start of the run if it did not get that far."""
        return self.attempt.started_from() or Base(None, 0)

    def base_step(self) -> int:
        """Steps done before the attempt."""
        return self.base().step

    def last_step(self) -> int:
        """Steps done at the end of the attempt, including those after its last line of metrics."""
        last = last_line(self.attempt.rank_log(0))
        entered = last["step"] if last is not None else None
        return max(self.base_step(), *(line["step"] for line in self.metrics[-1:]), entered or 0)

    def startup(self) -> dict[str, float]:
        """Seconds by start-up stage, from the claim of the attempt to the end of its first step.

        `agent_start`, `agent_import`: until the agent of node 0 runs and has imported torch (0 for an agent that
        served the previous attempt too); `fork`: until the rank processes exist; then the ranks' own stages, means over
        the ranks. Empty if no rank finished a step.
        """
        if not self.ledger:
            return {}
        first = self.ledger[0]
        claimed, forked = self.attempt.claim().time, first["time"] - first["wall"][1]
        seen = {event["event"]: event["time"] for event in read_log(self.attempt.agent_log(0))}
        edges = [claimed, seen.get("agent", claimed), seen.get("ready", claimed), forked]
        stages = dict(zip(LAUNCH, (max(0.0, stop - start) for start, stop in pairwise(edges)), strict=True))
        return stages | {name: first["parts"][name][1] for name in STARTUP[len(LAUNCH) :]}


def read_journals(run: RunDir) -> list[Journal]:
    """All claimed attempts, oldest first."""
    journals: list[Journal] = []
    limit = float("inf")
    for attempt in reversed([attempt for attempt in run.attempts() if attempt.claimed]):
        metrics, ledger = rollup.lines(attempt, limit)
        intervals = [line for line in ledger if line["kind"] == "interval"]
        named = [line for line in ledger if line["kind"] == "straggler"]
        journals.append(Journal(attempt, limit, metrics, intervals, named))
        if (base := attempt.started_from()) is not None:
            limit = min(limit, base.step)
    return journals[::-1]


@dataclass
class AttemptReport:
    """One attempt. Times are seconds since the epoch. If the supervisor started it after a failure, recovery took
    `recovery_s` + `first_step_s`."""

    number: int
    start: float
    end: float | None
    outcome: str  # finished, stopped, failed, killed, or "no end written" (running, or killed with its supervisor)
    cause: str | None
    host: str
    ranks: int
    base_step: int
    last_step: int
    redone: int  # steps that a later attempt repeated
    first_step_s: float | None  # from the claim to the end of the first step
    recovery_s: float | None  # from the end of the previous attempt, if the same supervisor started both
    passed_over: list[int]  # steps whose batches it skipped, as earlier attempts had been rolled back from them
    rolled_back: str | None  # why it dropped its steps since its last checkpoint


def attempt_reports(journals: list[Journal]) -> list[AttemptReport]:
    """All attempts, oldest first."""
    reports: list[AttemptReport] = []
    previous: tuple[tuple[str, int], float | None] | None = None  # supervisor and end of the previous attempt
    for journal in journals:
        rollback = rolled_back(journal.attempt)
        claim, end = journal.attempt.claim(), journal.attempt.end()
        supervisor = (claim.host, claim.pid)
        last = journal.last_step()
        ended = previous[1] if previous and previous[0] == supervisor else None
        reports.append(
            AttemptReport(
                number=journal.attempt.number,
                start=claim.time,
                end=end["time"] if end else None,
                outcome=end["outcome"] if end else "no end written",
                cause=cause_of(end),
                host=claim.host,
                ranks=journal.ranks,
                base_step=journal.base_step(),
                last_step=last,
                redone=int(last - max(journal.limit, journal.base_step())) if journal.limit < last else 0,
                first_step_s=sum(journal.startup().values()) or None,
                recovery_s=claim.time - ended if ended else None,
                passed_over=journal.base().passed_over,
                rolled_back=rollback.text() if rollback else None,
            )
        )
        previous = (supervisor, end["time"] if end else None)
    return reports
