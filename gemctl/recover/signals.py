"""Signals that stop a run: save and exit, save because the time limit is near, or kill everything at once.

with StopSignals() as signals: …
signals.reason, signals.at_once
"""

import signal
from types import FrameType, TracebackType
from typing import Any

TIME_LIMIT = signal.SIGUSR1  # a batch script asks its scheduler to send it some time before the limit
ENDS = (signal.SIGINT, signal.SIGTERM)
HANGUP = signal.SIGHUP  # the terminal was closed


class StopSignals:
    """Inside the block, SIGINT, SIGTERM and SIGUSR1 are requests. `reason`: the signal that stops the run, or None.
    SIGHUP counts as SIGTERM, unless it is ignored, as under nohup.

    A Ctrl-C after SIGINT or SIGTERM sets `at_once`. A second SIGTERM does not: schedulers send it repeatedly, and
    SIGKILL when they mean it.
    """

    def __init__(self) -> None:
        self.reason: signal.Signals | None = None
        self.at_once = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._take) for number in (*ENDS, TIME_LIMIT)}
        if signal.getsignal(HANGUP) != signal.SIG_IGN:
            self._before[HANGUP] = signal.signal(HANGUP, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason in ENDS:
            self.at_once, self.reason = True, signal.SIGINT
        elif self.reason is None or number == signal.SIGINT:
            self.reason = signal.SIGTERM if number == HANGUP else signal.Signals(number)
