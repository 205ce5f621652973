"""How often a run is brought back: what ended its attempts, counted from the run's own records (supervisor.jsonl).

    history = History(read_log(run.supervisor_log), first=3)
    history.add(line)                                    # as each new line is written
    history.refusal("crash", recover.budgets)            # the budget that is spent, or None: try again

Each kind has a budget of its own, for all attempts of one submission: a supervisor that was brought back counts on, a
`gemctl resume` by hand counts anew. An attempt that nobody has ended lost its supervisor with its host: a preemption,
like one that SIGTERM has ended and whose submission goes on all the same.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from gemctl.config.schema import BudgetsConfig

Kind = Literal["preemption", "time_limit", "crash", "startup"]
MEANING: dict[Kind, str] = {
    "preemption": "its hosts were taken away or lost",
    "time_limit": "the scheduler's time limit came",
    "crash": "it failed after its first step",
    "startup": "it failed before its first step",
}
FAILURES = ("crash", "startup")  # what may come again for ever at the same place


class History:
    """What the attempts of one submission, those from number `first` on, have come to."""

    def __init__(self, lines: Sequence[dict[str, Any]], first: int) -> None:
        self._first = first
        self._open: set[int] = set()
        self._reached = -1  # the furthest step that was saved
        self.spent: Counter[str] = Counter()
        self.stuck = 0  # failures in a row without a newer checkpoint
        self.distrusted: dict[str, str] = {}  # name of a checkpoint → why no attempt starts from it
        for line in lines:
            self.add(line)
        self.lost = sorted(self._open)
        self.spent["preemption"] += len(self.lost)

    def add(self, line: dict[str, Any]) -> None:
        """A line of supervisor.jsonl; those of earlier submissions count nothing."""
        if line["event"] == "attempt" and line["attempt"] >= self._first:
            self._open.add(line["attempt"])
            self._reach(line["step"])
        elif line["event"] == "end" and line["attempt"] in self._open:
            self._open.discard(line["attempt"])
            self._end(line)

    def _end(self, line: dict[str, Any]) -> None:
        further = self._reach(line.get("saved", 0))
        kind = line.get("kind")
        if kind is not None:
            self.spent[kind] += 1
        if kind in FAILURES and not further:
            self.stuck += 1
        if name := line.get("distrusts"):
            self.distrusted[name] = f"attempt {line['attempt']} went on from it and was not finite again"

    def _reach(self, step: int) -> bool:
        if step <= self._reached:
            return False
        self._reached, self.stuck = step, 0
        return True

    def refusal(self, kind: Kind, budgets: BudgetsConfig) -> str | None:
        """Why there is no other attempt after one that ended by `kind`; None: there is."""
        limit = getattr(budgets, kind)
        if self.spent[kind] > limit:
            times = f", for the {_ordinal(limit + 1)} time" if limit else ""
            return f"{MEANING[kind]}{times}, and recover.budgets.{kind}={limit}"
        if kind in FAILURES and self.stuck > budgets.no_progress:
            return (
                f"{self.stuck} failures in a row left no newer checkpoint, and "
                f"recover.budgets.no_progress={budgets.no_progress}"
            )
        return None

    def left(self, kind: Kind, budgets: BudgetsConfig) -> str:
        """The kind of an attempt's end, and what is left of its budgets, for people."""
        limit = getattr(budgets, kind)
        text = f"{kind}: {limit - self.spent[kind]} of recover.budgets.{kind}={limit} left"
        if kind in FAILURES and self.stuck:
            unmoved = budgets.no_progress - self.stuck
            text += f"; no newer checkpoint: {unmoved} of recover.budgets.no_progress={budgets.no_progress} left"
        return text


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
