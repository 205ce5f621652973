"""Where a rank's time goes: one clock per part of the run; time outside of all parts is `unaccounted`.

    ledger = Ledger()
    with ledger.part("build"):
        ...
    with ledger.part("data_wait"):
        batch = next(loader)
    seconds = ledger.take()        # {"build": ..., "data_wait": ..., "wall": ..., "unaccounted": ...}

Time counts from the start of the process; time before the ledger was created counts as `import`. Parts are exclusive:
time of a nested part counts for the inner part only, except inside the parts of WHOLE. Until `first_step_done()`,
waiting for data is `first_batch` and every part of a step is `first_step`, so that start-up is kept apart. Entering and
leaving a part takes about a microsecond. `exposed_communication` is the time for which the dense part waits in its own
collectives, so its forward and backward are pure compute (gemctl/report/efficiency.py).

On a GPU the host runs ahead, so its clock shows when work was launched. After start-up `take` therefore returns the
stream's time: entering or leaving a part records an event on the stream, the time between two events counts for the
part as on the host, and `take` waits for the last event. GPU idle time counts for the part that launches its work too
late, such as a wait for data. `totals`, from which stragglers are detected, stays on the host's clock.
"""

import os
import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

STARTUP = ("import", "process_group", "build", "load", "first_batch", "first_step")
STEP = (
    "data_wait",
    "tables_forward",
    "dense_forward",
    "flag_wait",
    "dense_backward",
    "tables_backward",
    "tables_sync",
    "optimizer",
    "exposed_communication",
)
AROUND = ("checkpoint_stall", "eval", "log", "peak")
PARTS = STARTUP + STEP + AROUND
# Nested parts count for these: waiting and forward passes in an evaluation are evaluation.
WHOLE = frozenset((*STARTUP, *AROUND))


class _Part:
    """The context manager of one part; it has no state, so one object serves all uses."""

    __slots__ = ("index", "ledger")

    def __init__(self, ledger: "Ledger", index: int) -> None:
        self.ledger, self.index = ledger, index

    def __enter__(self) -> None:
        self.ledger._enter(self.index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ledger._exit()


class Event(Protocol):
    """The interface of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class StreamClock:
    """Attributes the current stream's time to parts, by events between its kernels; a mark takes microseconds."""

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self._free: list[Event] = []
        self._marks: list[tuple[int | None, Event]] = []
        self.mark(None)

    def mark(self, part: int | None) -> None:
        """From here on the stream's time belongs to `part` (None: to no part)."""
        event = self._free.pop() if self._free else self._event()
        event.record()
        self._marks.append((part, event))

    def take(self, part: int | None) -> dict[int | None, float]:
        """Seconds by part since the last call; waits for the stream. `part`: the part that is open now."""
        self.mark(part)
        self._marks[-1][1].synchronize()
        seconds: dict[int | None, float] = {}
        for (own, begin), (_, end) in pairwise(self._marks):
            seconds[own] = seconds.get(own, 0.0) + begin.elapsed_time(end) / 1e3
        self._free += [event for _, event in self._marks[:-1]]
        self._marks = self._marks[-1:]
        return seconds


def _cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)
    return event


