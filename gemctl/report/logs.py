"""The log lines of an attempt, from all its processes, merged by time: gemctl logs RUN.

    tail = AttemptTail(run, attempt, Selection(rank=None, merged=True))
    for line in tail.new(): …                       # all lines; called again, those that are new

Sources: the ranks' output with the times recorded by their agents (gemctl/run/rank_records.py), their stages and
exceptions (ranks/<n>.jsonl, without the stages of every step), process exits (agent-<node>.jsonl), training metrics,
and the supervisor's log. A source that cannot be read gives one line that says so; the others are still shown.
"""

import functools
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemctl.durable import open_file
from gemctl.errors import InputError
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import MOST_LINE, LogTail, last_lines_at, parse_line, read_log
from gemctl.run.rank_records import Times

QUIET_STAGES = (b'"stage": "step"', b'"stage": "data"')  # entered in every step


@dataclass(frozen=True)
class Line:
    """`source`: "rank 3", "agent 0", "supervisor", or "training": then `record` is a line of metrics or ledger.jsonl.

    `host`: of the source, if the attempt has several hosts.
    """

    time: float
    attempt: int
    source: str
    host: str | None
    text: str
    record: dict[str, Any] | None = None


@dataclass(frozen=True)
class Selection:
    """Which ranks: `rank`; all if `merged`; else the one that failed first, or rank 0. With `rank` there are no
    lines of other processes."""

    rank: int | None = None
    merged: bool = False
    tail: int | None = None  # read only the last lines of each source; the last ones overall are among them


class AttemptTail:
    """The lines of an attempt that `selection` selects, ordered by time."""

    def __init__(self, run: RunDir, attempt: Attempt, selection: Selection) -> None:
        self.attempt = attempt
        # The file of a rank grows once or twice per printed line.
        grown = None if selection.tail is None else 2 * selection.tail * attempt.claim().ranks_per_node
        self._times = Times(attempt, grown)
        self._hosts = _hosts(attempt)
        self._selection = selection
        self._sources: dict[str, Callable[[], Iterator[Line]]] = {}
        self._unreadable: set[str] = set()
        if selection.rank is None:
            self._sources["supervisor"] = _SupervisorTail(run, attempt).new
            self._sources["training"] = _MetricsTail(attempt, selection.tail).new

    def new(self) -> Iterator[Line]:
        """The lines since the last call."""
        self._times.update()
        self._add_sources()
        return heapq.merge(*(self._guarded(name) for name in self._sources), key=lambda line: line.time)

    def _add_sources(self) -> None:
        """Adds the sources whose files have appeared."""
        if self._selection.merged:
            ranks = sorted(int(path.stem) for path in self.attempt.ranks.glob("*.jsonl"))
        else:
            ranks = [self._chosen()]
        if self._selection.rank is None:
            for node in range(self.attempt.claim().nodes):
                self._add(f"agent {node}", functools.partial(_AgentTail, self.attempt, node, self._selection.tail))
        for rank in ranks:
            host = self._host_of(rank)
            self._add(
                f"rank {rank}",
                functools.partial(_RankTail, self.attempt, rank, host, self._times, self._selection.tail),
            )

    def _add(self, name: str, make: Callable[[], Any]) -> None:
        if name not in self._sources:
            self._sources[name] = make().new

    def _chosen(self) -> int:
        if self._selection.rank is not None:
            return self._selection.rank
        cause = (self.attempt.end() or {}).get("cause") or {}
        return int(cause.get("rank") or 0)

    def _host_of(self, rank: int) -> str | None:
        if rank not in self._hosts:
            self._hosts = _hosts(self.attempt)
        return self._hosts.get(rank)

    def _guarded(self, name: str) -> Iterator[Line]:
        if name in self._unreadable:
            return
        try:
            yield from self._sources[name]()
        except (OSError, InputError) as error:
            self._unreadable.add(name)
            yield Line(float("inf"), self.attempt.number, name, None, f"cannot be read: {error}")


def _hosts(attempt: Attempt) -> dict[int, str]:
    """The host of each rank, if there are several hosts."""
    found: dict[int, str] = {}
    nodes = attempt.claim().nodes
    for node in range(nodes if nodes > 1 else 0):
        host = "?"
        for line in read_log(attempt.agent_log(node)):
            host = line["host"] if line["event"] == "agent" else host
            if line["event"] == "rank":
                found[line["rank"]] = host
    return found


class _RankTail:
    """What a rank printed, and its stages."""

    def __init__(self, attempt: Attempt, rank: int, host: str | None, times: Times, tail: int | None) -> None:
        self._attempt, self._rank, self._host, self._times = attempt, rank, host, times
        self._printed = _Bytes(attempt.rank_output(rank), tail)
        self._stages = _Bytes(attempt.rank_log(rank), tail, QUIET_STAGES)
        self._said = ""

    def new(self) -> Iterator[Line]:
        return heapq.merge(self._new_printed(), self._new_stages(), key=lambda line: line.time)

    def _line(self, time: float, text: str) -> Line:
        return Line(time, self._attempt.number, f"rank {self._rank}", self._host, text)

    def _new_printed(self) -> Iterator[Line]:
        time = 0.0
        for offset, text in self._printed.lines(last=self._attempt.end_file.exists()):
            time = max(time, self._times.of(self._rank, offset) or self._printed.changed())
            yield self._line(time, text.decode(errors="replace"))

    def _new_stages(self) -> Iterator[Line]:
        for _, text in self._stages.lines(last=False):
            if _is_quiet(text, QUIET_STAGES):
                continue
            line = self._stages.parsed(text)
            if (said := _stage(line)) != self._said:  # a long stage is recorded repeatedly
                self._said = said
                yield self._line(line["time"], said)


