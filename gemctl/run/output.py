"""When the lines that ranks print were written: an index beside the raw output files, attempts/<n>/logs/times-*.jsonl.

    OutputTimes(attempt, node).look(ranks)          # the host's agent, every few milliseconds
    Times(attempt).of(1, offset)                    # when byte `offset` of rank 1's output was there

What a process prints, C libraries and its last words included, goes straight to its file: no pipe that could fill up or
die with its reader, no process more, and nothing is added to the text. The agent, which looks at its ranks every 20 ms
anyhow, notes whenever a file has grown: lines of several ranks merge by time to about that, on their hosts' clocks.
"""

import bisect
import contextlib
import os
import time
from collections.abc import Iterable

from gemctl.run.attempt import Attempt
from gemctl.run.files import JsonLog, LogTail, last_lines_at


class OutputTimes:
    """Notes the growth of the output files of one host's ranks."""

    def __init__(self, attempt: Attempt, node: int) -> None:
        self._attempt, self._log = attempt, JsonLog(attempt.output_times(node))
        self._sizes: dict[int, int] = {}
        self._files: dict[int, str] = {}

    def look(self, ranks: Iterable[int]) -> None:
        """Writes a line for each rank whose file has grown; costs one `stat` a rank."""
        for rank in ranks:
            if rank not in self._files:
                self._files[rank] = str(self._attempt.rank_output(rank))
            with contextlib.suppress(OSError):  # not there yet; or the disk is full, and times matter least then
                size = os.stat(self._files[rank]).st_size  # noqa: PTH116 (speed)
                if size > self._sizes.get(rank, 0):
                    self._log.write({"rank": rank, "bytes": size, "time": time.time()})
                    self._sizes[rank] = size

    def close(self) -> None:
        self._log.close()


class Times:
    """The index of an attempt, as far as it is written; with `tail` of each host its last lines alone."""

    def __init__(self, attempt: Attempt, tail: int | None = None) -> None:
        self._attempt, self._tail = attempt, tail
        self._tails: dict[str, LogTail] = {}
        self._sizes: dict[int, list[int]] = {}
        self._times: dict[int, list[float]] = {}

    def update(self) -> None:
        """Reads what is new."""
        for path in sorted(self._attempt.logs.glob("times-*.jsonl")):
            if path.name not in self._tails:
                start = 0 if self._tail is None else last_lines_at(path, self._tail)
                self._tails[path.name] = LogTail(path, start)
            for line in self._tails[path.name].lines():
                self._sizes.setdefault(line["rank"], []).append(line["bytes"])
                self._times.setdefault(line["rank"], []).append(line["time"])

    def of(self, rank: int, size: int) -> float | None:
        """When the rank's file was seen to have `size` bytes, Unix time; None if nobody has noted it."""
        sizes = self._sizes.get(rank, [])
        at = bisect.bisect_left(sizes, size)
        return self._times[rank][at] if at < len(sizes) else None
