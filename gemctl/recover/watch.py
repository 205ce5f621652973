"""Watches one attempt until it has ended, ends it where it has to be, and returns how it ended.

    end = watch(context, attempt)      # End("failed", step, cause, "crash")

It reads what the attempt's agents and ranks record (gemctl/recover/records.py). An attempt ends when all agents say so;
when somebody stops it; when a rank makes no progress for `recover.watchdog` seconds; when an agent exits or has no
heartbeat; when another attempt takes over the run. No process of a failed attempt is left, but for agents that can
serve the next one.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from gemctl.recover.cause import Cause, lost_hosts, root_cause
from gemctl.recover.context import Context
from gemctl.recover.decide import End, Kind, failure_kind
from gemctl.recover.records import Records
from gemctl.recover.signals import TIME_LIMIT
from gemctl.run import requests
from gemctl.run.attempt import Attempt

POLL = 0.02
AGENT_POLL = 0.2  # seconds between checks that cost more: the agents' processes, the folder of attempts
STARTUP = 60.0  # seconds, at least, until all ranks have a process: imports on a busy machine are not a hang
KILL_GRACE = 3.0  # seconds an agent has to kill its ranks and record it before it is killed itself
FAIL_GRACE = 3.0  # seconds between a rank's own failure and its exit


def watch(context: Context, attempt: Attempt) -> End:
    """Waits for the attempt's end."""
    return Watch(context, attempt).run()


class Watch:
    def __init__(self, context: Context, attempt: Attempt) -> None:
        self.context, self.attempt = context, attempt
        self.records = Records(attempt)
        self._stopping = False
        self._checked = time.monotonic()

    def run(self) -> End:
        """Each check returns an end, or None while the attempt runs."""
        while True:
            self.records.look()
            self.context.follower.follow(self.attempt)
            if end := self.ended() or self.stopped() or self.hung() or self.lost():
                return end
            time.sleep(POLL)

    def ended(self) -> End | None:
        """All agents have said that their ranks have ended."""
        if not self.records.ended:
            return None
        self.records.update()
        return self._result()

    def stopped(self) -> End | None:
        """Somebody wants the attempt to end. Once a step has begun, the ranks are asked to save and then exit."""
        reason, wishes = self.context.signals.reason, self._requests()
        if self.context.signals.at_once or any(wish.kind == "kill" for wish in wishes):
            return self._kill_all("killed")
        if not self.records.trained and (reason is not None or any(wish.ends for wish in wishes)):
            self.records.update()
            if not self.records.trained:
                return self._kill_all("stopped")  # there is nothing to save
        if reason is not None and not self._stopping:
            self._stopping = True
            if not self.context.write(lambda: requests.file(self.context.run, "stop", reason.name)):
                return self._kill_all("killed")
            self.context.follower.note("stopping: the ranks save at the end of this step (Ctrl-C again kills them)")
        return None

    def hung(self) -> End | None:
        """The attempt makes no progress. Start-up, ranks and agents have limits of their own."""
        records, watchdog = self.records, self.context.recover.watchdog
        startup, silence = max(watchdog, STARTUP), max(watchdog, records.patience)
        if _peers_left_waiting(records):
            return self._kill_ranks(None)
        if not records.started:
            if records.age > startup:
                return self._agent_failed(_not_started(records, startup))
        elif records.nodes == 1 and records.agents[0].idle > silence:  # before the ranks, whose exits it records
            return self._agent_failed(f"the agent has shown no sign of life for {silence:.0f} s (recover.watchdog)")
        elif records.stalled(watchdog, silence):
            return self._kill_ranks(watchdog)
        if any(rank.failure and rank.exit is None and rank.idle > FAIL_GRACE for rank in records.ranks):
            return self._kill_ranks(None)  # a rank has recorded its failure and does not exit
        return None

    def lost(self) -> End | None:
        """Another attempt owns the run, or agents are gone before they said how their ranks ended."""
        if time.monotonic() - self._checked <= AGENT_POLL:
            return None
        self._checked = time.monotonic()
        if not self.attempt.owns_run():
            self.context.kill_agents()
            owner = self.context.run.attempts()[-1].number
            detail = f"attempt {owner} owns the run now; this one has ended"
            return self._failed(Cause("takeover", None, None, None, detail, None), self.records.step())
        lost = self._lost_agents()
        return self._agents_lost(lost) if lost else None

    def _lost_agents(self) -> dict[int, str]:
        """Agents that exited before they said how their ranks ended, or have no heartbeat: node → how."""
        records = self.records
        if exited := self.context.agents.ended():
            records.update()  # what they recorded last
        silent = records.silent() if records.nodes > 1 else []
        lost = {agent.node: f"no heartbeat from its agent for {records.patience:.0f} s" for agent in silent}
        return lost | {node: how for node, how in exited.items() if records.agents[node].succeeded is None}

    def _agents_lost(self, lost: dict[int, str]) -> End:
        """The end of an attempt that has lost agents; the others end their ranks first."""
        records = self.records
        if records.nodes == 1:
            self.context.kill_agents()
            records.update()
            records.agent_error = records.agent_error or lost[0]
            return self._result()
        self._order_kill("a host was lost", lambda: records.ended_except(lost))
        self.context.kill_agents()
        # An agent that cannot start, or recorded why it failed, was not taken away, and would fail again.
        broken = any(records.agents[node].host is None for node in lost)
        if records.agent_error is not None and records.error_node in lost:
            broken, lost = True, lost | {records.error_node: records.agent_error}
        cause = lost_hosts(self.attempt, records, lost)
        if cause is None:
            return self._result()
        return self._failed(cause, records.step(), None if broken else "preemption")

    def _result(self, hung_for: float | None = None) -> End:
        """The end of an attempt whose ranks have all ended; `hung_for`: seconds without progress, if it was a hang."""
        records = self.records
        if records.succeeded:
            if any(rank.result == "stopped" for rank in records.ranks):
                return self._stop_end()
            return End("finished", records.step())
        cause = root_cause(self.attempt, records.ranks, hung_for, records.agent_error, records.error_node)
        return self._failed(cause, cause.step if cause.step is not None else records.step())

    def _failed(self, cause: Cause, step: int | None, kind: Kind | None = None) -> End:
        return End("failed", step, cause, kind or failure_kind(cause, self.records.trained))

    def _agent_failed(self, detail: str) -> End:
        self.context.kill_agents()
        log = self.attempt.in_run(self.attempt.agent_output(0))
        return self._failed(Cause("agent", None, None, None, detail, log), None)

    def _kill_ranks(self, hung_for: float | None) -> End:
        """Has the agents dump the ranks' stacks and kill them."""
        reason = "hang" if hung_for is not None else "a rank failed and did not end"
        self._order_kill(reason, lambda: self.records.ended)
        if not self.records.ended:
            self.context.kill_agents()
        return self._result(hung_for)

    def _order_kill(self, reason: str, done: Callable[[], bool]) -> None:
        """Has the agents kill their ranks, and waits until `done` for as long as they may take."""
        ordered = self.context.write(lambda: self.attempt.order_kill(reason))
        deadline = time.monotonic() + (KILL_GRACE if ordered else 0)
        while not done() and time.monotonic() < deadline:
            time.sleep(POLL)
            self.records.update()

    def _kill_all(self, outcome: str) -> End:
        self.context.kill_agents()
        end = self._stop_end()
        return end if outcome == "stopped" else dataclasses.replace(end, outcome="killed", kind=None)

    def _stop_end(self) -> End:
        reason = self.context.signals.reason
        return stop_end(self._requests(), reason.name if reason is not None else None, self.records.step())

    def _requests(self) -> list[requests.Request]:
        return requests.pending(self.context.run, self.attempt)


