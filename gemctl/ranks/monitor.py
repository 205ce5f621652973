"""The ranks of one attempt on this host, watched by their agent: pids, exits, out-of-memory kills, stacks.

monitor = RankMonitor(attempt, node, log)
monitor.start()
with forks_registered(monitor.registry): ...       # fork the ranks
monitor.stop()
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from gemctl import process
from gemctl.cluster.host import own_groups
from gemctl.durable import exists
from gemctl.run import rank_records
from gemctl.run.attempt import Attempt
from gemctl.run.files import JsonLog
from gemctl.run.rank_records import OutputTimes

PEER_GRACE = 0.3  # seconds for the other ranks to record what they saw before they are killed
STACK_GRACE = 0.5  # seconds for dumping stacks
POLL = 0.02
UNNAMED = -1  # a forked process whose rank is not known yet


class RankMonitor:
    """Watches one attempt's ranks from a thread: records each one's pid and exit, kills the others when one has failed.

    torchrun's agent reports one failed rank, and not always the first; this record has all of them in order. It does
    not reap them: torchrun's agent takes a rank that another thread has reaped for a failed one.
    """

    def __init__(self, attempt: Attempt, node: int, log: JsonLog) -> None:
        self._attempt, self._log = attempt, log
        self._output = OutputTimes(attempt, node)
        self._reader, self.registry = os.pipe()  # each rank writes "rank pid" to it; UNNAMED when just forked
        os.set_blocking(self._reader, False)
        self._ranks: dict[int, int] = {}  # pid → rank
        self._unnamed: set[int] = set()
        self._oom_kills = oom_kills()
        self._ended: set[int] = set()
        self._recorded: set[int] = set()
        self._killed: set[int] = set()
        self._kill_at: float | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Records what is left to record; all ranks have exited."""
        self._done.set()
        self._thread.join()
        self._poll()
        self._output.close()
        os.close(self._reader)
        os.close(self.registry)

    def add_failure(self, rank: int, pid: int, code: int) -> None:
        """An exit that torchrun's agent saw; recorded unless this monitor has recorded it."""
        if pid not in self._recorded:
            self._record(rank, pid, code)

    def kill(self) -> None:
        """Kills every rank that is still running."""
        for pid in [*self._ranks, *self._unnamed]:
            if pid not in self._ended:
                self._killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _run(self) -> None:
        while not self._done.wait(POLL):
            self._poll()
            if self._kill_at is None and exists(self._attempt.kill_order):
                self._dump_stacks()
                self._kill_at = time.monotonic()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self.kill()

    def _poll(self) -> None:
        self._register()
        self._poll_unnamed()
        self._output.look(self._ranks.values())
        for pid, rank in self._ranks.items():
            if pid in self._ended:
                continue
            try:
                code = process.exit_code(pid)
            except ChildProcessError:  # torchrun's agent reaped it first; `add_failure` gets a code other than 0
                self._ended.add(pid)
                if not rank_records.finished(self._attempt, rank):
                    self._end_peers()
                continue
            if code is not None:
                self._record(rank, pid, code)
                if code != 0:
                    self._end_peers()

    def _poll_unnamed(self) -> None:
        """Which rank an early exit was is known from torchrun's agent once all have exited."""
        for pid in self._unnamed - self._ended:
            try:
                ended = process.exit_code(pid) is not None
            except ChildProcessError:
                ended = True
            if ended:
                self._ended.add(pid)
                self._end_peers()

    def _end_peers(self) -> None:
        """One rank has failed: the others get a moment to record what they saw, and are then killed."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + PEER_GRACE

    def _register(self) -> None:
        try:
            lines = os.read(self._reader, 1 << 16).decode().split("\n")
        except BlockingIOError:
            return
        for rank, pid in (map(int, line.split()) for line in lines if line):
            if rank == UNNAMED:
                self._unnamed.add(pid)
                continue
            self._unnamed.discard(pid)
            self._ranks[pid] = rank
            self._log.write({"event": "rank", "rank": rank, "pid": pid, "time": time.time()})

    def _record(self, rank: int, pid: int, code: int) -> None:
        self._ended.add(pid)
        self._recorded.add(pid)
        end = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": signal.Signals(-code).name}
        killed = code == -signal.SIGKILL and pid in self._killed
        line = {"event": "exit", "rank": rank, "pid": pid, "time": time.time(), "killed": killed, **end}
        if code == -signal.SIGKILL and not killed and (kills := oom_kills()) > self._oom_kills:
            line["out_of_memory"], self._oom_kills = True, kills
        self._log.write(line, last=True)

    def _dump_stacks(self) -> None:
        living = {pid: rank for pid, rank in self._ranks.items() if pid not in self._ended}
        for pid in living:
            with contextlib.suppress(ProcessLookupError):  # torchrun's agent has just reaped it
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_GRACE
        files = [self._attempt.rank_stack(rank) for rank in living.values()]
        while time.monotonic() < deadline and not all(file.stat().st_size for file in files):
            time.sleep(POLL)
        time.sleep(POLL)  # a stack is written in several pieces


_registry: int | None = None  # of the ranks being forked


def _register_fork() -> None:
    global _registry  # noqa: PLW0603 (a fork hook has no arguments)
    if _registry is not None:
        os.write(_registry, f"{UNNAMED} {os.getpid()}\n".encode())
        _registry = None


os.register_at_fork(after_in_child=_register_fork)


@contextlib.contextmanager
def forks_registered(registry: int) -> Iterator[None]:
    """Every process forked in this context writes its pid to `registry` before it does anything else."""
    global _registry  # noqa: PLW0603
    _registry = registry
    try:
        yield
    finally:
        _registry = None


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory: in this process's memory cgroup (version 2 or 1),
    else on the machine; 0 if neither is counted. Linux."""
    for file in _oom_counters():
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        counts = [int(count) for name, _, count in (line.partition(" ") for line in lines) if name == "oom_kill"]
        if counts:
            return counts[0]
    return 0


def _oom_counters() -> Iterator[Path]:
    """Files that may hold the counter, the nearest to this process first."""
    for folder, *_ in own_groups("memory"):
        yield folder / "memory.events"
        yield folder / "memory.oom_control"
    yield Path("/proc/vmstat")
