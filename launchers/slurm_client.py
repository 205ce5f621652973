"""Calls of SLURM's client programs, each with a time-out: without a controller to answer, they would wait for minutes.

states(["1234"])        # [Job("1234", "waiting", "SLURM job 1234: PENDING: Priority")]
"""

import re
import subprocess
import time
from collections.abc import Sequence
from typing import IO

from gemctl import env
from gemctl.errors import GemctlError
from gemctl.run.submission import Job, JobState

SECONDS = 20.0
REQUEUE_SECONDS = 60.0
VERDICT_SECONDS = 600.0
POLL = 1.0
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"}
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
TEXT = re.compile(r"(?:(.*?) )??(JobName|Comment|Command|WorkDir|StdErr|StdIn|StdOut)=(.*)$")
UNKNOWN_ID, FORGOTTEN = "Invalid job id", "SLURM has forgotten it"


class SlurmError(GemctlError):
    """SLURM refused a call or did not answer; the message says which call and quotes SLURM."""


def call(*command: str, seconds: float = SECONDS) -> str:
    """The program's output. SlurmError if it is missing, fails or takes too long."""
    name = command[0]
    try:
        done = subprocess.run(
            command, env=env.for_slurm(), stdin=subprocess.DEVNULL, capture_output=True,
            encoding="utf-8", errors="replace", timeout=seconds, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise SlurmError(f"{name}: not found: this machine has no SLURM client on its PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"SLURM does not answer: {name} timed out after {seconds:.0f} s") from None
    if done.returncode != 0:
        messages = (
            line.removeprefix(f"{name}: ").removeprefix("error: ") for line in _lines(done.stderr or done.stdout)
        )
        raise SlurmError(f"{name}: {'; '.join(messages) or f'exit code {done.returncode}'}")
    return done.stdout.strip()


def start_step(command: Sequence[str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Starts srun in a session of its own. SlurmError if it cannot be started."""
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be started on this node: {error.strerror}") from None


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def submit(script: str) -> str:
    """Submits a batch script; returns the id of its job."""
    return call("sbatch", "--parsable", script, seconds=2 * SECONDS).split(";")[0]


def states(jobs: Sequence[str]) -> list[Job]:
    """The state of each job, by one call."""
    if not jobs:
        return []
    try:
        answer = call(
            "squeue", "--noheader", f"--jobs={','.join(jobs)}", "--states=all", "--array", "--format=%i|%T|%r"
        )
    except SlurmError as error:
        if UNKNOWN_ID not in str(error):
            return [Job(job, "unknown", f"SLURM job {job}: {error}") for job in jobs]
        answer = ""
    rows = (line.split("|", 2) for line in answer.splitlines())
    found = {job: (word, reason) for job, word, reason in rows}
    return [_job(job, *found.get(job, ("", ""))) for job in jobs]


def _job(job: str, word: str, reason: str) -> Job:
    if not word:
        return Job(job, "ended", f"SLURM job {job}: {FORGOTTEN}")
    detail = word if reason in {"", "None"} else f"{word}: {reason}"
    return Job(job, kind(word), f"SLURM job {job}: {detail}")


def kind(word: str) -> JobState:
    """The state that SLURM's word for it means."""
    return "waiting" if word in WAITING else "running" if word in RUNNING else "ended"


def word(job: str) -> str | None:
    """SLURM's word for a job's state, from its accounting records too; None if it does not know the job."""
    try:
        return call("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T").split()[0]
    except (SlurmError, IndexError):
        pass
    try:
        return call("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}", "--format=State").split()[0]
    except (SlurmError, IndexError):
        return None


def own_jobs() -> dict[str, str]:
    """The states, in SLURM's words, of all jobs of this user that it still remembers."""
    lines = call("squeue", "--noheader", "--me", "--states=all", "--format=%i %T").splitlines()
    return dict(line.split() for line in lines)


def facts(job: str) -> dict[str, str]:
    """The fields of a job that SLURM still remembers, by SLURM's names."""
    return parse_facts(call("scontrol", "show", "job", job))


def parse_facts(text: str) -> dict[str, str]:
    """The fields of scontrol's output for a job. Names and paths, which may hold anything, extend to the line's end."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        pairs, key, value = match.groups() if (match := TEXT.match(line.strip())) else (line, "", "")
        found |= dict(pair.split("=", 1) for pair in (pairs or "").split() if "=" in pair)
        found |= {key: value} if key else {}
    return found


def requeue(job: int, restarts: int, only_if_preempted: bool) -> bool:
    """Has SLURM end and requeue a job that has been restarted `restarts` times; tries for up to a minute.

    False if the caller must not requeue it: the job is ending, or was restarted while this host was unreachable, or,
    with `only_if_preempted`, SLURM is not preempting it.
    """
    deadline = time.monotonic() + REQUEUE_SECONDS
    while True:
        try:
            job_facts = facts(str(job))
            ours = job_facts["JobState"] == "RUNNING" and job_facts["Restarts"] == str(restarts)
            if not ours or (only_if_preempted and job_facts.get("PreemptTime", "None") == "None"):
                return False
            call("scontrol", "requeue", str(job))
            return True
        except SlurmError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL)


def wait_for_verdict(hosts: list[str]) -> None:
    """Waits until SLURM has marked a silent one of `hosts` as down, for up to twice its default SlurmdTimeout.

    SLURM then requeues the job itself, which ends this process, unless the job runs with --no-kill. Requeueing before
    that leaves SLURM 22.05 with nodes that look idle and are never allocated.
    """
    deadline = time.monotonic() + VERDICT_SECONDS
    while time.monotonic() < deadline and not any(" down" in state for state in dead(hosts).values()):
        time.sleep(POLL)


def cancel(job: str) -> None:
    call("scancel", job)


def hostnames(nodelist: str) -> list[str]:
    """The hosts of a list like n[1-3,7], in order."""
    return call("scontrol", "show", "hostnames", nodelist).split()


def dead(hosts: list[str]) -> dict[str, str]:
    """The hosts that SLURM considers dead, and why; none while it does not answer."""
    try:
        lines = call("sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %T").splitlines()
    except SlurmError:
        return {}
    states = dict(line.split() for line in lines)
    gone = {host: state for host, state in states.items() if state.startswith(("down", "fail")) or state.endswith("*")}
    return {host: f"SLURM reports it as {state}" for host, state in gone.items()}
