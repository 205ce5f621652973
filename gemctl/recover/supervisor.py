"""The one supervisor of a run: starts its attempts, follows them, says why one failed, and starts the next.

    gemctl train …        # runs it, in the foreground

It decides from the attempt's own records (gemctl/recover/records.py): a rank that has died, a stage without a sign for
`recover.watchdog` seconds, an agent that has gone or stopped beating. The first Ctrl-C or SIGTERM files a stop request,
which the ranks agree on at the end of their step; a second one ends everything at once.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from gemctl.config.schema import RecoverConfig
from gemctl.errors import GemctlError, Interrupted
from gemctl.recover.cause import Cause, lost_hosts, root_cause
from gemctl.recover.records import Records
from gemctl.run import requests
from gemctl.run.attempt import Attempt, Base, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog
from gemctl.run.manifest import checkpoints, newest_verified

POLL = 0.02
AGENT_POLL = 0.2  # seconds between looks at what costs more: the agent's process, the attempts' folder
STARTUP = 60.0  # seconds, at least, until all ranks have a process: imports on a busy machine are no hang
KILL_GRACE = 3.0  # seconds an agent has to kill its ranks and say so before it is killed itself
FAIL_GRACE = 3.0  # seconds between a rank's own failure and its end


class Agents(Protocol):
    """What a launcher offers: the agents that serve the attempts of one run."""

    def start(self, attempt: Attempt) -> None: ...
    def submit(self, attempt: Attempt) -> None: ...
    def ended(self) -> dict[int, str]: ...  # node → how its agent ended
    def kill(self) -> list[int]: ...


class Follower(Protocol):
    """What shows a run while it goes on."""

    def note(self, text: str) -> None: ...
    def follow(self, attempt: Attempt) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """What an attempt runs: its config.yaml and plan.json as text, and the ranks that the plan is for."""

    config: str
    plan: str
    nodes: int
    ranks_per_node: int


@dataclass(frozen=True)
class _End:
    outcome: Literal["finished", "stopped", "failed", "killed"]
    step: int | None
    cause: Cause | None = None


class RunFailed(GemctlError):
    """The run failed and no budget is left; `cause` is the root cause of its last attempt."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause = cause


def run_attempts(
    run: RunDir, number: int, prepared: Prepared, recover: RecoverConfig, agents: Agents, follower: Follower
) -> None:
    """Runs attempt `number` of the run, and others after failures as the budgets allow.

    Returns when the run has finished, or was stopped by a request. Raises RunFailed with the root cause, or
    Interrupted after a Ctrl-C or SIGTERM to this process.
    """
    _Supervisor(run, prepared, recover, agents, follower).run_from(number)


