"""The supervisor of a run: starts an attempt, watches it, decides what follows, and starts the next.

    gemctl train …        # runs it, in the foreground

Starting is gemctl/recover/start.py, watching watch.py with the cause of a failure from cause.py, and the decision, by
the budgets, decide.py. Ctrl-C, SIGTERM and SIGUSR1 ask the ranks to save at the end of their step and to exit; a second
Ctrl-C ends everything at once (signals.py).
"""

import dataclasses
import time
from typing import Any

from gemctl.config.schema import RecoverConfig
from gemctl.errors import TERMINATED, GemctlError, Interrupted
from gemctl.launchers.api import Agents
from gemctl.recover.context import Context, Follower, Prepared
from gemctl.recover.decide import MEANING, Decision, End, decide
from gemctl.recover.signals import StopSignals
from gemctl.recover.start import NotStarted, start
from gemctl.recover.watch import watch
from gemctl.run import requests
from gemctl.run.attempt import Attempt
from gemctl.run.base import distrusts
from gemctl.run.conclusion import describe, hint, saved_step
from gemctl.run.directory import RunDir


class RunFailed(GemctlError):
    """The run failed and its budgets allow no other attempt; the message has the root cause of the last one."""


class Requeue(Interrupted):
    """The run has saved and exited because its time limit is near, and its budget lets it continue in another job."""

    def __init__(self, message: str) -> None:
        super().__init__(message, TERMINATED)


def run_attempts(
    run: RunDir, number: int, prepared: Prepared, recover: RecoverConfig, agents: Agents, follower: Follower
) -> None:
    """Runs attempt `number` of the run, and others after failures as far as the budgets allow.

    Returns when the run has finished, or was stopped by a request. Raises RunFailed with the root cause; Interrupted
    after a Ctrl-C or SIGTERM to this process (exit code 130, 143); Requeue after a SIGUSR1 within its budget;
    InputError where the run has checkpoints and none of them can be used; what keeps the agents from starting.
    """
    with StopSignals() as signals:
        context = Context(run, prepared, recover, agents, follower, signals)
        _check_budgets(context)
        try:
            _run_attempts(context, number)
        finally:
            context.kill_agents()


def _run_attempts(context: Context, number: int) -> None:
    last: Attempt | None = None
    first_request, check_hashes = context.prepared.first_request, False
    while True:
        try:
            attempt = start(context, number, first_request, last, check_hashes)
            end = watch(context, attempt)
        except NotStarted as failure:
            attempt, end = failure.attempt, failure.end
        line = _end_line(context.run, attempt, end)
        context.history.add(line)
        wishes = requests.pending(context.run, attempt)
        decision = decide(
            end,
            context.history,
            context.recover.budgets,
            stop_requested=context.signals.reason is not None or any(wish.ends for wish in wishes),
            superseded=not attempt.owns_run(),
        )
        line |= {"again": decision.again, "refusal": decision.refusal}
        if decision.action != "restart":
            context.kill_agents()
            context.record_end(attempt, line)
            return _conclude(context, end, decision, line)
        context.record_end(attempt, line)
        if end.cause is not None and end.kind is not None:
            left = context.history.left(end.kind, context.recover.budgets)
            context.follower.note(f"{end.cause.text()}; trying again ({left})")
        last, number = attempt, number + 1
        first_request, check_hashes = attempt.claim().first_request + len(wishes), decision.check_hashes


def _check_budgets(context: Context) -> None:
    """Names the attempts of this submission that died with their supervisor. RunFailed if a budget is exhausted."""
    run, history, budgets = context.run, context.history, context.recover.budgets
    for kind in MEANING:
        if refusal := history.refusal(kind, budgets):
            raise RunFailed(f"run {run.run_id} is not restarted: {refusal}\n{hint(run)}")
    if history.lost:
        numbers = ", ".join(map(str, history.lost))
        left = history.left("preemption", budgets)
        context.follower.note(f"attempt {numbers} died with its supervisor; continuing ({left})")


def _end_line(run: RunDir, attempt: Attempt, end: End) -> dict[str, Any]:
    """What supervisor.jsonl and end.json record of an attempt's end. `saved`: steps in the newest checkpoint."""
    line: dict[str, Any] = {"event": "end", "attempt": attempt.number, "outcome": end.outcome, "time": time.time()}
    line |= {"step": end.step, "saved": saved_step(run) or 0, "kind": end.kind}
    if end.signal is not None:
        line["signal"] = end.signal
    if name := distrusts(run.attempts()):
        line["distrusts"] = name
    if end.cause is not None:
        line["cause"] = {**dataclasses.asdict(end.cause), "text": end.cause.text()}
    return line


def _conclude(context: Context, end: End, decision: Decision, line: dict[str, Any]) -> None:
    """Reports how the run ended, by an exception unless it finished or was stopped by a request."""
    if end.error is not None:
        raise end.error
    text = describe(context.run, line)
    if decision.action == "give_up":
        raise RunFailed(text)
    if decision.action == "requeue":
        raise Requeue(f"{text}\n{context.history.left('time_limit', context.recover.budgets)}")
    if end.outcome == "killed" or end.signal is not None:
        raise Interrupted(text, TERMINATED if end.signal == "SIGTERM" else Interrupted.exit_code)
    if end.outcome != "finished":
        context.follower.note(text)
