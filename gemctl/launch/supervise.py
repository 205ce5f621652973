"""The supervisor of a submitted run in this process: attempt after attempt, from where they stand."""

import time
from typing import TYPE_CHECKING, Literal

from gemctl.errors import InputError, Interrupted, TooFewHosts

if TYPE_CHECKING:
    from gemctl.run.attempt import Attempt
    from gemctl.run.directory import RunDir
    from gemctl.run.submission import Submission


def supervise(run: "RunDir", submission: "Submission", last: "Attempt | None") -> None:
    """Runs the submission's attempts in this process, with progress on stderr, from where they stand.

    `last`: the run's last attempt, which the caller knows to be dead. Returns at once if it has ended as it was asked
    to. Raises InputError where a newer submission has the run, or another process has begun an attempt after `last`;
    RunFailed with the root cause; Interrupted with the command that goes on, or
    TooFewHosts, unless a scheduler brings this process back.
    """
    from gemctl.config.compose import from_yaml
    from gemctl.launch.progress import Progress
    from gemctl.launchers.api import launcher_of
    from gemctl.recover.context import Prepared
    from gemctl.recover.supervisor import Requeue, run_attempts
    from gemctl.run.files import read_text
    from gemctl.run.inputs import texts
    from gemctl.run.manifest import number_after
    from gemctl.run.requests import filed
    from gemctl.terminal import note

    _refuse_overtaken(run, submission)
    unseen = _unseen(submission, last)
    looked = unseen + len(filed(run, unseen))
    if (reason := _nothing_to_do(run, submission, last, unseen)) is not None:
        note(reason)
        return
    text = read_text(submission.config)
    config = from_yaml(text, str(submission.config))
    launcher = config.launcher
    prepared = Prepared(
        text, read_text(submission.plan), launcher.nodes, launcher.ranks_per_node,
        submission.first_attempt, submission.base, looked, texts(submission.path),
    )  # fmt: skip
    launched = launcher_of(launcher.kind)
    with Progress(steps=config.train.steps) as progress:
        number = number_after(run, last)
        try:
            run_attempts(run, number, prepared, config.recover, launched.agents(run, config), progress)
        except (Interrupted, TooFewHosts) as ended:
            if isinstance(ended, TooFewHosts) and not ended.lost:
                raise
            why: Literal["due", "lost", "told"] = "lost" if isinstance(ended, TooFewHosts) else "told"
            if isinstance(ended, Requeue):
                why = "due"
            if not launched.bring_back(config, why):
                raise
            progress.note(f"{ended}\nthe scheduler starts it again")


def _refuse_overtaken(run: "RunDir", submission: "Submission") -> None:
    from gemctl.run.submission import newest

    last = newest(run)
    if last is not None and last.number > submission.number:
        raise InputError(
            f"{run.run_id}: submission {submission.number} is void: submission {last.number} was made after it"
        )


def _nothing_to_do(run: "RunDir", submission: "Submission", last: "Attempt | None", unseen: int) -> str | None:
    """Why no attempt has to be made: the last one ended as wanted, or a stop request found nobody to take it."""
    from gemctl.run.conclusion import reference
    from gemctl.run.requests import filed

    end = last.end() if last is not None and submission.made(last) else None
    taken_away = end is not None and end.get("kind") is not None  # by SIGTERM: where this comes, the job was requeued
    if end is not None and end["outcome"] in {"finished", "stopped", "killed"} and not taken_away:
        return f"run {run.run_id}: attempt {last.number if last else 0} has ended: {end['outcome']}"
    if any(wish.ends and wish.signal is None for wish in filed(run, unseen)):
        return f"run {run.run_id}: was asked to stop before this attempt; gemctl resume {reference(run)} goes on"
    return None


def _unseen(submission: "Submission", last: "Attempt | None") -> int:
    """Number of the first request that no attempt of the submission has taken for good: its last one may have died."""
    own = last is not None and submission.made(last) and last.claimed
    return last.claim().first_request if last is not None and own else submission.first_request


def refuse_living(run: "RunDir", attempt: "Attempt") -> None:
    """InputError if the attempt still beats."""
    from gemctl.run.attempt import watch_beat
    from gemctl.run.conclusion import reference
    from gemctl.terminal import note

    if not attempt.end_file.exists():
        note(f"attempt {attempt.number} left no end; watching up to {attempt.patience:.0f} s for a beat")
    if watch_beat(attempt) is not None:
        age = max(0.0, time.time() - attempt.heartbeat.stat().st_mtime)
        host = f"host {attempt.claim().host}" if attempt.claimed else "a host that its claim.json does not name"
        raise InputError(
            f"{run.run_id}: attempt {attempt.number} runs on {host}, its last beat is {age:.1f} s "
            f"old; to end it: gemctl stop {reference(run)}"
        )
