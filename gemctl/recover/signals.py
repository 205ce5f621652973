"""What signals ask of a supervisor: to stop and say so, to stop because the time is up, or to end everything at once.

with Asked() as asked: …
asked.reason, asked.at_once
"""

import signal
from types import FrameType, TracebackType
from typing import Any

TIME_LIMIT = signal.SIGUSR1  # what a batch script asks its scheduler for, some time before the limit
ENDS = (signal.SIGINT, signal.SIGTERM)
HANGUP = signal.SIGHUP  # the terminal was closed


class Asked:
    """Within it, SIGINT, SIGTERM and SIGUSR1 are requests. `reason`: the signal that stops the run, None without one.
    SIGHUP counts as SIGTERM, unless it is ignored, as under nohup.

    A Ctrl-C after SIGINT or SIGTERM means `at_once`. SIGTERM again does not: schedulers send it as often as they like,
    and SIGKILL when they mean that.
    """

    def __init__(self) -> None:
        self.reason: signal.Signals | None = None
        self.at_once = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Asked":
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
