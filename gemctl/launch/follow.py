"""Following a run that another process supervises: after --detach, under a scheduler, from any shell or machine.

What is known comes from the run's files; a launcher is asked only now and then what became of the job.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from gemctl.errors import TERMINATED, GemctlError, InputError, Interrupted

if TYPE_CHECKING:
    from gemctl.launch.progress import Progress
    from gemctl.launchers.api import Launcher
    from gemctl.run.attempt import Attempt
    from gemctl.run.directory import RunDir
    from gemctl.run.submission import Detached, Job, Submission

POLL = 0.1
JOB_POLL = 5.0  # seconds between questions to a launcher
START_SECONDS = 15.0  # that --detach waits for a supervisor to begin
NEXT_SECONDS = 60.0  # that an attempt may take to come up where nobody can be asked
LAST_WORDS = 20  # lines of a supervisor that never began an attempt


def jobs_of(submissions: "Sequence[Submission]") -> "list[Job | None]":
    """What their launchers, each asked once, say of the submissions' jobs; never an error."""
    from gemctl.launchers.api import launcher_of
    from gemctl.run.submission import Job

    found: dict[Path, Job | None] = {}
    for kind in dict.fromkeys(submission.kind for submission in submissions):
        own = [submission for submission in submissions if submission.kind == kind]
        try:
            said = launcher_of(kind).jobs(own)
        except GemctlError as error:
            said = [Job("", "unknown", str(error)) for _ in own]
        found |= {submission.path: job for submission, job in zip(own, said, strict=True)}
    return [found[submission.path] for submission in submissions]


def job_of(submission: "Submission") -> "Job | None":
    """The same of one."""
    return jobs_of([submission])[0]


def own_attempt(run: "RunDir", submission: "Submission | None") -> "Attempt | None":
    """The run's last attempt, if it was made under the submission (or there is none: an older gemctl's run)."""
    last = run.last_attempt()
    if last is None or not last.claimed or (submission is not None and not submission.made(last)):
        return None
    return last


def comes_up(attempt: "Attempt") -> bool:
    """True until its agent has beaten for the first time, which is after all imports: silence means nothing yet."""
    return not attempt.end_file.exists() and b'"beat": 0' in attempt.beat()


def wait_for_start(run: "RunDir", submission: "Submission", launcher: "Launcher") -> "Detached":
    """Until the supervisor has made an attempt, or its job waits in a queue. GemctlError if it ended without one."""
    from gemctl.run.conclusion import name
    from gemctl.run.submission import Detached

    deadline = time.monotonic() + START_SECONDS
    while True:
        (job,) = launcher.jobs([submission])
        attempt = own_attempt(run, submission)
        if attempt is None and job is not None and job.state == "ended":
            raise GemctlError(not_started(run, submission, job))
        waits = job is not None and job.state == "waiting"
        if attempt is not None or waits or time.monotonic() > deadline:
            begun = attempt.number if attempt is not None else None
            return Detached(name(run), str(run.path), submission.number, begun, job)
        time.sleep(POLL)


def not_started(run: "RunDir", submission: "Submission", job: "Job") -> str:
    """What a supervisor that made no attempt has said, if it came to life, and what became of its job."""
    from gemctl.durable import read

    try:
        said = read(submission.output).decode(errors="replace").splitlines()[-LAST_WORDS:]
    except (OSError, InputError):
        said = []
    return "\n".join([f"run {run.run_id} did not start: no attempt was made ({job.detail})", *said])


