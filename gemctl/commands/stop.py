"""`gemctl stop`: asks a run to save and end, from any shell or machine that sees its directory.

gemctl stop RUN          # its ranks agree on it at the end of their step, and save
gemctl stop RUN --now    # ends them at once: what is not saved is lost

A run that still waits in a scheduler's queue is taken out of it.
"""

import argparse
import time
from typing import TYPE_CHECKING, Literal

from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.run.attempt import Attempt
    from gemctl.run.directory import RunDir
    from gemctl.run.requests import StopFiled
    from gemctl.run.submission import Job, Submission

HELP = "Ask a run to save and end."
STARTING = 60.0  # seconds that an attempt may take until its agents beat
ORDER_AFTER = 3.0  # seconds that a supervisor has to end all at once, before its agents are told to
END_SECONDS = 10.0  # that --now waits for the end


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument("--now", action="store_true", help="end it at once: steps since the last checkpoint are lost")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> "StopFiled":
    """InputError where nothing runs, or nobody is alive to take the request."""
    from gemctl.run.access import written_as
    from gemctl.run.directory import find

    target = find(args.run, args.root)
    with written_as(target.path):
        return _stop(target, args.now)


def _stop(target: "RunDir", now: bool) -> "StopFiled":
    from gemctl.launch.follow import job_of, own_attempt
    from gemctl.run.attempt import may_go_on, watch_beat
    from gemctl.run.submission import newest

    submission = newest(target)
    attempt = own_attempt(target, submission)
    end = attempt.end() if attempt is not None else None
    if end is not None and not may_go_on(end):
        raise InputError(_nobody(target, attempt, None))
    if attempt is not None and end is None and watch_beat(attempt) is not None:
        return _ask(target, attempt, now)
    job = job_of(submission) if submission is not None else None
    if submission is not None and job is not None and job.state == "waiting":
        return _withdraw(target, submission, job)
    if (job is not None and job.state == "running") or (attempt is not None and end is None and _starts(attempt, job)):
        return _ask(target, attempt if end is None else None, now)
    raise InputError(_nobody(target, attempt, job))


def _ask(run: "RunDir", attempt: "Attempt | None", now: bool) -> "StopFiled":
    """Files the request; with `now` it waits for the end."""
    from gemctl.run import requests

    number = requests.file(run, "kill" if now else "stop").number
    ended = now and attempt is not None and _end_now(attempt)
    outcome: Literal["asked", "ordered", "ended"] = "ended" if ended else "ordered" if now else "asked"
    return requests.StopFiled(str(run.path), attempt.number if attempt is not None else None, number, outcome)


def _end_now(attempt: "Attempt") -> bool:
    """True once the attempt has ended; where its supervisor does not end it, its agents are ordered to."""
    start = time.monotonic()
    while not attempt.end_file.exists():
        passed = time.monotonic() - start
        if passed > END_SECONDS:
            return False
        if passed > ORDER_AFTER and not attempt.kill_order.exists():
            attempt.order_kill("gemctl stop --now")
        time.sleep(0.05)
    return True


def _withdraw(run: "RunDir", submission: "Submission", job: "Job") -> "StopFiled":
    """Takes the job out of its queue; should it start in this moment, it finds the request."""
    from gemctl.launchers.api import launcher_of
    from gemctl.run import requests

    number = requests.file(run, "stop").number
    launcher_of(submission.kind).cancel(submission)
    return requests.StopFiled(str(run.path), None, number, "withdrawn", job.detail)


def _starts(attempt: "Attempt", job: "Job | None") -> bool:
    """True if agents may still come up where nobody can be asked."""
    unknown = job is not None and job.state == "unknown"
    return unknown and time.time() - attempt.claim().time < STARTING


def _nobody(run: "RunDir", attempt: "Attempt | None", job: "Job | None") -> str:
    from gemctl.run.conclusion import reference

    said = f" ({job.detail})" if job is not None else ""
    if attempt is None and job is not None and job.state == "unknown":
        return f"{run.run_id}: nobody can tell whether its job waits, so it was not stopped{said}; try again"
    if attempt is None:
        return f"{run.run_id}: does not run, so there is nothing to stop{said}"
    if (end := attempt.end()) is not None:
        return f"{run.run_id}: does not run: attempt {attempt.number} {end['outcome']}{said}"
    return (
        f"{run.run_id}: attempt {attempt.number} left no end and does not beat: nobody is alive to take a stop "
        f"request{said}; it ran on host {attempt.claim().host}; gemctl resume {reference(run)} goes on"
    )