def _stage(line: dict[str, Any]) -> str:
    at = f"stage {line['stage']}" + ("" if line["step"] is None else f", step {line['step']}")
    match line["event"]:
        case "fail":
            return f"failed in {at}: {line['type']}: {line['message']}"
        case "finish":
            return f"{line['result']} at step {line['step']}"
        case "start":
            return f"started as process {line['pid']}"
        case _:
            return at


class _Bytes:
    """The whole lines of a file that may still grow, or not exist yet."""

    def __init__(self, path: Path, tail: int | None = None, quiet: tuple[bytes, ...] = ()) -> None:
        self._path = path
        self._offset = 0 if tail is None else last_lines_at(path, tail, lambda line: not _is_quiet(line, quiet))

    def lines(self, last: bool) -> Iterator[tuple[int, bytes]]:
        """(end offset, line) of each new line. `last`: include an unterminated last line."""
        try:
            file = open_file(self._path)
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            while line := file.readline(MOST_LINE):  # longer lines are split
                if not line.endswith(b"\n") and len(line) < MOST_LINE and not last:
                    return
                self._offset += len(line)
                yield self._offset, line.rstrip(b"\r\n")

    def changed(self) -> float:
        """The file's modification time."""
        return self._path.stat().st_mtime

    def parsed(self, text: bytes) -> dict[str, Any]:
        return parse_line(text, f"{self._path}: before byte {self._offset}", self._path)


class _AgentTail:
    """What an agent records of itself and of its ranks' exits, and what it printed, at its file's modification time."""

    def __init__(self, attempt: Attempt, node: int, tail: int | None) -> None:
        self._attempt, self._node, self._host = attempt, node, None
        self._events = LogTail(attempt.agent_log(node))
        self._printed = _Bytes(attempt.agent_output(node), tail)

    def new(self) -> Iterator[Line]:
        return heapq.merge(self._new_events(), self._new_printed(), key=lambda line: line.time)

    def _line(self, time: float, text: str) -> Line:
        return Line(time, self._attempt.number, f"agent {self._node}", self._host, text)

    def _new_events(self) -> Iterator[Line]:
        for line in self._events.new():
            if (text := self._text(line)) is not None:
                yield self._line(line["time"], text)

    def _new_printed(self) -> Iterator[Line]:
        for _, text in self._printed.lines(last=self._attempt.end_file.exists()):
            yield self._line(self._printed.changed(), text.decode(errors="replace"))

    def _text(self, line: dict[str, Any]) -> str | None:
        match line["event"]:
            case "agent":
                self._host = line["host"] if self._attempt.claim().nodes > 1 else None
                return f"running on {line['host']} as process {line['pid']}"
            case "ready":
                return f"ready: imports took {line['seconds']:.1f} s"
            case "exit":
                return f"rank {line['rank']}: {_end(line)}"
            case "error":
                return f"failed: {line['message']}"
            case "superseded":
                return "exiting: another attempt owns the run"
        return None


def _end(line: dict[str, Any]) -> str:
    if line["killed"]:
        return "was killed by the agent"
    return f"killed by {line['signal']}" if line["signal"] else f"exit code {line['code']}"


class _MetricsTail:
    """The metrics of training and evaluation, and reports of stragglers."""

    def __init__(self, attempt: Attempt, tail: int | None) -> None:
        self._number = attempt.number
        self._metrics, self._ledger = (
            LogTail(path, 0 if tail is None else last_lines_at(path, tail))
            for path in (attempt.metrics, attempt.ledger)
        )

    def new(self) -> Iterator[Line]:
        late = (line for line in self._ledger.lines(with_text=b'"straggler"') if line["kind"] == "straggler")
        for line in heapq.merge(self._metrics.lines(), late, key=lambda line: float(line["time"])):
            yield Line(line["time"], self._number, "training", None, "", line)


def _is_quiet(line: bytes, quiet: tuple[bytes, ...]) -> bool:
    return b'"event": "stage"' in line and any(stage in line for stage in quiet)


class _SupervisorTail:
    """What the supervisor recorded about the attempt."""

    def __init__(self, run: RunDir, attempt: Attempt) -> None:
        self._number, self._log = attempt.number, LogTail(run.supervisor_log)

    def new(self) -> Iterator[Line]:
        for line in self._log.new():
            if line.get("attempt") == self._number and (text := _decision(line)) is not None:
                yield Line(line["time"], self._number, "supervisor", None, text)


def _decision(line: dict[str, Any]) -> str | None:
    match line["event"]:
        case "attempt":
            start = f"from {line['checkpoint']} (step {line['step']})" if line["checkpoint"] else "from the start"
            return f"attempt {line['attempt']} starts {start}"
        case "end":
            cause = line.get("cause")
            return f"attempt {line['attempt']} {line['outcome']}" + (f": {cause['text']}" if cause else "")
    return None