class Vigil:
    """Whether anybody is left who goes on with a run. `job`: what a launcher has said of it last."""

    def __init__(self, run: "RunDir") -> None:
        self.run = run
        self.submission: Submission | None = None
        self.job: Job | None = None
        self._asked = float("-inf")
        self._sign: object = None
        self._signed = time.monotonic()

    def over(self) -> str | None:
        """Why nothing more comes: "" if the last attempt's own end says it; None: somebody is left."""
        from gemctl.run.attempt import may_go_on

        self.ask()
        attempt = own_attempt(self.run, self.submission)  # after the job: its last words are there when it has ended
        end = attempt.end() if attempt is not None else None
        if end is not None and not may_go_on(end):
            return ""
        if self.submission is not None and self.job is not None and self.job.state == "ended":
            return "" if end is not None else self._deserted(self.submission, self.job, attempt)
        return self._silent(attempt) if self.job is None or self.job.state == "unknown" else None

    def ask(self, now: bool = False) -> None:
        """Looks for a new submission and asks its launcher, now and then."""
        from gemctl.run.submission import newest

        if now or time.monotonic() - self._asked > JOB_POLL:
            self.submission = newest(self.run)
            self.job = job_of(self.submission) if self.submission is not None else None
            self._asked = time.monotonic()

    def _deserted(self, submission: "Submission", job: "Job", attempt: "Attempt | None") -> str:
        if attempt is None:
            return not_started(self.run, submission, job)
        return f"run {self.run.run_id}: its supervisor has gone ({job.detail}); attempt {attempt.number} left no end"

    def _silent(self, attempt: "Attempt | None") -> str | None:
        """Where nobody can be asked, the beat tells; on this process's own clock."""
        if attempt is None:
            return None if self.job is not None else f"run {self.run.run_id} was never started"
        ended = attempt.end_file.exists()
        sign = (attempt.number, ended, attempt.beat())
        if sign != self._sign:
            self._sign, self._signed = sign, time.monotonic()
        silence = time.monotonic() - self._signed
        if silence < (NEXT_SECONDS if ended or comes_up(attempt) else attempt.patience):
            return None
        what = "no attempt after it" if ended else f"no beat from {attempt.claim().host}"
        return f"run {self.run.run_id}: attempt {attempt.number}: {what} for {silence:.0f} s; whoever ran it is gone"


class Following:
    """Shows a submitted run until it ends; Ctrl-C files a stop request, a second one leaves the run alone."""

    def __init__(self, run: "RunDir", submission: "Submission", launcher: "Launcher", progress: "Progress") -> None:
        self.run, self.submission, self.launcher, self.progress = run, submission, launcher, progress
        self._vigil = Vigil(run)
        self._interrupts = self._handled = 0
        self._said = ""

    def follow(self) -> None:
        """Returns when the run has finished or was stopped. GemctlError with the cause, Interrupted after a Ctrl-C."""
        with _interrupts(self._interrupted):
            while (reason := self._vigil.over()) is None:
                if (attempt := own_attempt(self.run, self.submission)) is not None:
                    self.progress.follow(attempt)
                self._say_job()
                self._take_interrupts()
                time.sleep(POLL)
        self._conclude(reason)

    def _conclude(self, reason: str) -> None:
        """Raises what the supervisor has raised, or why there is none left."""
        from gemctl.run.conclusion import conclusion, hint

        attempt = own_attempt(self.run, self.submission)
        if reason and self._interrupts and attempt is None:
            raise Interrupted(f"run {self.run.run_id}: its job was taken out of the queue\n{hint(self.run)}")
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

    def _say_job(self) -> None:
        """Shows that the job waits, or that nobody answers for it."""
        job = self._vigil.job
        if job is not None and job.state in {"waiting", "unknown"} and job.detail != self._said:
            self.progress.note(job.detail)
        self._said = job.detail if job is not None else ""

    def _take_interrupts(self) -> None:
        from gemctl.run import requests
        from gemctl.run.conclusion import reference

        if self._interrupts == self._handled:
            return
        self._handled = self._interrupts
        if self._interrupts > 1:
            name = reference(self.run)
            raise Interrupted(f"run {name} goes on without this terminal; gemctl logs -f {name}, gemctl stop {name}")
        requests.file(self.run, "stop")
        if own_attempt(self.run, self.submission) is None:
            self.launcher.cancel(self.submission)
        self._vigil.ask(now=True)
        self.progress.note("stopping: the ranks save at the end of this step (Ctrl-C again leaves the run alone)")

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1


@contextmanager
def _interrupts(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
