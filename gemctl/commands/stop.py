"""`gemctl stop`: asks a run to save and stop, from any shell or machine that sees its directory.

gemctl stop RUN          # its ranks agree on it at the end of their step, and save
gemctl stop RUN --now    # ends them at once: what is not saved is lost

A run that still waits in a scheduler's queue is removed from it.
"""

import argparse
import time
from typing import Literal

from gemctl.errors import InputError
from gemctl.launch.liveness import attempt_of, job_of
from gemctl.launchers.api import launcher_of
from gemctl.run import requests
from gemctl.run.access import written_as
from gemctl.run.attempt import Attempt, may_go_on, watch_beat
from gemctl.run.conclusion import reference
from gemctl.run.directory import RunDir, find
from gemctl.run.requests import StopFiled
from gemctl.run.submission import Job, Submission, newest

STARTING = 60.0  # seconds from an attempt's claim in which its agents may still send their first heartbeat
ORDER_AFTER = 3.0  # seconds until --now kills the agents itself, if the supervisor has not
END_SECONDS = 10.0  # that --now waits for the end


def run(args: argparse.Namespace) -> StopFiled:
    """InputError if nothing is running, or no process is left to handle the request."""
    target = find(args.run, args.root)
    with written_as(target.path):
        return _stop(target, args.now)


def _stop(target: RunDir, now: bool) -> StopFiled:
    submission = newest(target)
    attempt = attempt_of(target, submission)
    end = attempt.end() if attempt is not None else None
    if end is not None and not may_go_on(end):
        raise InputError(_not_running(target, attempt, None))
    if attempt is not None and end is None and watch_beat(attempt) is not None:
        return _request(target, attempt, now)
    job = job_of(submission) if submission is not None else None
    if submission is not None and job is not None and job.state == "waiting":
        return _withdraw(target, submission, job)
    if (job is not None and job.state == "running") or (attempt is not None and end is None and _starts(attempt, job)):
        return _request(target, attempt if end is None else None, now)
    raise InputError(_not_running(target, attempt, job))


def _request(run: RunDir, attempt: Attempt | None, now: bool) -> StopFiled:
    """Files the request; with `now`, waits for the end."""
    number = requests.file(run, "kill" if now else "stop").number
    ended = now and attempt is not None and _end_now(attempt)
    outcome: Literal["asked", "ordered", "ended"] = "ended" if ended else "ordered" if now else "asked"
    return StopFiled(str(run.path), attempt.number if attempt is not None else None, number, outcome)


def _end_now(attempt: Attempt) -> bool:
    """True once the attempt has ended; if its supervisor does not end it, its agents are ordered to."""
    start = time.monotonic()
    while not attempt.end_file.exists():
        passed = time.monotonic() - start
        if passed > END_SECONDS:
            return False
        if passed > ORDER_AFTER and not attempt.kill_order.exists():
            attempt.order_kill("gemctl stop --now")
        time.sleep(0.05)
    return True


def _withdraw(run: RunDir, submission: Submission, job: Job) -> StopFiled:
    """Removes the job from its queue; if it starts at this very moment, it finds the request."""
    number = requests.file(run, "stop").number
    launcher_of(submission.kind).cancel(submission)
    return StopFiled(str(run.path), None, number, "withdrawn", job.detail)


def _starts(attempt: Attempt, job: Job | None) -> bool:
    """True if agents may still be starting on a host whose processes cannot be seen from here."""
    unknown = job is not None and job.state == "unknown"
    return unknown and time.time() - attempt.claim().time < STARTING


def _not_running(run: RunDir, attempt: Attempt | None, job: Job | None) -> str:
    detail = f" ({job.detail})" if job is not None else ""
    if attempt is None and job is not None and job.state == "unknown":
        return f"{run.run_id}: not stopped, as the state of its job is unknown{detail}; try again"
    if attempt is None:
        return f"{run.run_id}: is not running, so there is nothing to stop{detail}"
    if (end := attempt.end()) is not None:
        return f"{run.run_id}: is not running: attempt {attempt.number} {end['outcome']}{detail}"
    return (
        f"{run.run_id}: attempt {attempt.number} has no end record and sends no heartbeat: no process is left to "
        f"handle a stop request{detail}; it ran on host {attempt.claim().host}; "
        f"to resume it: gemctl resume {reference(run)}"
    )
