"""Sums of many lines of an attempt's metrics.jsonl and ledger.jsonl, so that reports of long runs stay fast.

    rollup = Rollup(attempt.rollup)                         # rank 0, while it trains: a line every EVERY intervals
    rollup.add("metrics", line); rollup.add("ledger", line); rollup.interval_done(metrics_bytes, ledger_bytes)
    metrics, ledger = lines(attempt, limit)                 # for a report: sums, and single lines where it needs them

A sum has the format of its lines: seconds, counts and bytes are added; state (step, tasks, memory) is that of the last
line. An attempt's first interval, which includes its start-up, is never added to others. Lines after the last sum are
summed as they are read, as in a run without rollup.jsonl; if step `limit` is inside a sum, its lines are read singly.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemctl.run.attempt import Attempt
from gemctl.run.files import JsonLog, LogTail

EVERY = 100  # intervals
LARGE = 4 << 20  # bytes of a ledger without rollup.jsonl from which on it is summed as it is read

Line = dict[str, Any]
COUNTS = ("examples", "tokens", "flops", "seconds", "skipped", "spikes", "passed_over")
BY_NAME = ("unknown_ids", "uncounted")  # counts by table, by task
MEETING = ("lost", "steps", "own", "others")  # of a straggler


class Sums:
    """The lines added since the last `take`, summed into as few lines as possible."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.intervals = 0
        self._train: Line | None = None
        self._interval: Line | None = None
        self._others: dict[str, list[Line]] = {"metrics": [], "ledger": []}

    def add(self, file: str, line: Line) -> None:
        """Adds a line of `file`: "metrics" or "ledger"."""
        if line["kind"] == "train":
            self._train = line if self._train is None else _train(self._train, line)
        elif line["kind"] == "interval":
            self._interval = line if self._interval is None else _interval(self._interval, line)
            self.intervals += 1
        else:  # evaluations, stragglers: few
            self._others[file].append(line)

    def fits(self, line: Line) -> bool:
        """False for an interval without a line of metrics, such as an attempt's last: the two lines of a sum must have
        the same time."""
        return line["kind"] != "interval" or self._train is None or self._train["time"] == line["time"]

    def take(self) -> tuple[list[Line], list[Line]]:
        """The lines of metrics and of the ledger."""
        metrics = [*self._others["metrics"], *([self._train] if self._train else [])]
        ledger = [*self._others["ledger"], *([self._interval] if self._interval else [])]
        self._clear()
        return metrics, ledger


class Rollup:
    """Writes an attempt's sums; there is one writer."""

    def __init__(self, path: Path) -> None:
        self._log, self._sums, self._first = JsonLog(path), Sums(), True
        self.add = self._sums.add

    def interval_done(self, metrics_bytes: int, ledger_bytes: int) -> None:
        """An interval's lines are in both files, which now have these lengths."""
        if self._first or self._sums.intervals >= EVERY:
            metrics, ledger = self._sums.take()
            self._log.write({"metrics": metrics, "ledger": ledger, "read": [metrics_bytes, ledger_bytes]})
        self._first = False

    def close(self) -> None:
        self._log.sync()
        self._log.close()


def lines(attempt: Attempt, limit: float) -> tuple[list[Line], list[Line]]:
    """The lines of an attempt's metrics.jsonl and ledger.jsonl, or sums that do not span step `limit`."""
    rollup, metrics, ledger = attempt.rollup, attempt.metrics, attempt.ledger
    found: tuple[list[Line], list[Line]] = ([], [])
    begin, before = [0, 0], 0
    summed = rollup.exists() or (ledger.exists() and ledger.stat().st_size > LARGE)
    for line in LogTail(rollup).lines():
        last = max([before, *(one["step"] for one in line["metrics"] if one["kind"] == "train")])
        parts = line["metrics"], line["ledger"]
        if before < limit < last:
            parts = _between(metrics, ledger, begin, line["read"])
        for own, part in zip(found, parts, strict=True):
            own.extend(part)
        begin, before = line["read"], last
    for parts in _summed(metrics, ledger, begin, limit) if summed else [_between(metrics, ledger, begin)]:
        for own, part in zip(found, parts, strict=True):
            own.extend(part)
    return found


