"""The one supervisor of a run: starts its attempts, follows them, says why one failed, and starts the next.

    gemctl train …        # runs it, in the foreground

It decides from the attempt's own records (gemctl/recover/records.py): a rank that has died, a stage without a sign for
`recover.watchdog` seconds, an agent that has gone or stopped beating. Ctrl-C, SIGTERM and SIGUSR1 file a stop request,
which the ranks agree on at the end of their step; a second Ctrl-C ends everything at once (gemctl/recover/signals.py).
How often a run is brought back is counted by what ended its attempts (gemctl/recover/budgets.py).
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gemctl.config.schema import RecoverConfig
from gemctl.durable import create
from gemctl.errors import TERMINATED, GemctlError, InputError, Interrupted, TooFewHosts
from gemctl.launchers.api import Agents
from gemctl.recover.budgets import MEANING, History, Kind
from gemctl.recover.cause import FINAL, Cause, lost_hosts, root_cause
from gemctl.recover.records import Records
from gemctl.recover.signals import TIME_LIMIT, Asked
from gemctl.run import requests
from gemctl.run.attempt import Attempt, Base, claim
from gemctl.run.conclusion import describe, hint, saved_step
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, read_log
from gemctl.run.manifest import Checkpoint, check_file, check_size
from gemctl.run.rollback import distrusts, passed_over
from gemctl.run.selection import from_scratch, newest_verified

POLL = 0.02
AGENT_POLL = 0.2  # seconds between looks at what costs more: the agent's process, the attempts' folder
STARTUP = 60.0  # seconds, at least, until all ranks have a process: imports on a busy machine are no hang
KILL_GRACE = 3.0  # seconds an agent has to kill its ranks and say so before it is killed itself
FAIL_GRACE = 3.0  # seconds between a rank's own failure and its end


class Follower(Protocol):
    """What shows a run while it goes on."""

    def note(self, text: str) -> None: ...
    def follow(self, attempt: Attempt) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """What an attempt runs: its config.yaml and plan.json as text, and the ranks that the plan is for; `inputs`: its
    other files by name, as text.

    `first`: number of the first attempt of its submission; budgets count from there. `base`: what a preflight has
    verified just now for the first attempt to start from; without a checkpoint: what the user has told it to do.
    `first_request`: the first that nobody has looked at.
    """

    config: str
    plan: str
    nodes: int
    ranks_per_node: int
    first: int = 1
    base: Base | None = None
    first_request: int | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)


Outcome = Literal["finished", "stopped", "preempted", "failed", "killed"]


@dataclass(frozen=True)
class _End:
    """How an attempt ended. `kind`: the budget that it costs; None: it costs none, and is not tried again."""

    outcome: Outcome
    step: int | None
    cause: Cause | None = None
    kind: Kind | None = None
    signal: str | None = None  # what stopped it, if it was not a request


class RunFailed(GemctlError):
    """The run failed and no budget is left; the message has the root cause of its last attempt."""


class Requeue(Interrupted):
    """The run has saved and ended because its time is up, and its budget allows that it goes on in another job."""

    def __init__(self, message: str) -> None:
        super().__init__(message, TERMINATED)


def run_attempts(
    run: RunDir, number: int, prepared: Prepared, recover: RecoverConfig, agents: Agents, follower: Follower
) -> None:
    """Runs attempt `number` of the run, and others after failures as the budgets allow.

    Returns when the run has finished, or was stopped by a request. Raises RunFailed with the root cause, Interrupted
    after a Ctrl-C or SIGTERM to this process (exit code 130, 143), Requeue after a SIGUSR1 within its budget, or
    InputError where the run has checkpoints and must not go on without them unless told so.
    """
    _Supervisor(run, prepared, recover, agents, follower).run_from(number)


class _Supervisor:
    def __init__(
        self, run: RunDir, prepared: Prepared, recover: RecoverConfig, agents: Agents, follower: Follower
    ) -> None:
        self.run, self.prepared, self.recover, self.agents, self.follower = run, prepared, recover, agents, follower
        self.asked = Asked()
        self.next_request = 1  # the first that no attempt has seen
        self.reread = False  # ranks have just refused what they were to load
        self.history = History(read_log(run.supervisor_log), prepared.first)
        self.log = JsonLog(run.supervisor_log)

    def run_from(self, number: int) -> None:
        with self.asked:
            self._count_lost()
            try:
                attempt = self._start(number, None)
                while True:
                    end, records = self._follow(attempt)
                    end = dataclasses.replace(end, kind=self._kind(end, records))
                    line = self._line(attempt, end)
                    self.history.add(line)
                    refusal = self._refusal(attempt, end)
                    line |= {"again": end.outcome in {"failed", "preempted"} and refusal is None, "refusal": refusal}
                    if end.outcome != "failed" or refusal is not None:
                        self._kill_all()
                        self._record(attempt, line)
                        return self._conclude(end, line)
                    self._record(attempt, line)
                    self._say_again(end)
                    self.reread = end.cause is not None and end.cause.stage == "load"
                    attempt = self._start(attempt.number + 1, attempt)
            finally:
                self._kill_all()

    def _count_lost(self) -> None:
        """Says which attempts of this submission ended with their supervisor. RunFailed if a budget is spent."""
        for kind in MEANING:
            if refusal := self.history.refusal(kind, self.recover.budgets):
                raise RunFailed(f"run {self.run.run_id} is not brought back: {refusal}\n{hint(self.run)}")
        if self.history.lost:
            numbers = ", ".join(map(str, self.history.lost))
            left = self.history.left("preemption", self.recover.budgets)
            self.follower.note(f"attempt {numbers} ended with its supervisor; going on ({left})")

    def _start(self, number: int, last: Attempt | None) -> Attempt:
        """Takes the run with a new attempt, and hands it to the agents of its `last` one that live, or to new ones."""
        fresh = last is None or bool(self.agents.ended())
        if last is not None and fresh:
            self._kill_all()  # those that live belong to the dead ones; one that is out of reach finds no work
        attempt = claim(
            self.run.path,
            number,
            nodes=self.prepared.nodes,
            ranks_per_node=self.prepared.ranks_per_node,
            heartbeat=self.recover.heartbeat,
            owner=None if last is None or fresh else last.claim().owner,
            first_request=self.next_request if last is not None else self.prepared.first_request,
        )
        if fresh:
            self._start_agents(attempt)  # they import while the rest is made ready
        create(attempt.config, self.prepared.config)
        create(attempt.plan, self.prepared.plan)
        for name, text in self.prepared.inputs.items():
            create(attempt.path / name, text)
        try:
            base = self._base()
        except InputError as error:
            line = self._give_up(attempt, Cause("checkpoint", None, None, None, str(error), None))
            raise InputError(describe(self.run, line)) from error
        attempt.write_base(base)
        self._note_start(attempt, base)
        self.agents.submit(attempt)
        return attempt

    def _start_agents(self, attempt: Attempt) -> None:
        """What keeps them from starting is the attempt's end. It has no base, so it makes no checkpoint void."""
        try:
            self.agents.start(attempt)
        except GemctlError as error:
            hosts = isinstance(error, TooFewHosts)
            lost = isinstance(error, TooFewHosts) and error.lost
            cause = Cause("host" if hosts else "agent", None, None, None, str(error), None)
            self._give_up(attempt, cause, "preemption" if lost else "startup", lost)
            raise

    def _give_up(self, attempt: Attempt, cause: Cause, kind: Kind | None = None, again: bool = False) -> dict[str, Any]:
        """Ends an attempt that no rank has begun; what is written of it."""
        self._kill_all()
        self._note_start(attempt, Base(None, 0))
        line = self._line(attempt, _End("failed", None, cause, kind)) | {"again": again, "refusal": None}
        self.history.add(line)
        self._record(attempt, line)
        return line

    def _note_start(self, attempt: Attempt, base: Base) -> None:
        facts = dataclasses.asdict(base)
        line = {"event": "attempt", "attempt": attempt.number, "time": time.time(), **facts}
        self.history.add(line)
        self.log.write(line)
        self.log.sync()

    def _base(self) -> Base:
        """What the next attempt starts from. Its ranks hash what they load, each its share, so names and sizes are
        enough here, unless ranks have just refused some. InputError as newest_verified raises it."""
        given = self._given()

        def declined(found: Checkpoint) -> str | None:
            if given is not None and found.step >= given.step and found.path.name != given.checkpoint:
                return "was not whole when this was submitted"
            return self.history.distrusted.get(found.path.name)

        if given is not None and given.checkpoint is None:
            choice = from_scratch(self.run)
        else:
            choice = newest_verified(self.run, check_file if self.reread else check_size, declined)
        for reason in choice.passed_over if given is None else []:  # who gave it has said why
            self.follower.note(f"checkpoint passed over: {reason}")
        found = choice.checkpoint
        name, step = (found.path.name, found.step) if found is not None else (None, 0)
        left_alone = sorted({*choice.left_alone, *(given.left_alone if given is not None else [])})
        over = passed_over(self.run.attempts(), step)
        if over:
            self.follower.note(f"batches passed over, as a gradient was not finite: steps {', '.join(map(str, over))}")
        return Base(name, step, over, left_alone)

    def _given(self) -> Base | None:
        """What the submission has said, until an attempt of it has started from there."""
        own = [attempt for attempt in self.run.attempts() if attempt.number >= self.prepared.first]
        return None if any(attempt.started_from() for attempt in own) else self.prepared.base

    def _follow(self, attempt: Attempt) -> tuple[_End, Records]:
        """Waits for the attempt's end; whatever has to be killed is killed when this returns."""
        records = Records(attempt)
        return self._wait(attempt, records), records

    def _wait(self, attempt: Attempt, records: Records) -> _End:
        stopping = False
        looked = time.monotonic()
        while True:
            records.look()
            self.follower.follow(attempt)
            if records.ended:
                records.update()
                return self._judge(attempt, records, None)
            if self.asked.at_once or self._kill_wanted(attempt):
                return self._kill("killed", attempt, records)
            if not records.trained and self._stop_wanted(attempt):
                records.update()
                if not records.trained:
                    return self._kill("stopped", attempt, records)  # nothing that a save could keep
            if self.asked.reason is not None and not stopping:
                stopping = True
                if not self._wrote(self._ask_ranks):
                    return self._kill("killed", attempt, records)
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
            return self._stopped(attempt, records) if stopped else _End("finished", records.step())
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
        return _End("failed", None, Cause("agent", None, None, None, detail, attempt.in_run(attempt.agent_output(0))))

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
        if ended := self.agents.ended():
            records.update()  # what they said last
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
        # An agent that cannot start, or says why it failed, was not taken away, and would fail again.
        broken = any(records.agents[node].host is None for node in lost)
        if records.agent_error is not None and records.error_node in lost:
            broken, lost = True, lost | {records.error_node: records.agent_error}
        cause = lost_hosts(attempt, records, lost)
        if cause is None:
            return self._judge(attempt, records, None)
        return _End("failed", records.step(), cause, None if broken else "preemption")

    def _taken_over(self, records: Records) -> _End:
        self._kill_all()
        owner = self.run.attempts()[-1].number
        cause = Cause("takeover", None, None, None, f"attempt {owner} owns the run now; this one has ended", None)
        return _End("failed", records.step(), cause)

    def _kill(self, outcome: Literal["stopped", "killed"], attempt: Attempt, records: Records) -> _End:
        self._kill_all()
        stopped = self._stopped(attempt, records)
        return stopped if outcome == "stopped" else dataclasses.replace(stopped, outcome=outcome, kind=None)

    def _kill_all(self) -> None:
        left = self.agents.kill()
        if left:
            self.follower.note(f"processes that SIGKILL did not end: {', '.join(map(str, left))}")

    def _ask_ranks(self) -> None:
        if self.asked.reason is not None:
            requests.file(self.run, "stop", self.asked.reason.name)

    def _stops(self, attempt: Attempt) -> list[requests.Request]:
        return [wish for wish in requests.pending(self.run, attempt) if wish.ends]

    def _kill_wanted(self, attempt: Attempt) -> bool:
        return any(wish.kind == "kill" for wish in requests.pending(self.run, attempt))

    def _stop_wanted(self, attempt: Attempt) -> bool:
        return self.asked.reason is not None or bool(self._stops(attempt))

    def _stopped(self, attempt: Attempt, records: Records) -> _End:
        """The end of an attempt that has stopped: by a request of somebody's, or by a signal to this process or an
        agent. One that SIGTERM has ended goes on if the job of its submission is started again."""
        stops = self._stops(attempt)
        requested = any(stop.signal is None for stop in stops)
        name = self.asked.reason.name if self.asked.reason is not None else stops[0].signal if stops else None
        if requested and name not in {"SIGINT", "SIGTERM"}:
            name = None
        kind: Kind | None = "preemption" if name == "SIGTERM" and not requested else None
        if name == TIME_LIMIT.name:
            return _End("preempted", records.step(), kind="time_limit", signal=name)
        return _End("stopped", records.step(), kind=kind, signal=name)

    def _kind(self, end: _End, records: Records) -> Kind | None:
        """The budget that an end costs."""
        if end.cause is None or end.kind is not None:
            return end.kind
        if end.cause.kind == "takeover":
            return "preemption"
        return "crash" if records.trained or end.cause.stage == "load" else "startup"

    def _refusal(self, attempt: Attempt, end: _End) -> str | None:
        """Why there is no other attempt after a failed or preempted one; None: there is."""
        if end.kind is None or end.outcome not in {"failed", "preempted"}:
            return None
        if not attempt.owns_run():
            return "another one owns the run"
        if end.cause is not None and end.cause.kind in FINAL:
            return FINAL[end.cause.kind]
        self.next_request = attempt.claim().first_request + len(requests.pending(self.run, attempt))
        if end.outcome == "failed" and self._stop_wanted(attempt):
            return "it was asked to stop"
        return self.history.refusal(end.kind, self.recover.budgets)

    def _line(self, attempt: Attempt, end: _End) -> dict[str, Any]:
        """What supervisor.jsonl and end.json say of an attempt's end. `saved`: steps in the newest checkpoint."""
        line: dict[str, Any] = {"event": "end", "attempt": attempt.number, "outcome": end.outcome, "time": time.time()}
        line |= {"step": end.step, "saved": saved_step(self.run) or 0, "kind": end.kind}
        if end.signal is not None:
            line["signal"] = end.signal
        if name := distrusts(self.run.attempts()):
            line["distrusts"] = name
        if end.cause is not None:
            line["cause"] = {**dataclasses.asdict(end.cause), "text": end.cause.text()}
        return line

    def _record(self, attempt: Attempt, line: dict[str, Any]) -> None:
        facts = {key: value for key, value in line.items() if key not in {"event", "attempt", "outcome", "time"}}
        self._wrote(lambda: attempt.write_end(line["outcome"], **facts))
        self._wrote(lambda: self.log.write(line, last=True))

    def _wrote(self, write: Callable[[], object]) -> bool:
        """True if `write` could write. A full disk is said, and does not hide what else there is to say."""
        try:
            write()
        except OSError as error:
            self.follower.note(f"cannot be written: {error.filename}: {error.strerror}")
            return False
        return True

    def _say_again(self, end: _End) -> None:
        if end.cause is not None and end.kind is not None:
            left = self.history.left(end.kind, self.recover.budgets)
            self.follower.note(f"{end.cause.text()}; trying again ({left})")

    def _conclude(self, end: _End, line: dict[str, Any]) -> None:
        """Says how the run ended, by an exception if the user has to know."""
        text = describe(self.run, line)
        if end.outcome == "failed" or line["refusal"] is not None:
            raise RunFailed(text)
        if end.outcome == "preempted":
            raise Requeue(f"{text}\n{self.history.left('time_limit', self.recover.budgets)}")
        if end.outcome == "killed" or end.signal is not None:
            raise Interrupted(text, TERMINATED if end.signal == "SIGTERM" else Interrupted.exit_code)
        if end.outcome != "finished":
            self.follower.note(text)


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
