"""The lines that each attempt of a run wrote, and which of them a later attempt made void.

    for journal in read_journals(run):
        journal.metrics, journal.ledger

What an attempt did past the checkpoint that a later one started from was done again: lines of steps > `limit`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gemctl.run import rollup
from gemctl.run.attempt import Attempt, Base
from gemctl.run.directory import RunDir
from gemctl.run.files import last_line, read_log

LAUNCH = ("agent_start", "agent_import", "fork")
STARTUP = (*LAUNCH, "import", "process_group", "build", "load", "first_batch", "first_step")
Line = dict[str, Any]


@dataclass
class Journal:
    """One attempt's metrics.jsonl and ledger.jsonl; of a long one sums over many lines (gemctl/run/rollup.py)."""

    attempt: Attempt
    limit: float
    metrics: Sequence[Line]
    ledger: Sequence[Line]
    named: Sequence[Line]  # ranks that were found to be stragglers

    @property
    def ranks(self) -> int:
        claim = self.attempt.claim()
        return claim.nodes * claim.ranks_per_node

    def base(self) -> Base:
        """What the attempt started from; the start of the run where it has not come to say so."""
        return self.attempt.started_from() or Base(None, 0)

    def base_step(self) -> int:
        """Steps that were done when the attempt began."""
        return self.base().step

    def last_step(self) -> int:
        """Steps that were done when the attempt ended, those after its last line of metrics too."""
        said = last_line(self.attempt.rank_log(0))
        entered = said["step"] if said is not None else None
        return max(self.base_step(), *(line["step"] for line in self.metrics[-1:]), entered or 0)

    def startup(self) -> dict[str, float]:
        """Seconds by start-up stage, from the claim of the attempt to the end of the first step.

        `agent_start`, `agent_import`: until the agent of node 0 runs, and has imported (an agent that lives on from the
        attempt before has neither); `fork`: until the rank processes exist; then the ranks' own stages, means over the
        ranks. Empty if no rank got through its first step.
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
    """All attempts that were claimed, oldest first."""
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
