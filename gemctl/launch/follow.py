"""Following a run that another process supervises: after --detach, under a scheduler, from any shell or machine."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from gemctl.errors import TERMINATED, GemctlError, InputError, Interrupted
from gemctl.launch.liveness import SupervisorWatch, attempt_of, not_started
from gemctl.launch.progress import Progress
from gemctl.launchers.api import Launcher
from gemctl.run import requests
from gemctl.run.conclusion import conclusion, hint, name, reference
from gemctl.run.directory import RunDir
from gemctl.run.submission import Detached, Submission

POLL = 0.1
START_SECONDS = 15.0  # that --detach waits for a supervisor to start an attempt


def wait_for_start(run: RunDir, submission: Submission, launcher: Launcher) -> Detached:
    """Waits until the supervisor has started an attempt, or its job is queued. GemctlError if it ended without one."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        (job,) = launcher.jobs([submission])
        attempt = attempt_of(run, submission)
        if attempt is None and job is not None and job.state == "ended":
            raise GemctlError(not_started(run, submission, job))
        waits = job is not None and job.state == "waiting"
        if attempt is not None or waits or time.monotonic() > deadline:
            begun = attempt.number if attempt is not None else None
            return Detached(name(run), str(run.path), submission.number, begun, job)
        time.sleep(POLL)


class Follower:
    """Shows a submitted run until it ends. Ctrl-C files a stop request; a second one detaches from the run."""

    def __init__(self, run: RunDir, submission: Submission, launcher: Launcher, progress: Progress) -> None:
        self.run, self.submission, self.launcher, self.progress = run, submission, launcher, progress
        self._watch = SupervisorWatch(run)
        self._interrupts = self._handled = 0
        self._noted = ""

    def follow(self) -> None:
        """Returns when the run has finished or was stopped. GemctlError with the cause, Interrupted after a Ctrl-C."""
        with _interrupt_handler(self._on_interrupt):
            while (reason := self._watch.over()) is None:
                if (attempt := attempt_of(self.run, self.submission)) is not None:
                    self.progress.follow(attempt)
                self._note_job()
                self._handle_interrupts()
                time.sleep(POLL)
        self._conclude(reason)

    def _conclude(self, reason: str) -> None:
        """Raises what the supervisor has raised, or why there is none left."""
        attempt = attempt_of(self.run, self.submission)
        if reason and self._interrupts and attempt is None:
            raise Interrupted(f"run {self.run.run_id}: its job was removed from the queue\n{hint(self.run)}")
        if reason or attempt is None:
            raise GemctlError(f"{reason}\n{hint(self.run)}")
        end, text = attempt.end() or {}, conclusion(self.run, attempt) or ""
        if (end.get("cause") or {}).get("kind") == "checkpoint":
            raise InputError(text)
        if end["outcome"] in {"failed", "preempted"}:
            raise GemctlError(text)
        if end["outcome"] == "killed" or end.get("signal") is not None or self._interrupts:
            raise Interrupted(text, TERMINATED if end.get("signal") == "SIGTERM" else Interrupted.exit_code)
        if end["outcome"] == "stopped":
            self.progress.note(text)

    def _note_job(self) -> None:
        """Shows that the job is queued, or that its state is unknown."""
        job = self._watch.job
        if job is not None and job.state in {"waiting", "unknown"} and job.detail != self._noted:
            self.progress.note(job.detail)
        self._noted = job.detail if job is not None else ""

    def _handle_interrupts(self) -> None:
        if self._interrupts == self._handled:
            return
        self._handled = self._interrupts
        if self._interrupts > 1:
            named = reference(self.run)
            raise Interrupted(
                f"run {named} continues without this terminal; gemctl logs -f {named}, gemctl stop {named}"
            )
        requests.file(self.run, "stop")
        if attempt_of(self.run, self.submission) is None:
            self.launcher.cancel(self.submission)
        self._watch.query(now=True)
        self.progress.note("stopping: the ranks save at the end of this step (Ctrl-C again detaches from the run)")

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1


@contextmanager
def _interrupt_handler(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
