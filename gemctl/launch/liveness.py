"""Whether a run is alive: the heartbeat of its attempt, and the job or process of its supervisor.

    refuse_running(run, run.last_attempt())                    # InputError if it is running, or about to

The run's files are read as often as needed; a launcher is queried only every few seconds.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from gemctl.durable import read
from gemctl.errors import GemctlError, InputError
from gemctl.launchers.api import launcher_of
from gemctl.report.status import open_submission
from gemctl.run.attempt import Attempt, may_go_on, watch_beat
from gemctl.run.conclusion import reference
from gemctl.run.directory import RunDir
from gemctl.run.submission import Job, Submission, newest
from gemctl.terminal import note

JOB_POLL = 5.0  # seconds between queries to a launcher
NEXT_SECONDS = 60.0  # that the next attempt may take to start where no launcher can be queried
LAST_LINES = 20  # quoted from the output of a supervisor that never started an attempt


def jobs_of(submissions: Sequence[Submission]) -> list[Job | None]:
    """The submissions' jobs, by one query to each launcher concerned; never an error."""
    found: dict[Path, Job | None] = {}
    for kind in dict.fromkeys(submission.kind for submission in submissions):
        own = [submission for submission in submissions if submission.kind == kind]
        try:
            jobs = launcher_of(kind).jobs(own)
        except GemctlError as error:
            jobs = [Job("", "unknown", str(error)) for _ in own]
        found |= {submission.path: job for submission, job in zip(own, jobs, strict=True)}
    return [found[submission.path] for submission in submissions]


def job_of(submission: Submission) -> Job | None:
    """The job of one submission; never an error."""
    return jobs_of([submission])[0]


def attempt_of(run: RunDir, submission: Submission | None) -> Attempt | None:
    """The run's last attempt if it belongs to the submission; with None, as in runs of an older gemctl, any attempt."""
    last = run.last_attempt()
    if last is None or not last.claimed or (submission is not None and not submission.made(last)):
        return None
    return last


def is_starting(attempt: Attempt) -> bool:
    """True until its agent has sent its first heartbeat, which is after all imports: silence means nothing yet."""
    return not attempt.end_file.exists() and b'"beat": 0' in attempt.beat()


def refuse_running(run: RunDir, last: Attempt | None) -> None:
    """InputError if the run's last attempt sends heartbeats, or if a job is queued or running that will start one."""
    if last is not None:
        refuse_beating(run, last)
    submission = open_submission(run)
    job = job_of(submission) if submission is not None else None
    own = attempt_of(run, submission)
    starts = job is not None and job.state == "running" and (own is None or is_starting(own))
    if job is not None and (starts or job.state == "waiting"):
        raise InputError(f"{run.run_id}: was submitted and has not ended: {job.detail}; gemctl stop {reference(run)}")


def refuse_beating(run: RunDir, attempt: Attempt) -> None:
    """InputError if the attempt still sends heartbeats."""
    if not attempt.end_file.exists():
        note(f"attempt {attempt.number} has no end record; watching up to {attempt.patience:.0f} s for a heartbeat")
    if watch_beat(attempt) is not None:
        age = max(0.0, time.time() - attempt.heartbeat.stat().st_mtime)
        host = f"host {attempt.claim().host}" if attempt.claimed else "a host that its claim.json does not name"
        raise InputError(
            f"{run.run_id}: attempt {attempt.number} runs on {host}, its last heartbeat is {age:.1f} s "
            f"old; to end it: gemctl stop {reference(run)}"
        )


def not_started(run: RunDir, submission: Submission, job: Job) -> str:
    """The last output of a supervisor that started no attempt, and what became of its job."""
    try:
        output = read(submission.output).decode(errors="replace").splitlines()[-LAST_LINES:]
    except (OSError, InputError):
        output = []
    return "\n".join([f"run {run.run_id} did not start: it has no attempt ({job.detail})", *output])


class SupervisorWatch:
    """Watches whether a run still has a supervisor. `job`: its job, as the launcher last reported it."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.submission: Submission | None = None
        self.job: Job | None = None
        self._queried = float("-inf")
        self._seen: object = None
        self._changed = time.monotonic()

    def over(self) -> str | None:
        """None while a supervisor is left; else why there is none: "" if the last attempt's end record says it."""
        self.query()
        attempt = attempt_of(self.run, self.submission)  # after the job: once that has ended, all records are written
        end = attempt.end() if attempt is not None else None
        if end is not None and not may_go_on(end):
            return ""
        if self.submission is not None and self.job is not None and self.job.state == "ended":
            return "" if end is not None else self._abandoned(self.submission, self.job, attempt)
        return self._silent(attempt) if self.job is None or self.job.state == "unknown" else None

    def query(self, now: bool = False) -> None:
        """Looks for a new submission and queries its launcher, every few seconds or `now`."""
        if now or time.monotonic() - self._queried > JOB_POLL:
            self.submission = newest(self.run)
            self.job = job_of(self.submission) if self.submission is not None else None
            self._queried = time.monotonic()

    def _abandoned(self, submission: Submission, job: Job, attempt: Attempt | None) -> str:
        if attempt is None:
            return not_started(self.run, submission, job)
        return (
            f"run {self.run.run_id}: its supervisor is gone ({job.detail}); attempt {attempt.number} has no end record"
        )

    def _silent(self, attempt: Attempt | None) -> str | None:
        """Where no launcher can be queried, the heartbeat decides, timed by this process's own clock."""
        if attempt is None:
            return None if self.job is not None else f"run {self.run.run_id} was never started"
        ended = attempt.end_file.exists()
        seen = (attempt.number, ended, attempt.beat())
        if seen != self._seen:
            self._seen, self._changed = seen, time.monotonic()
        silence = time.monotonic() - self._changed
        if silence < (NEXT_SECONDS if ended or is_starting(attempt) else attempt.patience):
            return None
        what = "no next attempt" if ended else f"no heartbeat from {attempt.claim().host}"
        return f"run {self.run.run_id}: attempt {attempt.number}: {what} for {silence:.0f} s; its supervisor is gone"
