"""What the user submitted when a run was started or resumed: written before anything starts, and kept.

    submissions/<n>/
      config.yaml plan.json spec.yaml inputs.json   copied by its attempts
      request.json            the launch request (a TorchX AppDef) and its first attempt; written last
      job.*                   the scheduler's batch script, if there is a scheduler
      submitted.json          who runs it: host and pid of its supervisor, or the scheduler's job
      supervisor.log          output of a supervisor without a terminal

    gemctl supervise RUN      # runs the attempts of the newest submission

A newer submission supersedes an older one: a job that waited too long, or was requeued, does not take the run back.
"""

import os
import socket
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from gemctl import process
from gemctl.durable import create, make_folder, make_folders
from gemctl.run.attempt import Attempt, Base
from gemctl.run.directory import RunDir
from gemctl.run.files import Record, create_json, is_whole, numbered, read_json, read_whole
from gemctl.run.inputs import Inputs
from gemctl.run.inputs import write as write_inputs
from gemctl.run.manifest import number_after

JobState = Literal["waiting", "running", "ended", "unknown"]


@dataclass(frozen=True)
class Job:
    """The state of a submission's job. `detail`: for messages, as "SLURM job 12: PENDING, Priority", or why the
    scheduler could not be queried ("SLURM job 12: squeue gave no answer in 10 s")."""

    id: str
    state: JobState
    detail: str


@dataclass(frozen=True)
class Detached:
    """A run whose supervisor is another process: `job`. `attempt`: the one that has started, None while it waits.

    `run`: its name on a command line here; `path`: its directory.
    """

    run: str
    path: str
    submission: int
    attempt: int | None
    job: Job | None


@dataclass(frozen=True)
class Swept:
    """One run of a sweep: its overrides, and its task in the job array."""

    run: str
    settings: list[str]
    job: str


@dataclass(frozen=True)
class Sweep:
    """The submitted runs."""

    runs: list[Swept]


class Submission:
    """The files of one submission; its folder exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.name)
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.request = path / "request.json"
        self.submitted_file = path / "submitted.json"
        self.output = path / "supervisor.log"

    @property
    def whole(self) -> bool:
        """Whether all of it was written; request.json is written last."""
        return read_whole(self.request) is not None and is_whole(self.config) and is_whole(self.plan)

    @cached_property
    def asked(self) -> Record:
        """request.json, which is written once."""
        return read_json(self.request)

    @property
    def kind(self) -> str:
        """Its launcher.kind."""
        return str(self.asked["kind"])

    @property
    def first_attempt(self) -> int:
        """Attempts from this number on belong to it, or to a later submission."""
        return int(self.asked["first_attempt"])

    def made(self, attempt: Attempt) -> bool:
        """True if the attempt belongs to it, or to a later submission."""
        return attempt.number >= self.first_attempt

    @property
    def first_request(self) -> int:
        """Requests with lower numbers are for attempts before it."""
        return int(self.asked["first_request"])

    @property
    def base(self) -> Base | None:
        """What its first attempt starts from, verified at submission (or step 0 without a checkpoint, if the user asked
        for that); None: the newest checkpoint at its start."""
        base = self.asked.get("base")
        return Base(**base.fields(Base)) if base is not None else None

    def submitted(self) -> dict[str, Any] | None:
        """Who runs it: `host` and `pid`, or `job`, and `time`; None before it was launched, and in a copy of the run,
        since process and job belong to the original."""
        facts = read_whole(self.submitted_file)
        return None if facts is None or self._copied_from(facts.get("run", "")) else facts

    def _copied_from(self, run: str) -> bool:
        """Whether this is a copy of the run in the directory `run`. A run that was moved has left nothing there; one
        reached by another path or mount is the same file."""
        try:
            original = (Path(run) / self.path.parent.name / self.path.name / self.submitted_file.name).stat()
        except (OSError, ValueError):  # ValueError: not a path
            return False
        return original.st_ino != self.submitted_file.stat().st_ino

    def write_process(self, pid: int) -> None:
        """Records that process `pid` of this machine is its supervisor."""
        self.write_submitted(pid=pid, started=process.started(pid))

    def write_submitted(self, **facts: Any) -> None:
        """Records who runs it, for example a scheduler's `job`."""
        known = {"time": time.time(), "host": socket.gethostname(), "run": str(self.path.parent.parent)}
        create_json(self.submitted_file, {**known, **facts})


def submit(run: RunDir, config: str, plan: str, request: dict[str, Any], inputs: Inputs | None = None) -> Submission:
    """Creates the run's next submission. `config`, `plan`: config.yaml and plan.json; `request`: `kind`, `app` and, if
    a preflight has verified it, the `base` of its first attempt; `inputs`: the data that it reads."""
    submission = Submission(_next_folder(run))
    create(submission.config, config)
    create(submission.plan, plan)
    if inputs is not None:
        write_inputs(inputs, submission.path, run.path)
    facts = {
        "time": time.time(),
        "pid": os.getpid(),
        "first_attempt": number_after(run, run.last_attempt()),
        "first_request": 1 + sum(1 for _ in run.requests.glob("*.json")),
    }
    create_json(submission.request, {**facts, **request})
    return submission


def _next_folder(run: RunDir) -> Path:
    number = 1 + max(numbered(run.submissions), default=0)
    while True:
        folder = run.submissions / str(number)
        try:
            make_folders(run.submissions)  # runs of older versions of gemctl have none
            make_folder(folder)
            return folder
        except FileExistsError:  # another process's, or ours if a file server retried: an empty one does not count
            number += 1


def submissions(run: RunDir) -> list[Submission]:
    """All submissions of the run, oldest first, except those without a request.json, as their writer died, and those
    whose files a power loss truncated."""
    found = [Submission(run.submissions / str(number)) for number in numbered(run.submissions)]
    return [submission for submission in found if submission.whole]


def newest(run: RunDir) -> Submission | None:
    """The newest submission; None for a run of an older version of gemctl, or one that was never launched."""
    return next(reversed(submissions(run)), None)