def stop_end(wishes: Sequence[requests.Request], signal: str | None, step: int | None) -> End:
    """The end of an attempt that was stopped by `wishes`, of a user or of an agent that got a signal, or by the
    supervisor's own `signal`. After SIGTERM the run continues if its scheduler starts the job of its submission again:
    that is a preemption, unless somebody had asked for the stop."""
    stops = [wish for wish in wishes if wish.ends]
    requested = any(stop.signal is None for stop in stops)
    name = signal if signal is not None else stops[0].signal if stops else None
    if requested and name not in {"SIGINT", "SIGTERM"}:
        name = None
    if name == TIME_LIMIT.name:
        return End("preempted", step, kind="time_limit", signal=name)
    preempted = name == "SIGTERM" and not requested
    return End("stopped", step, kind="preemption" if preempted else None, signal=name)


def _not_started(records: Records, seconds: float) -> str:
    text = f"not all ranks were started within {seconds:.0f} s"
    missing = [str(agent.node) for agent in records.agents if agent.host is None]
    return text if not missing or records.nodes == 1 else f"{text}: no agent on nodes {', '.join(missing)}"


def _peers_left_waiting(records: Records) -> bool:
    """True if the ranks of a host have failed, and other hosts do not end theirs, or never started."""
    if records.failed_at is None:
        return False
    started = any(agent.host is not None and agent.succeeded is None for agent in records.agents)
    return time.monotonic() - records.failed_at > (records.patience + FAIL_GRACE if started else 0)
