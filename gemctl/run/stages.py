"""What a rank says about itself: the stage it is in, and the exception that ended it (attempts/<n>/ranks/<rank>.jsonl).

    stages = StageRecorder(attempt, rank)
    stages.enter("build")
    stages.enter("step", 12)
    stages.fail(error)                    # or
    stages.finish("stopped", 12)

The supervisor tells from it where a rank failed, and that one hangs: a stage without a new line for
`recover.watchdog` seconds. So what may take long says `enter` again from time to time (an evaluation: every batch).
"""

import os
import shutil
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Literal

from gemctl.errors import FULL
from gemctl.paths import exists
from gemctl.run.attempt import Attempt
from gemctl.run.files import JsonLog, last_line

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
        """The rank begins (or goes on with) `stage`, in the work for `step`."""
        self._stage, self._step = stage, step
        self._log.write({"event": "stage", "stage": stage, "step": step, "time": time.time()})

    def fail(self, error: BaseException) -> None:
        """The rank ends by `error`, in the stage it is in. Only the first one counts."""
        if self._failed:
            return
        self._failed = True
        self._log.write(_failure(error, self._stage, self._step, self._folder), last=True)

    def finish(self, result: Literal["finished", "stopped"], step: int) -> None:
        """The rank has done its work (`finished`) or saved and left on request (`stopped`), `step` steps done."""
        line = {"event": "finish", "stage": self._stage, "step": step, "time": time.time(), "result": result}
        self._log.write(line, last=True)


def free_space(*folders: str | Path) -> str:
    """What is left on the disks that a rank writes to, for an error that names no file."""
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
    """Records that `error` ended the rank, in the stage it was last in, unless it said so itself."""
    last: dict[str, Any] = last_line(attempt.rank_log(rank)) or {"event": "start", "stage": "start", "step": None}
    if last["event"] == "fail":
        return
    log = JsonLog(attempt.rank_log(rank))
    log.write(_failure(error, last["stage"], last["step"], attempt.path), last=True)
