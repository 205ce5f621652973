"""Following a run that another process supervises: after --detach, and in the foreground under a scheduler.

What is known comes from the run's files; the launcher is asked only now and then what became of the job.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from gemctl.errors import GemctlError, Interrupted

if TYPE_CHECKING:
    from gemctl.commands.launching import Launcher
    from gemctl.render.progress import Progress
    from gemctl.run.attempt import Attempt
    from gemctl.run.directory import RunDir
    from gemctl.run.submission import Detached, Job, Submission

POLL = 0.1
JOB_POLL = 5.0  # seconds between questions to a scheduler
START_SECONDS = 15.0  # that --detach waits for a supervisor to begin
LAST_WORDS = 20  # lines of a supervisor that never began an attempt


def wait_for_start(run: "RunDir", submission: "Submission", launcher: "Launcher") -> "Detached":
    """Until the supervisor has made an attempt, or its job waits in a queue. GemctlError if it ended without one."""
    from gemctl.run.conclusion import reference
    from gemctl.run.submission import Detached

    deadline = time.monotonic() + START_SECONDS
    while True:
        (job,) = launcher.jobs([submission])
        attempt = own_attempt(run, submission)
        if attempt is None and job is not None and job.state == "ended":
            raise GemctlError(not_started(run, submission))
        waits = job is not None and job.state == "waiting"
        if attempt is not None or waits or time.monotonic() > deadline:
            return Detached(reference(run), submission.number, attempt.number if attempt else None, job)
        time.sleep(POLL)


def own_attempt(run: "RunDir", submission: "Submission") -> "Attempt | None":
    """The newest attempt that was made under the submission, which is the run's newest."""
    last = run.last_attempt()
    return last if last is not None and last.claimed and last.number >= submission.first_attempt else None


def not_started(run: "RunDir", submission: "Submission") -> str:
    """What a supervisor that made no attempt has said."""
    try:
        said = submission.output.read_text(errors="replace").splitlines()[-LAST_WORDS:]
    except OSError:
        said = []
    return "\n".join([f"run {run.run_id} did not start: its supervisor has ended without an attempt", *said])


class Following:
    """Shows a submitted run until it ends; Ctrl-C files a stop request, a second one leaves the run alone."""

    def __init__(self, run: "RunDir", submission: "Submission", launcher: "Launcher", progress: "Progress") -> None:
        self.run, self.submission, self.launcher, self.progress = run, submission, launcher, progress
        self.interrupts = 0
        self._handled = 0
        self._job: Job | None = None
        self._asked = float("-inf")
        self._said = ""

    def follow(self) -> None:
        """Returns when the run has finished or was stopped. GemctlError with the cause, Interrupted after a Ctrl-C."""
        with _interrupts(self._interrupted):
            while not self._ended():
                self._take_interrupts()
                time.sleep(POLL)

    def _ended(self) -> bool:
        attempt = own_attempt(self.run, self.submission)
        if attempt is not None:
            self.progress.follow(attempt)
            if attempt.end_file.exists() and self._conclude(attempt):
                return True
        job = self._ask()
        if job is None or job.state != "ended":
            return False
        time.sleep(POLL)  # what it has written last may come after its end
        last = own_attempt(self.run, self.submission)
        if last is None:
            self._refuse_unstarted()
        elif last.end_file.exists():
            return self._conclude(last, final=True)
        else:
            from gemctl.run.conclusion import hint

            text = f"run {self.run.run_id}: its supervisor has gone ({job.detail}), attempt {last.number} left no end"
            raise GemctlError(f"{text}\n{hint(self.run)}")
        return True

    def _conclude(self, attempt: "Attempt", final: bool = False) -> bool:
        """True if no other attempt comes. Raises what the supervisor has raised."""
        from gemctl.run.conclusion import conclusion

        end = attempt.end() or {}
        if end.get("again", end["outcome"] == "preempted") and not final:
            return False
        text = conclusion(self.run, attempt) or ""
        if end["outcome"] in {"failed", "preempted"}:
            raise GemctlError(text)
        if end["outcome"] == "killed" or self.interrupts or end.get("signal") == "SIGTERM":
            raise Interrupted(text, 143 if end.get("signal") == "SIGTERM" else 130)
        if end["outcome"] == "stopped":
            self.progress.note(text)
        return True

    def _refuse_unstarted(self) -> None:
        if self.interrupts:
            raise Interrupted(f"run {self.run.run_id}: its job was taken out of the queue")
        raise GemctlError(not_started(self.run, self.submission))

    def _ask(self) -> "Job | None":
        """What the launcher says of the job, asked now and then; a change is shown."""
        if time.monotonic() - self._asked > JOB_POLL:
            (self._job,) = self.launcher.jobs([self.submission])
            self._asked = time.monotonic()
            if self._job is not None and self._job.state in {"waiting", "unknown"} and self._job.detail != self._said:
                self._said = self._job.detail
                self.progress.note(self._job.detail)
        return self._job

    def _take_interrupts(self) -> None:
        from gemctl.run import requests
        from gemctl.run.conclusion import reference

        if self.interrupts == self._handled:
            return
        self._handled = self.interrupts
        if self.interrupts > 1:
            name = reference(self.run)
            raise Interrupted(f"run {name} goes on without this terminal; gemctl logs -f {name}, gemctl stop {name}")
        requests.file(self.run, "stop")
        if own_attempt(self.run, self.submission) is None:
            self.launcher.cancel(self.submission)
        self._asked = float("-inf")
        self.progress.note("stopping: the ranks save at the end of this step (Ctrl-C again leaves the run alone)")

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1


@contextmanager
def _interrupts(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