def _between(
    metrics: Path, ledger: Path, begin: list[int], end: list[int] | None = None
) -> tuple[list[Line], list[Line]]:
    """The lines between these byte offsets."""
    ends = (None, None) if end is None else tuple(end)
    files = zip((metrics, ledger), begin, ends, strict=True)
    found: list[list[Line]] = [[*LogTail(path, at).lines(to)] for path, at, to in files]
    return found[0], found[1]


def _summed(metrics: Path, ledger: Path, begin: list[int], limit: float) -> Iterator[tuple[list[Line], list[Line]]]:
    """Sums of the lines after these byte offsets, none of which spans step `limit`."""
    files = (_timed("metrics", LogTail(metrics, begin[0])), _timed("ledger", LogTail(ledger, begin[1])))
    merged = heapq.merge(*files, key=lambda item: item[0])  # of an interval's two lines, the metrics' first
    sums, first, before = Sums(), begin == [0, 0], 0
    for _, file, line in merged:
        if before <= limit < line["step"] or not sums.fits(line):
            yield sums.take()
        before = max(before, line["step"])
        sums.add(file, line)
        if line["kind"] == "interval" and (first or sums.intervals >= EVERY):
            yield sums.take()
            first = False
    yield sums.take()


def _timed(file: str, tail: LogTail) -> Iterator[tuple[float, str, Line]]:
    for line in tail.lines():
        yield line["time"], file, line


def _train(total: Line, line: Line) -> Line:
    """The sum of two lines of training."""
    both = {name: total.get(name, 0) + line.get(name, 0) for name in COUNTS}
    count = total.get("lines", 1) + line.get("lines", 1)
    losses = [(one["loss"], one.get("lines", 1)) for one in (total, line) if one["loss"] is not None]
    peaks = [(one["peak"], one["seconds"]) for one in (total, line) if one["peak"]]
    peak, seconds = _mean(peaks), both["seconds"]
    timed = bool(both["examples"] and seconds)
    return {
        **line, **both, "lines": count, "loss": _mean(losses), "peak": peak,
        **{name: _added(total.get(name, {}), line.get(name, {})) for name in BY_NAME},
        "examples_per_s": both["examples"] / seconds if timed else None,
        "tokens_per_s": both["tokens"] / seconds if timed else None,
        "effective_mfu": both["flops"] / (peak * seconds) if timed and peak and both["flops"] else None,
    }  # fmt: skip


def _interval(total: Line, line: Line) -> Line:
    """The sum of two intervals of the ledger; minimum and maximum over the ranks are added too."""
    found = {
        **line, "wall": _stats(total["wall"], line["wall"]),
        "parts": {name: _stats(total["parts"][name], stats) for name, stats in line["parts"].items()},
    }  # fmt: skip
    if counted := [one["traffic"] for one in (total, line) if "traffic" in one]:  # an attempt's last line has none
        sent: dict[tuple[str, str], list[float]] = {}
        for axis, collective, calls, size in [row for one in counted for row in one["sent"]]:
            own = sent.setdefault((axis, collective), [0.0, 0.0])
            own[0], own[1] = own[0] + calls, own[1] + size
        steps = sum(one["steps"] for one in counted)
        found["traffic"] = {"steps": steps, "sent": [[*key, *own] for key, own in sent.items()]}
    if late := [*total.get("stragglers", []), *line.get("stragglers", [])]:
        by_rank: dict[int, list[Line]] = defaultdict(list)
        for one in late:
            by_rank[one["rank"]].append(one)
        found["stragglers"] = [_straggler(own) for own in by_rank.values()]
    return found


def _straggler(lines: list[Line]) -> Line:
    """One rank's lines as one: that of its worst interval, which lost `most`, with the costs of all."""
    worst = max(lines, key=worst_lost)
    return worst | {name: sum(one[name] for one in lines) for name in MEETING} | {"most": worst_lost(worst)}


def worst_lost(line: Line) -> float:
    """Rank-seconds that a straggler cost in its worst interval."""
    return float(line["most"] if "most" in line else line["lost"])


def _stats(a: list[float], b: list[float]) -> list[float]:
    """[minimum, mean, maximum, rank of the maximum] of two intervals together."""
    return [a[0] + b[0], a[1] + b[1], a[2] + b[2], (a if a[2] > b[2] else b)[3]]


def _mean(values: list[tuple[float, float]]) -> float | None:
    """The weighted mean of (value, weight); the last value if all weights are 0."""
    weight = sum(own for _, own in values)
    if not weight:
        return values[-1][0] if values else None
    return sum(value * own for value, own in values) / weight


def _added(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
