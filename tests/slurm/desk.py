"""A user at the cluster's login host, with a folder on the storage that all nodes share, and a tiny job.

run = desk.train("launcher.nodes=2", "train.steps=20")
desk.until(lambda: run.ended(1), 60)
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemctl.run.attempt import Attempt
from gemctl.run.base import newest_verified
from gemctl.run.directory import RunDir
from gemctl.run.files import Record, read_log
from gemctl.run.manifest import read
from tests.slurm.cluster import CALL, Cluster
from tests.support.waiting import wait_for

LOG = ["--users", "50", "--items", "200", "--rows", "3000", "--eval-rows", "50"]
JOB = [
    "data.spec=log/spec.yaml",
    "data.train=log/train.parquet",
    "data.synthetic=null",
    "data.eval=null",
    "data.order=time",
    "train.global_batch=16",
    "model.dim=8",
    "checkpoint.every=5",
    "launcher=slurm",
    "launcher.nodes=2",
    "launcher.ranks_per_node=2",
    "launcher.slurm.exclusive=true",
]
BEGUN = 240.0  # seconds for a job's ranks to be at work
WAIT = 240.0  # seconds for what else a job does; only a test that fails waits for so long
STEPS = 40  # of a run that is compared with an undisturbed one
Saved = tuple[int, dict[str, str | None]]  # step of a checkpoint; object → hash of its content
GEMCTL = (sys.executable, "-P", "-m", "gemctl")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    told: str

    def json(self) -> Any:
        return json.loads(self.out)


class Command:
    """A gemctl command in the foreground of the login host."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self._popen = popen

    @property
    def runs(self) -> bool:
        return self._popen.poll() is None

    def done(self, seconds: float = 2 * WAIT) -> Done:
        """Waits for its end."""
        out, told = self._popen.communicate(timeout=seconds)
        return Done(self._popen.returncode, out, told)


class Watched:
    """A submitted run, seen from outside the cluster."""

    def __init__(self, run: RunDir) -> None:
        self.dir = run

    @property
    def id(self) -> str:
        return self.dir.run_id

    @property
    def submitted(self) -> bool:
        return (self.dir.submissions / "1" / "submitted.json").exists()

    def job(self, submission: int = 1) -> str:
        """SLURM's number for it."""
        file = self.dir.submissions / str(submission) / "submitted.json"
        return str(json.loads(file.read_text())["job"])

    def attempt(self, number: int) -> Attempt:
        return self.dir.attempt(number)

    def end(self, number: int) -> dict[str, Any] | None:
        """How an attempt ended; None before it has."""
        attempt = self.attempt(number)
        return attempt.end() if attempt.path.exists() else None

    def step(self, number: int) -> int:
        """The step that rank 0 of an attempt is in; −1 before it has begun one."""
        lines = read_log(self.attempt(number).rank_log(0))
        return max((line["step"] for line in lines if line["stage"] == "step"), default=-1)

    def lines(self, number: int, rank: int = 0) -> list[Record]:
        return read_log(self.attempt(number).rank_log(rank))

    def hosts(self, number: int) -> list[str]:
        """Hosts of an attempt in the order of its mesh."""
        return [host["name"] for host in json.loads(self.attempt(number).mesh.read_text())["hosts"]]

    def saved(self) -> Saved:
        """Step and content of the newest checkpoint: object → hash."""
        choice = newest_verified(self.dir)
        checkpoint = choice.checkpoint
        assert checkpoint is not None and choice.passed_over == []
        return checkpoint.step, {key: stored.content for key, stored in read(checkpoint.path).objects.items()}

    def supervisor_log(self, submission: int = 1) -> str:
        return (self.dir.submissions / str(submission) / "supervisor.log").read_text()


