"""Agents on this machine, started through TorchX's local scheduler.

    gemctl train launcher.ranks_per_node=4 …

TorchX starts the agent in a session of its own, so Ctrl-C in the terminal does not reach it or the ranks: only the
supervisor handles it.
"""

import contextlib
import functools
import math
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gemctl import process
from gemctl.cluster.host import find_gpus
from gemctl.config.schema import Config, LauncherConfig
from gemctl.errors import InputError
from gemctl.launchers.api import RequeueReason, request, to_json
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import create_json, read_log
from gemctl.run.submission import Job, Submission

if TYPE_CHECKING:
    from torchx.specs import AppDef

IN_PROCESS = True
SESSION = "gemctl"
SCHEDULER = "local_cwd"
KILL_SECONDS = 3.0


def check(config: Config) -> None:
    """InputError for more than one node."""
    launcher = config.launcher
    if launcher.nodes != 1:
        raise InputError(
            f"launcher.nodes={launcher.nodes}: launcher.kind=local starts ranks on this machine only; "
            f"set launcher.nodes=1 and launcher.ranks_per_node={launcher.nodes * launcher.ranks_per_node}"
        )


def check_here(config: Config) -> None:
    """InputError where cluster.device=cuda and this machine has fewer GPUs than ranks."""
    launcher = config.launcher
    found = len(find_gpus()) if config.cluster.device == "cuda" else launcher.ranks_per_node
    if found < launcher.ranks_per_node:
        raise InputError(
            f"cluster.device=cuda: launcher.ranks_per_node={launcher.ranks_per_node} needs as many GPUs, and "
            f"nvidia-smi lists {found} on this machine; cluster=cpu trains without GPUs"
        )


def script(app: "AppDef", config: Config, submission: Path) -> None:
    """None: there is no scheduler."""


def start(run: RunDir, submission: Submission, config: Config) -> None:
    """Starts the submission's supervisor in a session of its own, so that it outlives this process and its terminal."""
    with submission.output.open("ab") as output:
        supervisor = subprocess.Popen(
            process.python("-m", "gemctl", "supervise", str(run.path), "--submission", str(submission.number)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    submission.write_process(supervisor.pid)


def jobs(submissions: Sequence[Submission]) -> list[Job | None]:
    """The supervisors' processes, as far as this machine can tell."""
    return [_job(submission.submitted()) for submission in submissions]


def _job(submitted: dict[str, Any] | None) -> Job | None:
    if submitted is None:
        return None
    pid, host = submitted["pid"], submitted["host"]
    if host != socket.gethostname():
        return Job(str(pid), "unknown", f"process {pid} of host {host}")
    alive = submitted["started"] is not None and process.started(pid) == submitted["started"]
    return Job(str(pid), "running" if alive else "ended", f"process {pid} of this host")


def cancel(submission: Submission) -> None:
    """Does nothing: a process does not wait in a queue."""


def requeue(config: Config, reason: RequeueReason) -> bool:
    """False: there is no queue."""
    return False


def replaces_supervisor(submission: Submission) -> bool:
    """False: only a user starts a supervisor again."""
    return False


def agents(run: RunDir, config: Config) -> "LocalAgents":
    return LocalAgents(run, config.launcher)


class LocalAgents:
    """The agent that serves a run's attempts on this machine."""

    def __init__(self, run: RunDir, launcher: LauncherConfig) -> None:
        from torchx.runner import Runner  # noqa: PLC0415
        from torchx.schedulers.local_scheduler import CWDImageProvider, create_scheduler  # noqa: PLC0415

        class Image(CWDImageProvider):
            def get_cwd(self, image: str) -> None:
                """Keeps TorchX from putting the current folder first in the agent's PATH."""

        self._run, self._launcher = run, launcher
        make = functools.partial(create_scheduler, image_provider_class=Image)
        self._runner = Runner(SESSION, {SCHEDULER: make})
        self._handle = ""
        self._first: Attempt | None = None

    def start(self, attempt: Attempt) -> None:
        app = request(self._run.path, attempt.number, self._launcher)
        with _handlers_kept():
            info = self._runner.dryrun(app, SCHEDULER, {"log_dir": str(attempt.logs / "torchx")})
        self._handle, self._first = self._runner.schedule(info), attempt

    def submit(self, attempt: Attempt) -> None:
        create_json(attempt.request, to_json(request(self._run.path, attempt.number, self._launcher)))

    def ended(self) -> dict[int, str]:
        how = next(filter(None, map(process.how_ended, self._pids("agent"))), None)  # TorchX does not report signals
        if how is None and self._is_running():
            return {}
        self._keep_early_output()
        return {0: how or process.UNREPORTED}

    def _keep_early_output(self) -> None:
        """Makes what the agent wrote before it opened its own log, such as an ImportError, that log."""
        if self._first is None or (log := self._first.agent_output(0)).exists():
            return
        with contextlib.suppress(OSError):
            log.write_bytes(b"".join(file.read_bytes() for file in self._first.logs.glob("torchx/**/stderr.log")))

    def _is_running(self) -> bool:
        try:
            status = self._runner.status(self._handle)
        except OSError:  # TorchX writes a file when an app has ended, and the disk may be full
            return False
        return status is not None and not status.is_terminal()

    def kill(self) -> list[int]:
        if self._first is None:
            return []
        agents, ranks = self._pids("agent"), self._pids("rank")
        for pid in filter(process.running, agents):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # as in `_is_running`
            self._runner.cancel(self._handle)  # TorchX's SIGTERM ends an agent that has not recorded its pid yet
        self._first = None
        return process.wait_until_gone([*agents, *ranks], KILL_SECONDS)

    def _pids(self, event: Literal["agent", "rank"]) -> set[int]:
        """The processes that the agent has recorded since it was started: its own, or its ranks'."""
        first = self._first.number if self._first is not None else math.inf
        served = [attempt for attempt in self._run.attempts() if attempt.number >= first]
        return {line["pid"] for attempt in served for line in read_log(attempt.agent_log(0)) if line["event"] == event}


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """TorchX's local scheduler installs handlers of SIGTERM and SIGINT when it is created; this restores ours."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    held = signal.pthread_sigmask(signal.SIG_BLOCK, kept)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