class Ledger:
    """The clocks of one rank. For use by one thread."""

    def __init__(self, start: float | None = None) -> None:
        """`start`: the `time.perf_counter()` value from which time counts (None: the start of this process)."""
        self._stream: StreamClock | None = None
        now = time.perf_counter()
        self.start_rss = peak_rss()  # bytes so far: interpreter, libraries, pages shared by the fork
        self._start = process_start() if start is None else start
        self._seconds = [0.0] * len(PARTS)
        self._seconds[PARTS.index("import")] = now - self._start
        self._taken = dict.fromkeys(PARTS, 0.0)
        self._taken_at = self._start
        self._mark = now
        self._stack: list[int] = []
        self._whole = [name in WHOLE for name in PARTS]
        self._parts = {name: _Part(self, index) for index, name in enumerate(PARTS)}
        self._steady = self._parts
        first = dict.fromkeys(STEP, "first_step") | {"data_wait": "first_batch"}
        self._parts = {name: self._parts[first.get(name, name)] for name in PARTS}

    def part(self, name: str) -> _Part:
        """`with ledger.part(name)`: time inside counts as `name`, one of PARTS (KeyError otherwise)."""
        return self._parts[name]

    def first_step_done(self, event: Callable[[], Event] | None = None) -> None:
        """Ends start-up: from now on parts of a step count under their own names and, on a GPU (or with an `event` to
        mark a stream), `take` returns the stream's time.
        """
        self._parts = self._steady
        if event is None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            event = _cuda_event
        if event is not None:
            self._book()
            self._startup = list(self._seconds)
            self._stream = StreamClock(event)

    def take(self) -> dict[str, float]:
        """Seconds by part since the last `take` (or the start), with `wall` and `unaccounted` = wall − Σ parts."""
        on_stream = self._stream.take(self._stack[-1] if self._stack else None) if self._stream else None
        now = self._book()
        self._taken = {name: self._taken[name] + own for name, own in zip(PARTS, self._seconds, strict=True)}
        seconds = self._seconds
        if on_stream is not None:
            seconds = [before + on_stream.get(index, 0.0) for index, before in enumerate(self._startup)]
            self._startup = [0.0] * len(PARTS)
        wall = now - self._taken_at
        self._seconds, self._taken_at = [0.0] * len(PARTS), now
        parts = dict(zip(PARTS, seconds, strict=True))
        return parts | {"wall": wall, "unaccounted": wall - sum(seconds)}

    def seconds(self, name: str) -> float:
        """Seconds of one part so far, over all intervals, including an open part."""
        self._book()
        return self._taken[name] + self._seconds[PARTS.index(name)]

    def totals(self) -> dict[str, float]:
        """Seconds by part so far, over all intervals, and `unaccounted`."""
        now = self._book()
        seconds = {name: self._taken[name] + self._seconds[index] for index, name in enumerate(PARTS)}
        return seconds | {"unaccounted": now - self._start - sum(seconds.values())}

    @property
    def is_steady(self) -> bool:
        """False during start-up."""
        return self._parts is self._steady

    def _book(self) -> float:
        """Adds the time up to now to the open part; returns now."""
        now = time.perf_counter()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._mark
            self._mark = now
        return now

    def _enter(self, index: int) -> None:
        now = time.perf_counter()
        if self._stack:
            outer = self._stack[-1]
            self._seconds[outer] += now - self._mark
            index = outer if self._whole[outer] else index
        self._mark = now
        self._stack.append(index)
        if self._stream:
            self._stream.mark(index)

    def _exit(self) -> None:
        now = time.perf_counter()
        self._seconds[self._stack.pop()] += now - self._mark
        self._mark = now
        if self._stream:
            self._stream.mark(self._stack[-1] if self._stack else None)


def process_start() -> float:
    """When this process started (for a forked rank: when it was forked), as a `time.perf_counter()` value."""
    stat = Path("/proc/self/stat")
    if sys.platform != "linux" or not stat.exists():
        return time.perf_counter()
    # Field 22 is the start in clock ticks since boot; the command name before it may contain blanks and brackets.
    ticks = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - max(age, 0.0)


def peak_rss() -> int:
    """Peak resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def gpu_memory() -> dict[str, int]:
    """Peak bytes on this process's GPU so far: allocated to tensors, and reserved by the allocator; 0 without a GPU."""
    if not torch.cuda.is_initialized():
        return {"gpu_allocated": 0, "gpu_reserved": 0}
    return {"gpu_allocated": torch.cuda.max_memory_allocated(), "gpu_reserved": torch.cuda.max_memory_reserved()}
