"""What a rank records of itself, and what its agent records of its output.

    stages = StageRecorder(attempt, rank)           # attempts/<n>/ranks/<rank>.jsonl
    stages.enter("build")
    stages.enter("step", 12)
    stages.fail(error)                              # or
    stages.finish("stopped", 12)

    OutputTimes(attempt, node).look(ranks)          # attempts/<n>/logs/times-<node>.jsonl: the agent, every few ms
    Times(attempt).of(1, offset)                    # when byte `offset` of rank 1's output had been written

From the stages the supervisor knows where a rank failed, and that one hangs: a stage without a new line for
`recover.watchdog` seconds. So work that may take long calls `enter` repeatedly (an evaluation: every batch).

A rank's stdout and stderr, C libraries and its last words included, go straight to its file: there is no pipe that
could fill up or break with its reader, no extra process, and the text is unchanged. The agent, which polls its ranks
every 20 ms anyway, notes whenever a file has grown, so lines of several ranks can be merged by time with about that
resolution, by their hosts' clocks.
"""

import bisect
import contextlib
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from gemctl.errors import FULL
from gemctl.paths import exists
from gemctl.run.attempt import Attempt
from gemctl.run.files import JsonLog, LogTail, last_line, last_lines_at

STAGES = ("start", "build", "load", "data", "step", "eval", "save", "close")
Stage = Literal["start", "build", "load", "data", "step", "eval", "save", "close"]
MESSAGE = 2000  # longest part of an exception's message that is kept


class StageRecorder:
    """Appends to the record of one rank; a line costs about 10 µs."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self._folder, self._log = attempt.path, JsonLog(attempt.rank_log(rank))
        self._stage: str = "start"
        self._step: int | None = None
        self._failed = False
        self._log.write({"event": "start", "stage": "start", "step": None, "time": time.time(), "pid": os.getpid()})

    def enter(self, stage: Stage, step: int | None = None) -> None:
        """The rank starts, or is still in, `stage` for `step`."""
        self._stage, self._step = stage, step
        self._log.write({"event": "stage", "stage": stage, "step": step, "time": time.time()})

    def fail(self, error: BaseException) -> None:
        """The rank fails with `error` in its current stage. Only the first failure counts."""
        if self._failed:
            return
        self._failed = True
        self._log.write(_failure(error, self._stage, self._step, self._folder), last=True)

    def finish(self, result: Literal["finished", "stopped"], step: int) -> None:
        """The rank has completed its work (`finished`) or saved and stopped on request (`stopped`) after `step`
        steps."""
        line = {"event": "finish", "stage": self._stage, "step": step, "time": time.time(), "result": result}
        self._log.write(line, last=True)


def free_space(*folders: str | Path) -> str:
    """Free bytes on the disks that a rank writes to, for an error that names no file."""
    return ", ".join(
        f"{shutil.disk_usage(folder).free:,} bytes free in {folder}" for folder in folders if exists(folder)
    )


def _failure(error: BaseException, stage: str, step: int | None, folder: Path) -> dict[str, Any]:
    message = str(error)
    if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
        message += f" ({free_space(folder, '/dev/shm', tempfile.gettempdir())})"
    return {
        "event": "fail",
        "stage": stage,
        "step": step,
        "time": time.time(),
        "type": type(error).__name__,
        "message": message[:MESSAGE],
        "trace": "".join(traceback.format_exception(error))[-2 * MESSAGE :],
    }


def finished(attempt: Attempt, rank: int) -> bool:
    """True if the rank has recorded that its work is done."""
    line = last_line(attempt.rank_log(rank))
    return line is not None and line["event"] == "finish"


def fail_unrecorded(attempt: Attempt, rank: int, error: BaseException) -> None:
    """Records that `error` ended the rank in its last stage, unless the rank recorded a failure itself."""
    last: dict[str, Any] = last_line(attempt.rank_log(rank)) or {"event": "start", "stage": "start", "step": None}
    if last["event"] == "fail":
        return
    log = JsonLog(attempt.rank_log(rank))
    log.write(_failure(error, last["stage"], last["step"], attempt.path), last=True)


class OutputTimes:
    """Records the growth of the output files of one host's ranks."""

    def __init__(self, attempt: Attempt, node: int) -> None:
        self._attempt, self._log = attempt, JsonLog(attempt.output_times(node))
        self._sizes: dict[int, int] = {}
        self._files: dict[int, str] = {}

    def look(self, ranks: Iterable[int]) -> None:
        """Writes a line for each rank whose file has grown; one `stat` per rank."""
        for rank in ranks:
            if rank not in self._files:
                self._files[rank] = str(self._attempt.rank_output(rank))
            with contextlib.suppress(OSError):  # it does not exist yet, or the disk is full
                size = os.stat(self._files[rank]).st_size  # noqa: PTH116 (speed)
                if size > self._sizes.get(rank, 0):
                    self._log.write({"rank": rank, "bytes": size, "time": time.time()})
                    self._sizes[rank] = size

    def close(self) -> None:
        self._log.close()


class Times:
    """The times of an attempt's output; with `tail`, only the last lines of each host's index."""

    def __init__(self, attempt: Attempt, tail: int | None = None) -> None:
        self._attempt, self._tail = attempt, tail
        self._tails: dict[str, LogTail] = {}
        self._sizes: dict[int, list[int]] = {}
        self._times: dict[int, list[float]] = {}

    def update(self) -> None:
        """Reads new lines."""
        for path in sorted(self._attempt.logs.glob("times-*.jsonl")):
            if path.name not in self._tails:
                start = 0 if self._tail is None else last_lines_at(path, self._tail)
                self._tails[path.name] = LogTail(path, start)
            for line in self._tails[path.name].lines():
                self._sizes.setdefault(line["rank"], []).append(line["bytes"])
                self._times.setdefault(line["rank"], []).append(line["time"])

    def of(self, rank: int, size: int) -> float | None:
        """Unix time when the rank's file had reached `size` bytes; None if that was not recorded."""
        sizes = self._sizes.get(rank, [])
        at = bisect.bisect_left(sizes, size)
        return self._times[rank][at] if at < len(sizes) else None