class Desk:
    """What a user does on the login host, in `folder`."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        done = self.gemctl("data", "synth", "log", *LOG)
        assert done.code == 0, done.told

    @staticmethod
    def words(*own: str) -> list[str]:
        """The tiny job's settings, with a test's own in their places."""
        return list({word.partition("=")[0]: word for word in (*JOB, *own)}.values())

    @staticmethod
    def now() -> float:
        return time.time()

    def gemctl(self, *words: str, inject: str = "") -> Done:
        """Runs a command to its end."""
        return self.start(*words, inject=inject).done(CALL)

    def start(self, *words: str, inject: str = "") -> Command:
        """Starts a command."""
        return Command(self.cluster.start(*GEMCTL, *words, folder=self.folder, GEMCTL_INJECT=inject))

    def train(self, *own: str, inject: str = "") -> Watched:
        """Submits the tiny job, detached."""
        done = self.gemctl("train", *self.words(*own), "--detach", inject=inject)
        assert done.code == 0, done.told
        return self.newest()

    def submitted(self, command: Command) -> Watched:
        """The run that a command in the foreground has just submitted."""
        before = len(self.runs())
        wait_for(lambda: len(self.runs()) > before or not command.runs, CALL, "a new run")
        run = self.newest()
        wait_for(lambda: run.submitted or not command.runs, CALL, "its job")
        return run

    def newest(self) -> Watched:
        return self.runs()[-1]

    def runs(self) -> list[Watched]:
        paths = sorted(self.folder.glob("runs/*/*/run.json"), key=lambda path: path.parent.name)
        return [Watched(RunDir.open(path.parent)) for path in paths]

    def at_work(self, run: Watched, number: int = 1, step: int = 0) -> None:
        """Waits until an attempt has reached a step."""
        what = f"step {step} of attempt {number}"
        wait_for(lambda: run.step(number) >= step, BEGUN, lambda: f"{what}{self.story(run)}")

    def ended(self, run: Watched, number: int, seconds: float = WAIT) -> dict[str, Any]:
        """Waits for an attempt's end."""
        what = f"the end of attempt {number}"
        wait_for(lambda: run.end(number) is not None, seconds, lambda: f"{what}{self.story(run)}")
        return run.end(number) or {}

    def job_state(self, job: str) -> str:
        """SLURM's word for it; empty if it has forgotten the job."""
        return self.cluster.run("squeue", "-h", "--states=all", "-j", job, "-o", "%T").stdout.strip()

    def job_ended(self, job: str, state: str, seconds: float = WAIT) -> None:
        wait_for(
            lambda: self.job_state(job) == state, seconds, lambda: f"job {job}: {state}, not {self.job_state(job)}"
        )

    def start_again(self, job: str, restarts: int = 1) -> None:
        """Waits until the job runs (or has run) for the time after `restarts`, and has it start as soon as it waits:
        SLURM 22.05 would wait for two minutes.

        In the second in which SLURM has revoked a job's credential, it takes the new one for the revoked one.
        """

        def started() -> bool:
            state, count = self.job_state(job), self.restarts(job)
            if state == "PENDING":
                time.sleep(2)
                self.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            return count >= restarts and state in {"RUNNING", "COMPLETED"}

        wait_for(started, WAIT, lambda: f"restart {restarts} of job {job}: {self.job_state(job)}")

    def restarts(self, job: str) -> int:
        """How often SLURM has queued the job again."""
        told = self.cluster.run("scontrol", "--oneliner", "show", "job", job).stdout
        return next((int(word[9:]) for word in told.split() if word.startswith("Restarts=")), 0)

    def story(self, run: Watched) -> str:
        """What there is to know of a run that a test waits for in vain."""
        logs = [path for number in (1, 2) for path in run.dir.path.glob(f"submissions/{number}/supervisor.log")]
        logs += sorted(run.dir.path.glob("attempts/*/logs/srun.log"))
        jobs = self.cluster.run("squeue", "--states=all").stdout
        return "\n".join(["", jobs, *(f"--- {path}\n{path.read_text()[-2000:]}" for path in logs)])
