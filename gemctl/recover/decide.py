"""What follows the end of an attempt: a pure function of how it ended, the attempts before it, and the budgets.

    history = History(read_log(run.supervisor_log), first=3)
    history.add(line)                                    # as each line is written
    decide(end, history, recover.budgets)                # Decision("restart") | "requeue" | "stop" | "give_up"

Each kind of end has a budget of its own, counted over all attempts of one submission: a supervisor that is started
again continues the count, a `gemctl resume` by hand starts a new one. An attempt without an end record lost its
supervisor together with its host, which counts as a preemption; so does one that SIGTERM ended if its submission is
started again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gemctl.config.schema import BudgetsConfig
from gemctl.errors import GemctlError
from gemctl.recover.cause import FINAL, Cause

Kind = Literal["preemption", "time_limit", "crash", "startup"]
MEANING: dict[Kind, str] = {
    "preemption": "its hosts were preempted or lost",
    "time_limit": "the scheduler's time limit was reached",
    "crash": "it failed after its first step",
    "startup": "it failed before its first step",
}
FAILURES = ("crash", "startup")  # could repeat forever at the same step

Outcome = Literal["finished", "stopped", "preempted", "failed", "killed"]


@dataclass(frozen=True)
class End:
    """How an attempt ended. `kind`: the budget that it is charged to, None for none; `signal`: the name of the signal
    that stopped it, None for a request; `error`: why the attempt could not be started at all."""

    outcome: Outcome
    step: int | None
    cause: Cause | None = None
    kind: Kind | None = None
    signal: str | None = None
    error: GemctlError | None = None


@dataclass(frozen=True)
class Decision:
    """What to do after an attempt.

    restart: start another attempt; with `check_hashes`, from a checkpoint whose files have all been hashed, since the
    ranks have just refused one. requeue: the scheduler starts the supervisor again, in a new job or on other hosts.
    stop: the run has ended as it was asked to. give_up: it failed; `refusal`: why it is not tried again.
    """

    action: Literal["restart", "requeue", "stop", "give_up"]
    refusal: str | None = None
    check_hashes: bool = False

    @property
    def again(self) -> bool:
        """True if another attempt follows."""
        return self.action in {"restart", "requeue"}


def failure_kind(cause: Cause, trained: bool) -> Kind:
    """The budget that a failure is charged to. `trained`: a rank had begun a step."""
    if cause.kind == "takeover":
        return "preemption"
    return "crash" if trained or cause.stage == "load" else "startup"  # what was to be loaded had been trained


class History:
    """How the attempts of one submission, those from number `first` on, have ended."""

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
        """Counts a line of supervisor.jsonl; lines of earlier submissions do not count."""
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
            self.distrusted[name] = f"attempt {line['attempt']} started from it and was not finite again"

    def _reach(self, step: int) -> bool:
        if step <= self._reached:
            return False
        self._reached, self.stuck = step, 0
        return True

    def refusal(self, kind: Kind, budgets: BudgetsConfig) -> str | None:
        """Why no attempt follows one that ended by `kind`: the exhausted budget. None if one follows."""
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
        """The kind of an attempt's end and what is left of its budgets, for people."""
        limit = getattr(budgets, kind)
        text = f"{kind}: {limit - self.spent[kind]} of recover.budgets.{kind}={limit} left"
        if kind in FAILURES and self.stuck:
            unmoved = budgets.no_progress - self.stuck
            text += f"; no newer checkpoint: {unmoved} of recover.budgets.no_progress={budgets.no_progress} left"
        return text


def decide(
    end: End, history: History, budgets: BudgetsConfig, *, stop_requested: bool = False, superseded: bool = False
) -> Decision:
    """What to do after `end`, which `history` already includes.

    `stop_requested`: a stop was requested by a signal or a request file; `superseded`: a higher attempt owns the run.
    """
    if end.outcome not in {"failed", "preempted"}:
        return Decision("stop")
    if end.error is not None:  # it could not be started: only lost hosts can be replaced
        return Decision("requeue" if end.kind == "preemption" else "give_up")
    if refusal := _refusal(end, history, budgets, stop_requested, superseded):
        return Decision("give_up", refusal)
    if end.outcome == "preempted":
        return Decision("requeue")
    return Decision("restart", check_hashes=end.cause is not None and end.cause.stage == "load")


def _refusal(end: End, history: History, budgets: BudgetsConfig, stop_requested: bool, superseded: bool) -> str | None:
    if superseded:
        return "another attempt owns the run"
    if end.cause is not None and end.cause.kind in FINAL:
        return FINAL[end.cause.kind]
    if stop_requested and end.outcome == "failed":
        return "it was asked to stop"
    return history.refusal(end.kind, budgets) if end.kind is not None else None


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
