"""What the supervisor of one run works with: the run, what its attempts execute, its agents, its log of attempts."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gemctl.config.schema import RecoverConfig
from gemctl.launchers.api import Agents
from gemctl.recover.decide import History
from gemctl.recover.signals import StopSignals
from gemctl.run.attempt import Attempt, Base
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, read_log


class Follower(Protocol):
    """Shows a run while it is running."""

    def note(self, text: str) -> None: ...
    def follow(self, attempt: Attempt) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """What an attempt executes: its config.yaml and plan.json as text, and the number of ranks that the plan is for;
    `inputs`: its other files, name → text.

    `first`: number of the first attempt of the submission; budgets are counted from there. `base`: what a preflight has
    just verified for the first attempt to start from; without a checkpoint: the user asked to start from step 0.
    `first_request`: the first request that nobody has handled.
    """

    config: str
    plan: str
    nodes: int
    ranks_per_node: int
    first: int = 1
    base: Base | None = None
    first_request: int | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)


class Context:
    """One run under supervision. `history`: its attempts as recorded in supervisor.jsonl."""

    def __init__(
        self,
        run: RunDir,
        prepared: Prepared,
        recover: RecoverConfig,
        agents: Agents,
        follower: Follower,
        signals: StopSignals,
    ) -> None:
        self.run, self.prepared, self.recover = run, prepared, recover
        self.agents, self.follower, self.signals = agents, follower, signals
        self.history = History(read_log(run.supervisor_log), prepared.first)
        self._log = JsonLog(run.supervisor_log)

    def record_start(self, attempt: Attempt, base: Base) -> None:
        """Records that the attempt starts, on disk when this returns."""
        line = {"event": "attempt", "attempt": attempt.number, "time": time.time(), **dataclasses.asdict(base)}
        self.history.add(line)
        self._log.write(line)
        self._log.sync()

    def record_end(self, attempt: Attempt, line: dict[str, Any]) -> None:
        """Records the attempt's end, which `history` includes already, in its end.json and in supervisor.jsonl."""
        facts = {key: value for key, value in line.items() if key not in {"event", "attempt", "outcome", "time"}}
        self.write(lambda: attempt.write_end(line["outcome"], **facts))
        self.write(lambda: self._log.write(line, last=True))

    def write(self, write: Callable[[], object]) -> bool:
        """Calls `write`; False if the system refused. A full disk is reported, and must not hide the cause."""
        try:
            write()
        except OSError as error:
            self.follower.note(f"cannot be written: {error.filename}: {error.strerror}")
            return False
        return True

    def kill_agents(self) -> None:
        """Kills all agents and their ranks; names the processes that survive."""
        if left := self.agents.kill():
            self.follower.note(f"processes that SIGKILL did not end: {', '.join(map(str, left))}")