class _Supervisor:
    def __init__(
        self, run: RunDir, prepared: Prepared, recover: RecoverConfig, agents: Agents, follower: Follower
    ) -> None:
        self.run, self.prepared, self.recover, self.agents, self.follower = run, prepared, recover, agents, follower
        self.interrupts = 0
        self.log = JsonLog(run.supervisor_log)

    def run_from(self, number: int) -> None:
        spent = 0
        with _interrupts(self._interrupted):
            try:
                attempt = self._start(number, owner=None)
                while True:
                    end = self._follow(attempt)
                    again = end.outcome == "failed" and self._may_retry(attempt, spent)
                    if not again:
                        self._kill_all()
                    self._record(attempt, end)
                    if not again:
                        return self._conclude(end)
                    spent += 1
                    self._say_again(end, spent)
                    attempt = self._start(attempt.number + 1, owner=attempt.claim().owner)
            finally:
                self._kill_all()

    def _start(self, number: int, owner: str | None) -> Attempt:
        """Takes the run with a new attempt, and hands it to the agents that live or to new ones."""
        attempt = claim(
            self.run.path,
            number,
            nodes=self.prepared.nodes,
            ranks_per_node=self.prepared.ranks_per_node,
            heartbeat=self.recover.heartbeat,
            owner=owner,
        )
        if owner is None or self.agents.ended():
            if owner is not None:
                self._kill_all()  # those that live belong to the dead ones
            self.agents.start(attempt)  # they import while the rest is made ready
        attempt.config.write_text(self.prepared.config)
        attempt.plan.write_text(self.prepared.plan)
        base = self._base()
        attempt.write_base(base)
        self.log.write({"event": "attempt", "attempt": number, "time": time.time(), **dataclasses.asdict(base)})
        self.agents.submit(attempt)
        return attempt

    def _base(self) -> Base:
        checkpoint, refused = newest_verified(self.run)
        for reason in refused:
            self.follower.note(f"checkpoint passed over: {reason}")
        if checkpoint is None:
            return Base(None, 0)
        return Base(checkpoint.path.name, checkpoint.step)

    def _follow(self, attempt: Attempt) -> _End:
        """Waits for the attempt's end; whatever has to be killed is killed when this returns."""
        records = Records(attempt)
        stopping = False
        looked = time.monotonic()
        while True:
            records.update()
            self.follower.follow(attempt)
            if records.ended:
                return self._judge(attempt, records, None)
            if self.interrupts > 1:
                return self._kill("killed", records)
            if not records.trained and self._stop_wanted(attempt):
                return self._kill("stopped", records)  # nothing that a save could keep
            if self.interrupts == 1 and not stopping:
                stopping = True
                if not self._wrote(lambda: requests.file(self.run, "stop")):
                    return self._kill("killed", records)
                self.follower.note("stopping: the ranks save at the end of this step (Ctrl-C again ends them at once)")
            if hang := self._hang(attempt, records):
                return hang
            if _lingering(records):
                return self._end_ranks(attempt, records, None)
            if time.monotonic() - looked > AGENT_POLL:
                looked = time.monotonic()
                if not attempt.owns_run():
                    return self._taken_over(records)
                if lost := self._lost(records):
                    return self._without_agents(attempt, records, lost)
            time.sleep(POLL)

    def _judge(self, attempt: Attempt, records: Records, hung_for: float | None) -> _End:
        if records.well:
            stopped = any(record.result == "stopped" for record in records.ranks)
            return _End("stopped" if stopped else "finished", records.step())
        cause = root_cause(attempt, records.ranks, hung_for, records.agent_error, records.error_node)
        return _End("failed", cause.step if cause.step is not None else records.step(), cause)

    def _hang(self, attempt: Attempt, records: Records) -> _End | None:
        """The end of an attempt that makes no progress; None if it does. Each part has its own limit."""
        watchdog = self.recover.watchdog
        startup, silence = max(watchdog, STARTUP), max(watchdog, records.patience)
        if _left_waiting(records):
            return self._end_ranks(attempt, records, None)
        if not records.started:
            late = records.age > startup
            return self._blame_agent(attempt, _not_started(records, startup)) if late else None
        if records.nodes == 1 and records.agents[0].idle > silence:  # before the ranks: their ends are its to tell
            return self._blame_agent(attempt, f"the agent has given no sign for {silence:.0f} s (recover.watchdog)")
        return self._end_ranks(attempt, records, watchdog) if records.stalled(watchdog, silence) else None

    def _blame_agent(self, attempt: Attempt, detail: str) -> _End:
        self._kill_all()
        return _End("failed", None, Cause("agent", None, None, None, detail, str(attempt.agent_output(0))))

    def _end_ranks(self, attempt: Attempt, records: Records, hung_for: float | None) -> _End:
        """Has the agents dump the ranks' stacks and kill them."""
        reason = "hang" if hung_for is not None else "a rank failed and did not end"
        self._order_kill(attempt, records, reason, lambda: records.ended)
        if not records.ended:
            self._kill_all()
        return self._judge(attempt, records, hung_for)

    def _order_kill(self, attempt: Attempt, records: Records, reason: str, ended: Callable[[], bool]) -> None:
        """Has the agents kill their ranks, and waits for as long as they may take until `ended`."""
        ordered = self._wrote(lambda: attempt.order_kill(reason))
        deadline = time.monotonic() + (KILL_GRACE if ordered else 0)
        while not ended() and time.monotonic() < deadline:
            time.sleep(POLL)
            records.update()

    def _lost(self, records: Records) -> dict[int, str]:
        """Agents that ended before they had said what became of their ranks, or whose host is silent: node → how."""
        ended = self.agents.ended()
        records.update()
        silent = records.silent() if records.nodes > 1 else []
        lost = {agent.node: f"no sign of its agent for {records.patience:.0f} s" for agent in silent}
        return lost | {node: how for node, how in ended.items() if records.agents[node].well is None}

    def _without_agents(self, attempt: Attempt, records: Records, lost: dict[int, str]) -> _End:
        """The end of an attempt that has lost agents; those that live end their ranks first."""
        if records.nodes == 1:
            self._kill_all()
            records.update()
            records.agent_error = records.agent_error or lost[0]
            return self._judge(attempt, records, None)
        self._order_kill(attempt, records, "a host was lost", lambda: records.ended_but(lost))
        self._kill_all()
        cause = lost_hosts(attempt, records, lost)
        return self._judge(attempt, records, None) if cause is None else _End("failed", records.step(), cause)

    def _taken_over(self, records: Records) -> _End:
        self._kill_all()
        owner = self.run.attempts()[-1].number
        cause = Cause("takeover", None, None, None, f"attempt {owner} owns the run now; this one has ended", None)
        return _End("failed", records.step(), cause)

    def _kill(self, outcome: Literal["stopped", "killed"], records: Records) -> _End:
        self._kill_all()
        return _End(outcome, records.step())

    def _kill_all(self) -> None:
        left = self.agents.kill()
        if left:
            self.follower.note(f"processes that SIGKILL did not end: {', '.join(map(str, left))}")

    def _stop_wanted(self, attempt: Attempt) -> bool:
        return self.interrupts > 0 or any(wish.kind == "stop" for wish in requests.pending(self.run, attempt))

    def _may_retry(self, attempt: Attempt, spent: int) -> bool:
        """A crash is tried again within its budget; one before the first step would only come again."""
        records = Records(attempt)
        records.update()
        wanted = attempt.owns_run() and not self._stop_wanted(attempt)
        return wanted and records.trained and spent < self.recover.budgets.crash

    def _record(self, attempt: Attempt, end: _End) -> None:
        facts: dict[str, Any] = {"step": end.step}
        if end.cause is not None:
            facts["cause"] = {**dataclasses.asdict(end.cause), "text": end.cause.text()}
        line = {"event": "end", "attempt": attempt.number, "outcome": end.outcome, "time": time.time(), **facts}
        self._wrote(lambda: attempt.write_end(end.outcome, **facts))
        self._wrote(lambda: self.log.write(line, last=True))

    def _wrote(self, write: Callable[[], object]) -> bool:
        """True if `write` could write. A full disk is said, and does not hide what else there is to say."""
        try:
            write()
        except OSError as error:
            self.follower.note(f"cannot be written: {error.filename}: {error.strerror}")
            return False
        return True

    def _say_again(self, end: _End, spent: int) -> None:
        budget = self.recover.budgets.crash
        self.log.write({"event": "budget", "kind": "crash", "spent": spent, "of": budget, "time": time.time()})
        cause = end.cause.text() if end.cause is not None else "it failed"
        self.follower.note(f"{cause}; trying again ({spent} of recover.budgets.crash={budget})")

    def _conclude(self, end: _End) -> None:
        """Says how the run ended, by an exception if the user has to know."""
        newest = next((found for found in checkpoints(self.run) if found.flaw is None), None)
        saved = "no checkpoint: from the start" if newest is None else f"from step {newest.step}"
        hint = f"go on ({saved}): gemctl resume {reference(self.run)}"
        if end.outcome == "failed" and end.cause is not None:
            log = f"\nlog: {_short(Path(end.cause.log))}" if end.cause.log else ""
            raise RunFailed(f"run {self.run.run_id} failed: {end.cause.text()}{log}\n{hint}", end.cause)
        if end.outcome == "killed":
            raise Interrupted(f"run {self.run.run_id} was ended at once\n{hint}")
        if end.outcome == "stopped":
            done = "before its first step" if end.step is None else f"at step {end.step}, saved"
            message = f"run {self.run.run_id} stopped {done}\n{hint}"
            if self.interrupts:
                raise Interrupted(message)
            self.follower.note(message)

    def _interrupted(self) -> None:
        self.interrupts += 1


@contextlib.contextmanager
def _interrupts(count: Callable[[], None]) -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM only call `count`."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: count()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _not_started(records: Records, seconds: float) -> str:
    text = f"not all ranks were started within {seconds:.0f} s"
    missing = [str(agent.node) for agent in records.agents if agent.host is None]
    return text if not missing or records.nodes == 1 else f"{text}: no agent of nodes {', '.join(missing)}"


def _left_waiting(records: Records) -> bool:
    """True if the ranks of a host have failed, and other hosts live and do not end theirs, or have never come."""
    if records.failed_at is None:
        return False
    came = any(agent.host is not None and agent.well is None for agent in records.agents)
    return time.monotonic() - records.failed_at > (records.patience + FAIL_GRACE if came else 0)


def _lingering(records: Records) -> bool:
    """True if a rank has said that it failed and yet does not end."""
    return any(record.failure and record.exit is None and record.idle > FAIL_GRACE for record in records.ranks)


def reference(run: RunDir) -> str:
    """How a user names the run from where they are: its id if it lies below ./runs, else its path."""
    return run.run_id if run.path.parent.parent == Path("runs").absolute() else _short(run.path)


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
