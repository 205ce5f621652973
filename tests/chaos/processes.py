"""A case's commands and all their descendants: started, followed, signalled and reaped, so that none goes unnoticed.

    case = Case(folder) case.start(["train", …], "well") case.follow()                      # until every command has
    ended; case.orphans names the processes they have left behind

The process that creates a Case becomes the reaper of all its descendants (PR_SET_CHILD_SUBREAPER), so a process whose
parent has died becomes its child.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log
from gemctl.run.manifest import FILE_NAME, FOLDER
from tests.chaos import commands

PR_SET_CHILD_SUBREAPER = 36
POLL = 0.01
COMMAND_SECONDS = 120.0  # for a command with all its attempts; the longest legitimate wait is a watchdog of 30 s
ORPHAN_SECONDS = 6.0  # after which a command's leftover processes must be gone


@dataclass
class Ran:
    """A command. `wanted`: well (exit 0), refused (another exit code with a reason), or any explained end."""

    words: list[str]
    wanted: str
    pid: int
    started: float
    code: int | None = None
    seconds: float = 0.0
    err: str = ""


class Case:
    """One run in `folder` and everything observed about it. Times are by this host's clock, like the attempts'."""

    def __init__(self, folder: Path) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
        folder.mkdir(parents=True)
        self.folder = folder
        self.commands: list[Ran] = []
        self.published: dict[str, float] = {}  # checkpoint → when its manifest was first seen
        self.damaged: set[str] = set()
        self.touched = False  # its checkpoints have been damaged
        self.holds: dict[str, str] = {}  # folder → name of the checkpoint in it, as some are swapped
        self.missed: list[str] = []  # deeds whose moment never came
        self.hung: list[str] = []
        self.orphans: list[str] = []
        self.gaps: list[str] = []  # a moment without any published checkpoint after the first one
        self._alive: dict[int, Ran] = {}
        self._waiting: list[tuple[Callable[[], bool], Callable[[], None], str]] = []
        self._run: RunDir | None = None

    @property
    def run(self) -> RunDir | None:
        """The run, once it exists."""
        if self._run is None:
            for path in self.folder.glob("runs/*/*/run.json"):
                self._run = RunDir(path.parent)
        return self._run

    @property
    def main(self) -> Ran:
        """The command that is disturbed: the first of the concurrent ones."""
        return self._main

    def start(self, words: list[str], wanted: str, inject: str = "") -> Ran:
        """Starts a command in addition to running ones."""
        output = self.folder / f"command-{len(self.commands)}"
        environment = {"GEMCTL_INJECT": inject, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ran = Ran(words, wanted, commands.start(words, output, environment, self.folder), time.time())
        if not self._alive:
            self._main = ran
        self._alive[ran.pid] = ran
        self.commands.append(ran)
        return ran

    def when(self, ready: Callable[[], bool], do: Callable[[], None], text: str = "") -> None:
        """Calls `do` once `ready` returns true; `text`: recorded as missed if it never does."""
        self._waiting.append((ready, do, text))

    def follow(self) -> None:
        """Returns when all commands have ended and none of their processes is left."""
        while self._alive:
            self._reap()
            self._watch_checkpoints()
            for one in list(self._waiting):
                if one[0]():
                    self._waiting.remove(one)
                    one[1]()
            for ran in list(self._alive.values()):
                if time.time() - ran.started > COMMAND_SECONDS:
                    self._give_up(ran)
            time.sleep(POLL)
        self.missed += [text for _, _, text in self._waiting if text]
        self._waiting.clear()
        self._await_orphans()

    def attempt(self) -> Attempt | None:
        """The newest attempt whose agent has started."""
        attempts = self.run.attempts() if self.run else []
        return next((one for one in reversed(attempts) if one.agent_log(0).exists()), None)

    def ranks(self) -> dict[int, int]:
        """Processes by rank, of that attempt."""
        attempt = self.attempt()
        return ranks(attempt) if attempt else {}

    def agents(self) -> list[int]:
        attempt = self.attempt()
        return [line["pid"] for line in read_log(attempt.agent_log(0)) if line["event"] == "agent"] if attempt else []

    def everything(self) -> list[int]:
        """The disturbed command's supervisor, agent and ranks."""
        return [self.main.pid, *self.agents(), *self.ranks().values()]

    def send(self, number: signal.Signals, pids: Iterable[int]) -> None:
        """Sends the signal to descendants of this process only: a pid may have been reused."""
        for pid in pids:
            if _descends(pid, os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if ran := self._alive.pop(pid, None):
                    ran.code, ran.seconds = os.waitstatus_to_exitcode(status), time.time() - ran.started
                    ran.err = (self.folder / f"command-{self.commands.index(ran)}.err").read_text()

    def _watch_checkpoints(self) -> None:
        if self.run is None or not self.run.checkpoints.exists():
            return
        names = [path.name for path in self.run.checkpoints.iterdir() if FOLDER.fullmatch(path.name)]
        seen = [name for name in names if (self.run.checkpoints / name / FILE_NAME).exists()]
        for name in seen:
            self.published.setdefault(name, time.time())
        if not seen and self.published.keys() - self.damaged and not self.gaps:
            self.gaps.append(f"no checkpoint was there for a moment, of {', '.join(sorted(self.published))}")

    def _give_up(self, ran: Ran) -> None:
        self.hung.append(f"gemctl {ran.words[0]} ran for more than {COMMAND_SECONDS:.0f} s")
        self._waiting.clear()
        self.send(signal.SIGCONT, self.everything())
        self.send(signal.SIGKILL, [ran.pid])
        ran.started = time.time()

    def _await_orphans(self) -> None:
        deadline = time.time() + ORPHAN_SECONDS
        while time.time() < deadline:
            self._reap()
            if not (left := children(os.getpid())):
                return
            time.sleep(POLL)
        self.orphans += [f"process {pid} (state {state}) outlived its command" for pid, state in left]
        self.send(signal.SIGKILL, [pid for pid, _ in left])


def ranks(attempt: Attempt) -> dict[int, int]:
    """Processes by rank."""
    return {line["rank"]: line["pid"] for line in read_log(attempt.agent_log(0)) if line["event"] == "rank"}


def stopped(pid: int) -> bool:
    """Whether the process is stopped."""
    return _state(pid)[0] == "T"


def children(parent: int) -> list[tuple[int, str]]:
    """Process and state of every running child."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    states = {pid: _state(pid) for pid in pids}
    return [(pid, state) for pid, (state, above) in states.items() if above == parent and state not in {"Z", "X"}]


def _descends(pid: int, ancestor: int) -> bool:
    while pid not in {0, ancestor}:
        pid = _state(pid)[1]
    return pid == ancestor


def _state(pid: int) -> tuple[str, int]:
    """State and parent of a process; X and 0 if it is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return state, int(parent)
