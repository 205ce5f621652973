"""The root cause of a failed attempt: which rank failed first, why, and in which stage.

When one rank dies, the others soon fail because of it, and often record their failure first. So a signal that killed a
rank takes precedence over exceptions, a rank's own exception over "connection closed by peer", and in a hang the
culprit is the rank that waits for no other.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemctl.process import UNREPORTED
from gemctl.recover.records import RankRecord, Records
from gemctl.run.attempt import Attempt
from gemctl.run.rank_records import STAGES

# How a rank fails when another one has exited, or does not answer.
PEER_TYPES = {"DistNetworkError", "DistBackendError", "DistStoreError"}
PEER_MESSAGE = re.compile(
    r"closed by peer|reset by peer|connection refused|broken pipe|connectFullMesh|pair closure|socket timeout|"
    r"timed out waiting|wait timeout|recvValue failed|remote process exited|communicator was aborted",
    re.IGNORECASE,
)
# A save that fails on one rank raises on all ranks, with that rank in the message.
OTHER_RANK = re.compile(r"\brank (\d+): ")
FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
COLLECTIVE = re.compile(r"torch/distributed/(?!elastic/)|torchrec/distributed/(comm_ops|types|dist_data)\.py")
JOIN = re.compile(r"/(threading|queue|concurrent/futures/_base)\.py$")
MEMORY = re.compile(
    r"^(MemoryError|OutOfMemoryError)\b|out of memory|(can.?t|cannot|could not) allocate memory", re.IGNORECASE
)
EXCEPTION = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Interrupt|Exit): ")  # the last line of a traceback
NAMED = 8  # hosts or ranks listed in a message
GROUPS = 3  # groups of ranks in the same state listed in a message
LINES, LINE_BYTES = 5, 300  # quoted from a process's output
INNERMOST = 4  # frames of a thread searched for a collective


FINAL = {"policy": "train.nan=stop", "rows": "another attempt would see the same rows"}
"""Kinds of cause after which the run is not restarted → why."""


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed. `host`: of the rank, if the attempt has several hosts; `log`: the file with the rank's or
    the agent's output, relative to the run directory; `lines`: its last lines; `others`: what the other ranks were
    doing or waiting for.

    `kind`: signal, exception, exit, hang, peer (a rank lost its connection to another); policy, rows: an exception that
    would recur in another attempt (`FINAL`); agent, host, takeover, checkpoint: no rank is to blame.
    """

    kind: str
    rank: int | None
    stage: str | None
    step: int | None
    detail: str
    log: str | None
    host: str | None = None
    lines: list[str] = field(default_factory=list)
    others: str | None = None

    def text(self) -> str:
        """The cause in one line."""
        if self.rank is None:
            return self.detail
        where = f"in stage {self.stage}" + ("" if self.step is None else f", step {self.step}")
        on = "" if self.host is None else f" on {self.host}"
        return f"rank {self.rank}{on} failed first, {where}: {self.detail}"


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def text(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


Thread = list[Frame]  # innermost frame first


def root_cause(
    attempt: Attempt, ranks: Sequence[RankRecord], hung_for: float | None, agent: str | None, node: int = 0
) -> Cause:
    """The cause of a failed attempt. `hung_for`: seconds without progress, if it was killed for that.

    `agent`: the error that the agent of node `node` recorded of itself.
    """
    cause = _first_cause(attempt, ranks, hung_for, agent, node)
    if cause.rank is None:
        lines = _last_lines(attempt.agent_output(node))
        return dataclasses.replace(cause, lines=lines, detail=_explained(cause.detail, lines, attempt.path))
    stacks = _stacks(attempt, ranks) if cause.kind == "hang" else {}
    others = [record for record in ranks if record.rank != cause.rank]
    return dataclasses.replace(cause, lines=_last_lines(attempt.rank_output(cause.rank)), others=_doing(others, stacks))


def _first_cause(
    attempt: Attempt, ranks: Sequence[RankRecord], hung_for: float | None, agent: str | None, node: int
) -> Cause:
    own = [record for record in ranks if record.failure is not None and not _lost_peer(record.failure)]
    killed = [record for record in ranks if _signal(record)]
    silent = [record for record in ranks if record.failure is None and _exit_code(record)]
    lost = [record for record in ranks if record.failure is not None and _lost_peer(record.failure)]
    if killed:
        first = min(killed, key=_exit_time)
        return _of_rank(attempt, first, "signal", _killed_by(first))
    if own:
        first = _blamed(min(own, key=_failure_time), ranks)
        type_ = first.failure["type"] if first.failure is not None else ""
        kind = {"NanStop": "policy", "NothingLearned": "rows"}.get(type_, "exception")
        return _of_rank(attempt, first, kind, _exception(first))
    if silent:
        first = min(silent, key=_exit_time)
        return _of_rank(attempt, first, "exit", f"exit code {_exit_code(first)} without an exception")
    if hung_for is not None:
        return _hang(attempt, ranks, hung_for)
    if lost:
        first = min(lost, key=_failure_time)
        return _of_rank(attempt, first, "peer", f"{_exception(first)} (no rank failed before it)")
    detail = f"the agent failed: {agent}" if agent else f"the agent failed: {UNREPORTED}"
    return Cause("agent", None, None, None, detail, attempt.in_run(attempt.agent_output(node)))


def lost_hosts(attempt: Attempt, records: Records, lost: dict[int, str]) -> Cause | None:
    """The cause of an attempt that lost agents (node → how); None if a rank had failed on its own before."""
    agents = [records.agents[node] for node in sorted(lost)]
    last_sign = max(agent.sign for agent in agents)
    if any(_own_end(record) and (record.ended or 0) < last_sign for record in records.ranks):
        return None
    others = [agent for agent in agents if agent.node > 0]
    if len(agents) > len(others):  # node 0 hosts the store, so the others fall silent with it
        agents = [agents[0]]
    elif len(others) > 1 and len(others) == records.nodes - 1:  # all at once: node 0 is cut off
        agents = [records.agents[0]]
    named = ", ".join([agent.text() for agent in agents[:NAMED]] + ["…"] * (len(agents) > NAMED))
    how = lost.get(agents[0].node, f"no other host reaches it: {next(iter(lost.values()))}")
    log = attempt.agent_output(agents[0].node)
    detail = f"lost {named}: {how}"
    return Cause("host", None, None, None, detail, attempt.in_run(log), lines=_last_lines(log))


def _own_end(record: RankRecord) -> bool:
    """True if the rank's process failed on its own, not because it lost another rank."""
    failure = record.failure is None or not _lost_peer(record.failure)
    return failure and bool(_signal(record) or _exit_code(record))


def _of_rank(attempt: Attempt, record: RankRecord, kind: str, detail: str) -> Cause:
    log = attempt.in_run(attempt.rank_output(record.rank))
    return Cause(kind, record.rank, record.stage, record.step, detail, log, record.host)


def _lost_peer(failure: dict[str, Any]) -> bool:
    return failure["type"] in PEER_TYPES or PEER_MESSAGE.search(failure["message"]) is not None


def _exception(record: RankRecord) -> str:
    failure = record.failure or {"type": "unknown error", "message": ""}
    text = f"{failure['type']}: {failure['message']}".strip().removesuffix(":")
    return f"out of memory: {text}" if MEMORY.search(text) else text


def _killed_by(record: RankRecord) -> str:
    full = record.exit is not None and record.exit.get("out_of_memory", False)
    return f"killed by {_signal(record)}" + (", out of memory: the kernel counted an OOM kill" if full else "")


def _blamed(record: RankRecord, ranks: Sequence[RankRecord]) -> RankRecord:
    """The rank whose error `record` relays, or itself."""
    match = OTHER_RANK.search((record.failure or {}).get("message", ""))
    other = int(match[1]) if match else record.rank
    return ranks[other] if other < len(ranks) and ranks[other].failure else record


def _signal(record: RankRecord) -> str | None:
    """The signal that killed the rank, unless the agent sent it because another rank had failed."""
    return record.exit["signal"] if record.exit is not None and not record.exit["killed"] else None


def _left(record: RankRecord) -> bool:
    """True if the rank's process exited on its own."""
    return record.exit is not None and not record.exit["killed"]


def _exit_code(record: RankRecord) -> int:
    return (record.exit["code"] or 0) if record.exit is not None else 0


def _exit_time(record: RankRecord) -> float:
    return record.exit["time"] if record.exit is not None else 0.0


def _failure_time(record: RankRecord) -> float:
    return record.failure["time"] if record.failure is not None else 0.0


def _hang(attempt: Attempt, ranks: Sequence[RankRecord], seconds: float) -> Cause:
    stacks = _stacks(attempt, ranks)
    busy = [record for record in ranks if record.result is None] or [record for record in ranks if not _left(record)]
    culprit = hung_rank(busy or ranks, stacks)
    stack = stacks.get(culprit.rank)
    where = f"in {stack[0][0].text()}" if stack else "and did not answer a request for its stack"
    cause = _of_rank(attempt, culprit, "hang", f"no progress for {seconds:.0f} s, {where}")
    return dataclasses.replace(cause, log=attempt.in_run(attempt.rank_stack(culprit.rank))) if stack else cause


def _stacks(attempt: Attempt, ranks: Sequence[RankRecord]) -> dict[int, list[Thread]]:
    """Rank → its dumped stack."""
    files = {record.rank: attempt.rank_stack(record.rank) for record in ranks}
    return {
        rank: threads(file.read_text(encoding="utf-8", errors="replace"))
        for rank, file in files.items()
        if file.exists()
    }


def _explained(detail: str, lines: list[str], folder: Path) -> str:
    """Adds what is known about an agent that recorded no cause: its last exception, or that the disk is full."""
    if UNREPORTED not in detail:
        return detail
    if lines and EXCEPTION.match(lines[-1]):
        return detail.replace(UNREPORTED, lines[-1])
    disk = os.statvfs(folder)
    full = min(disk.f_bavail, disk.f_favail if disk.f_files else 1) <= 0
    return f"{detail} (the disk of {folder} is full)" if full else detail


def _last_lines(output: Path) -> list[str]:
    """The last lines that a rank or an agent printed."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - LINES * LINE_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line[:LINE_BYTES] for line in text.splitlines() if line.strip()][-LINES:]


def _doing(ranks: Sequence[RankRecord], stacks: dict[int, list[Thread]]) -> str | None:
    """What these ranks were doing, grouped; None if there are none."""
    groups: dict[str, list[int]] = {}
    for record in ranks:
        step = "" if record.step is None else f", step {record.step}"
        call = _waits_in(stacks.get(record.rank) or [[]])
        what = f"in stage {record.stage}{step}" + (f", waiting in {call}" if call else "")
        groups.setdefault(what, []).append(record.rank)
    largest = sorted(groups.items(), key=lambda group: -len(group[1]))
    texts = [f"{_ranks(numbers)} {what}" for what, numbers in largest[:GROUPS]]
    return "; ".join([*texts, "…"] if len(groups) > GROUPS else texts) or None


def _ranks(numbers: list[int]) -> str:
    named = ", ".join([*map(str, numbers[:NAMED]), "…"] if len(numbers) > NAMED else map(str, numbers))
    return f"rank {named}" if len(numbers) == 1 else f"ranks {named}"


def hung_rank(ranks: Sequence[RankRecord], stacks: dict[int, list[Thread]]) -> RankRecord:
    """The rank that the others wait for: one without a stack, else one that waits for no other rank, else the one that
    has made the least progress and has been silent longest."""

    def order(record: RankRecord) -> tuple[int, int, int, float]:
        stack = stacks.get(record.rank)
        answered = 0 if not stack else 2 if waits(stack) else 1
        return answered, -1 if record.step is None else record.step, STAGES.index(record.stage), -record.idle

    return min(ranks, key=order)


def waits(stack: list[Thread]) -> bool:
    """True if a process waits for other ranks: its main thread is in a collective, or joins a thread that is."""
    return _waits_in(stack) is not None


def _waits_in(stack: list[Thread]) -> str | None:
    """The collective that the process waits in; None if it waits for no other rank."""
    joined = any(JOIN.search(frame.file) for frame in stack[0][:INNERMOST])
    collectives = map(_collective, stack if joined else stack[:1])
    return next(filter(None, collectives), None)


def _collective(thread: Thread) -> str | None:
    return next((frame.function for frame in thread[:INNERMOST] if COLLECTIVE.search(frame.file)), None)


def threads(dump: str) -> list[Thread]:
    """The threads in a faulthandler dump, the current one first."""
    blocks = re.split(r"\n(?=Thread |Current thread )", dump)
    blocks.sort(key=lambda block: not block.startswith("Current"))
    parsed = [
        [Frame(match["file"], int(match["line"]), match["function"]) for match in FRAME.finditer(block)]
        for block in blocks
    ]
    return [thread for thread in parsed if thread]
