"""What the processes of an attempt record while they run, tailed: stages, exceptions, exits.

records = Records(attempt)
records.update()
records.ranks[1].stage, records.ranks[1].failure
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from gemctl.run.attempt import Attempt
from gemctl.run.files import LogTail

RANK_LOOK = 0.1  # seconds between reads of the ranks' logs
FILE_SECONDS = 0.001  # per file between reads of all: about what opening one costs on a shared file system


@dataclass
class RankRecord:
    """One rank. `failure`: the exception that it recorded; `exit`: how it exited, recorded by the agent. Times in these
    are by the writers' clocks."""

    rank: int
    host: str | None = None  # if the attempt has several hosts
    pid: int | None = None
    stage: str = "start"
    step: int | None = None
    failure: dict[str, Any] | None = None
    exit: dict[str, Any] | None = None
    result: str | None = None  # finished, stopped
    trained: bool = False  # a step has begun
    progress: float = field(default_factory=time.monotonic)  # when its last line was seen, on this process's clock
    ended: float | None = None  # when its exit was seen, on this process's clock

    @property
    def idle(self) -> float:
        """Seconds since the rank last recorded anything."""
        return time.monotonic() - self.progress

    def add(self, line: dict[str, Any]) -> None:
        """Takes in a line of the rank's own log."""
        self.progress = time.monotonic()
        self.stage, self.step = line["stage"], line["step"]
        self.trained |= line["stage"] == "step"
        if line["event"] == "fail":
            self.failure = self.failure or line
        elif line["event"] == "finish":
            self.result = line["result"]


@dataclass
class AgentRecord:
    """The agent of one host. `succeeded`: whether all its ranks did; None until they have ended."""

    node: int
    beat: bytes
    host: str | None = None
    succeeded: bool | None = None
    beats: bool = False  # a heartbeat has been seen
    sign: float = field(default_factory=time.monotonic)  # when its last line or heartbeat was seen

    @property
    def idle(self) -> float:
        """Seconds since the agent's last line or, while its ranks run, its last heartbeat."""
        return time.monotonic() - self.sign

    def text(self) -> str:
        """Its name in messages."""
        return f"node {self.node}" if self.host is None else f"host {self.host} (node {self.node})"


class Records:
    """The records of an attempt's agents and ranks."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        claim = attempt.claim()
        self.nodes = claim.nodes
        self._agent_tails = [LogTail(attempt.agent_log(node)) for node in range(claim.nodes)]
        self._rank_tails = [LogTail(attempt.rank_log(rank)) for rank in range(claim.nodes * claim.ranks_per_node)]
        self.agents = [AgentRecord(node, attempt.beat(node)) for node in range(claim.nodes)]
        self.ranks = [RankRecord(rank) for rank in range(len(self._rank_tails))]
        self.patience, self._heartbeat = claim.patience, claim.heartbeat
        self._looked_at = {"agents": float("-inf"), "ranks": float("-inf")}
        self.created = time.monotonic()
        self.failed_at: float | None = None  # when the first agent recorded that ranks failed
        self.agent_error: str | None = None  # the first error of an agent itself, and which agent's
        self.error_node = 0

    def update(self) -> None:
        """Reads all new lines."""
        self._looked_at = dict.fromkeys(self._looked_at, float("-inf"))
        self.look()

    def look(self) -> None:
        """Reads new lines where a read is due: agents' at each call, since they tell who has exited; ranks', which are
        many, every RANK_LOOK; with thousands of files, at a rate of one file per millisecond."""
        if self._due("agents", len(self.agents), 0.0):
            for agent, tail in zip(self.agents, self._agent_tails, strict=True):
                for line in tail.new():
                    agent.sign = time.monotonic()
                    self._add_agent_line(agent, line)
        if not self._due("ranks", len(self.ranks), RANK_LOOK):
            return
        for record, tail in zip(self.ranks, self._rank_tails, strict=True):
            for line in tail.new():
                record.add(line)
        # Once its ranks have exited, an agent has to record its end: a heartbeat alone is no progress.
        if self.failed_at is not None or any(record.exit is None for record in self.ranks):
            self._watch_beats()

    def _due(self, what: str, files: int, least: float) -> bool:
        now = time.monotonic()
        if now - self._looked_at[what] < max(least, files * FILE_SECONDS):
            return False
        self._looked_at[what] = now
        return True

    def _watch_beats(self) -> None:
        for agent in self.agents:
            beat = self.attempt.beat(agent.node)
            if beat != agent.beat:
                agent.beats, agent.beat, agent.sign = True, beat, time.monotonic()

    def _add_agent_line(self, agent: AgentRecord, line: dict[str, Any]) -> None:
        match line["event"]:
            case "agent":
                agent.host = line["host"]
            case "rank":
                record = self.ranks[line["rank"]]
                record.pid, record.progress = line["pid"], time.monotonic()
                record.host = agent.host if self.nodes > 1 else None
            case "exit":
                self.ranks[line["rank"]].exit = line
                self.ranks[line["rank"]].ended = time.monotonic()
            case "error":
                if self.agent_error is None:
                    self.agent_error, self.error_node = line["message"], agent.node
            case "end":
                agent.succeeded = line["ok"]
                if not line["ok"] and self.failed_at is None:
                    self.failed_at = time.monotonic()

    @property
    def ended(self) -> bool:
        """True when every agent has recorded that all its ranks have ended."""
        return self.ended_except(())

    def ended_except(self, lost: Collection[int]) -> bool:
        """The same of every agent except the `lost` ones."""
        return all(agent.succeeded is not None or agent.node in lost for agent in self.agents)

    @property
    def succeeded(self) -> bool:
        """True when all ranks of all agents succeeded."""
        return all(agent.succeeded for agent in self.agents)

    def silent(self) -> list[AgentRecord]:
        """Agents that watch ranks and have no heartbeat any more: their host or its network is lost.

        Agents that are about to be silent for as long are included, so that hosts lost together are named together.
        """
        beating = [agent for agent in self.agents if agent.succeeded is None and agent.beats]
        if not any(agent.idle > self.patience for agent in beating):
            return []
        return [agent for agent in beating if agent.idle > self.patience - 2 * self._heartbeat]

    @property
    def trained(self) -> bool:
        """True once a rank has begun a step, so that there is something to save."""
        return any(record.trained for record in self.ranks)

    @property
    def started(self) -> bool:
        """True once every rank has a process."""
        return all(record.pid is not None for record in self.ranks)

    @property
    def age(self) -> float:
        """Seconds since the attempt has been watched."""
        return time.monotonic() - self.created

    def stalled(self, seconds: float, closing: float) -> bool:
        """True if a rank that has not exited has recorded nothing for `seconds`; `closing`: once its work is done."""
        limits = ((record, seconds if record.result is None else closing) for record in self.ranks)
        return any(record.exit is None and record.idle > limit for record, limit in limits)

    def step(self) -> int | None:
        """The furthest step that a rank has reached."""
        return max((record.step for record in self.ranks if record.step is not None), default=None)
