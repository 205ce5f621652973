"""Where a rank's seconds go: one clock per part of the run; what none covers is `unaccounted`.

    ledger = Ledger()
    with ledger.part("build"):
        ...
    with ledger.part("data_wait"):
        batch = next(loader)
    seconds = ledger.take()        # {"build": ..., "data_wait": ..., "wall": ..., "unaccounted": ...}

Time counts from the start of the process, and what passed before the ledger was made counts as `import`. Parts are
exclusive: the seconds of a part inside another are the inner one's alone, except inside the parts of WHOLE. Until
`first_step_done()` a wait for data is `first_batch` and every part of a step is `first_step`, so start-up keeps its own
stages. A part costs about a microsecond. On an accelerator the clocks show when the host waits. `exposed_communication`
is what the dense part waits inside its own collectives, so its forward and backward are compute
(gemctl/run/efficiency.py).
"""

import os
import resource
import sys
import time
from pathlib import Path
from types import TracebackType

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
# Parts inside these count for them: an evaluation's waits and forwards are evaluation.
WHOLE = frozenset((*STARTUP, *AROUND))


class _Part:
    """The context manager of one part; it holds no state of its own, so one object serves all uses."""

    __slots__ = ("index", "ledger")

    def __init__(self, ledger: "Ledger", index: int) -> None:
        self.ledger, self.index = ledger, index

    def __enter__(self) -> None:
        self.ledger._enter(self.index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ledger._exit()


class Ledger:
    """The clocks of one rank. Use it from one thread."""

    def __init__(self, start: float | None = None) -> None:
        """`start`: `time.perf_counter()` value from which time counts; None: the start of this process."""
        now = time.perf_counter()
        self.start_rss = peak_rss()  # bytes when the ledger was made: interpreter, libraries, pages shared by the fork
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
        """`with ledger.part(name)`: the seconds inside count as `name`, one of PARTS (KeyError otherwise)."""
        return self._parts[name]

    def first_step_done(self) -> None:
        """Ends start-up: from now on parts of a step count under their own names."""
        self._parts = self._steady

    def take(self) -> dict[str, float]:
        """Seconds by part since the last `take` (or the start), with `wall` and `unaccounted` = wall − Σ parts."""
        now = self._settle()
        seconds = dict(zip(PARTS, self._seconds, strict=True))
        self._taken = {name: self._taken[name] + seconds[name] for name in PARTS}
        wall = now - self._taken_at
        self._seconds, self._taken_at = [0.0] * len(PARTS), now
        return seconds | {"wall": wall, "unaccounted": wall - sum(seconds.values())}

    def seconds(self, name: str) -> float:
        """Seconds of one part so far, over all intervals, an open part included."""
        self._settle()
        return self._taken[name] + self._seconds[PARTS.index(name)]

    def totals(self) -> dict[str, float]:
        """Seconds by part so far, over all intervals, and `unaccounted`."""
        now = self._settle()
        seconds = {name: self._taken[name] + self._seconds[index] for index, name in enumerate(PARTS)}
        return seconds | {"unaccounted": now - self._start - sum(seconds.values())}

    @property
    def is_steady(self) -> bool:
        """False during start-up."""
        return self._parts is self._steady

    def _settle(self) -> float:
        """Books the open part up to now; returns now."""
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

    def _exit(self) -> None:
        now = time.perf_counter()
        self._seconds[self._stack.pop()] += now - self._mark
        self._mark = now


def process_start() -> float:
    """When this process began (for a forked rank: when it was forked), as a `time.perf_counter()` value."""
    stat = Path("/proc/self/stat")
    if sys.platform != "linux" or not stat.exists():
        return time.perf_counter()
    # Field 22, counted after the command's closing bracket, is the start in clock ticks since boot.
    ticks = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - max(age, 0.0)


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
