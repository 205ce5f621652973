"""What the processes of an attempt have recorded, followed while they write: stages, exceptions, ends.

records = Records(attempt)
records.update()
records.ranks[1].stage, records.ranks[1].failure
"""

import time
from dataclasses import dataclass, field
from typing import Any

from gemctl.run.attempt import Attempt
from gemctl.run.files import LogTail


@dataclass
class RankRecord:
    """One rank. `failure`: its own exception; `exit`: what the agent saw of its end; times are the writers' clocks."""

    rank: int
    pid: int | None = None
    stage: str = "start"
    step: int | None = None
    failure: dict[str, Any] | None = None
    exit: dict[str, Any] | None = None
    result: str | None = None  # finished, stopped
    trained: bool = False  # it has begun a step
    progress: float = field(default_factory=time.monotonic)  # when its last sign was seen, on this process's clock

    @property
    def idle(self) -> float:
        """Seconds since the rank's last sign."""
        return time.monotonic() - self.progress

    def add(self, line: dict[str, Any]) -> None:
        """A line of the rank's own log."""
        self.progress = time.monotonic()
        self.stage, self.step = line["stage"], line["step"]
        self.trained |= line["stage"] == "step"
        if line["event"] == "fail":
            self.failure = self.failure or line
        elif line["event"] == "finish":
            self.result = line["result"]


class Records:
    """All records of one attempt, of its agents and its ranks."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        claim = attempt.claim()
        self._agent_tails = [LogTail(attempt.agent_log(node)) for node in range(claim.nodes)]
        self._rank_tails = [LogTail(attempt.rank_log(rank)) for rank in range(claim.nodes * claim.ranks_per_node)]
        self.ranks = [RankRecord(rank) for rank in range(len(self._rank_tails))]
        self.patience = claim.patience
        self.created = self.agent_sign = time.monotonic()
        self._beat = attempt.beat()
        self.ended_agents: dict[int, bool] = {}  # node → did all its ranks end well
        self.agent_error: str | None = None

    def update(self) -> None:
        """Reads what is new."""
        for node, tail in enumerate(self._agent_tails):
            for line in tail.new():
                self.agent_sign = time.monotonic()
                self._add_agent_line(node, line)
        for record, tail in zip(self.ranks, self._rank_tails, strict=True):
            for line in tail.new():
                record.add(line)
        if any(record.exit is None for record in self.ranks):  # with nothing left to wait for, it has to say so
            self._watch_beat()

    def _watch_beat(self) -> None:
        beat = self.attempt.beat()
        if beat != self._beat:
            self._beat, self.agent_sign = beat, time.monotonic()

    def _add_agent_line(self, node: int, line: dict[str, Any]) -> None:
        match line["event"]:
            case "rank":
                self.ranks[line["rank"]].pid = line["pid"]
                self.ranks[line["rank"]].progress = time.monotonic()
            case "exit":
                self.ranks[line["rank"]].exit = line
            case "error":
                self.agent_error = self.agent_error or line["message"]
            case "end":
                self.ended_agents[node] = line["ok"]

    @property
    def ended(self) -> bool:
        """True when every agent has said that all its ranks have ended."""
        return len(self.ended_agents) == len(self._agent_tails)

    @property
    def trained(self) -> bool:
        """True once a rank has begun a step: there is something that a save could keep."""
        return any(record.trained for record in self.ranks)

    @property
    def started(self) -> bool:
        """True once every rank has a process."""
        return all(record.pid is not None for record in self.ranks)

    @property
    def age(self) -> float:
        """Seconds since the attempt began to be followed."""
        return time.monotonic() - self.created

    @property
    def agent_idle(self) -> float:
        """Seconds since an agent's last line or, while it has ranks, its last beat."""
        return time.monotonic() - self.agent_sign

    def stalled(self, seconds: float, closing: float) -> bool:
        """True if a rank whose process has not ended has given no sign for `seconds`, or `closing` once it was done."""
        limits = ((record, seconds if record.result is None else closing) for record in self.ranks)
        return any(record.exit is None and record.idle > limit for record, limit in limits)

    def step(self) -> int | None:
        """The furthest step that any rank has reached."""
        return max((record.step for record in self.ranks if record.step is not None), default=None)
