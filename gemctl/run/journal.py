"""The lines that each attempt of a run wrote, and which of them a later attempt made void.

    for journal in read_journals(run):
        journal.metrics, journal.ledger

What an attempt did past the checkpoint that a later one started from was done again: lines of steps > `limit`.
"""

from dataclasses import dataclass
from typing import Any

from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log

STARTUP = ("launch", "import", "process_group", "build", "load", "first_batch", "first_step")
Line = dict[str, Any]


@dataclass
class Journal:
    """One attempt's metrics.jsonl and ledger.jsonl."""

    attempt: Attempt
    limit: float
    metrics: list[Line]
    ledger: list[Line]

    @property
    def ranks(self) -> int:
        claim = self.attempt.claim()
        return claim.nodes * claim.ranks_per_node

    def base_step(self) -> int:
        """Steps that were done when the attempt began."""
        return self.attempt.base().step if self.attempt.base_file.exists() else 0

    def startup(self) -> dict[str, float]:
        """Mean seconds over the ranks by start-up stage; `launch`: from the claim to the start of the processes."""
        if not self.ledger:
            return {}
        first = self.ledger[0]
        launch = first["time"] - first["wall"][1] - self.attempt.claim().time
        return {"launch": max(0.0, launch)} | {name: first["parts"][name][1] for name in STARTUP[1:]}


def read_journals(run: RunDir) -> list[Journal]:
    """All attempts that were claimed, oldest first."""
    journals: list[Journal] = []
    limit = float("inf")
    for attempt in reversed([attempt for attempt in run.attempts() if attempt.claim_file.exists()]):
        journals.append(Journal(attempt, limit, read_log(attempt.metrics), read_log(attempt.ledger)))
        if attempt.base_file.exists():
            limit = min(limit, attempt.base().step)
    return journals[::-1]
