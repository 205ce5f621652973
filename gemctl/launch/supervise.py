"""The supervisor of a submitted run in this process: attempt after attempt, continuing after the last one there is."""

from gemctl.config.compose import from_yaml
from gemctl.errors import InputError, Interrupted, TooFewHosts
from gemctl.launch.progress import Progress
from gemctl.launchers.api import RequeueReason, launcher_of
from gemctl.recover.context import Prepared
from gemctl.recover.supervisor import Requeue, run_attempts
from gemctl.run.attempt import Attempt
from gemctl.run.conclusion import reference
from gemctl.run.directory import RunDir
from gemctl.run.files import read_text
from gemctl.run.inputs import texts
from gemctl.run.manifest import number_after
from gemctl.run.requests import filed
from gemctl.run.submission import Submission, newest
from gemctl.terminal import note


def supervise(run: RunDir, submission: Submission, last: Attempt | None) -> None:
    """Runs the submission's attempts in this process, with progress on stderr.

    `last`: the run's last attempt, which the caller knows to be dead. Returns at once if it has ended as requested.

    Raises InputError if a newer submission exists or another process has started an attempt after `last`; RunFailed
    with the root cause; Interrupted with the command that resumes the run, or TooFewHosts, unless a scheduler restarts
    this process.
    """
    _refuse_superseded(run, submission)
    unseen = _first_unseen_request(submission, last)
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
    module = launcher_of(launcher.kind)
    with Progress(steps=config.train.steps) as progress:
        number = number_after(run, last)
        try:
            run_attempts(run, number, prepared, config.recover, module.agents(run, config), progress)
        except (Interrupted, TooFewHosts) as ended:
            reason_to_requeue = _requeue_reason(ended)
            if reason_to_requeue is None or not module.requeue(config, reason_to_requeue):
                raise
            progress.note(f"{ended}\nthe scheduler will start it again")


def _requeue_reason(ended: Interrupted | TooFewHosts) -> RequeueReason | None:
    if isinstance(ended, TooFewHosts):
        return "lost_hosts" if ended.lost else None
    return "time_limit" if isinstance(ended, Requeue) else "terminated"


def _refuse_superseded(run: RunDir, submission: Submission) -> None:
    last = newest(run)
    if last is not None and last.number > submission.number:
        raise InputError(
            f"{run.run_id}: submission {submission.number} is superseded: submission {last.number} was made after it"
        )


def _nothing_to_do(run: RunDir, submission: Submission, last: Attempt | None, unseen: int) -> str | None:
    """Why no attempt is needed: the last one ended as requested, or a stop request came before this process."""
    end = last.end() if last is not None and submission.made(last) else None
    preempted = end is not None and end.get("kind") is not None  # by SIGTERM: since this process runs, it was requeued
    if end is not None and end["outcome"] in {"finished", "stopped", "killed"} and not preempted:
        return f"run {run.run_id}: attempt {last.number if last else 0} has ended: {end['outcome']}"
    if any(request.ends and request.signal is None for request in filed(run, unseen)):
        return f"run {run.run_id}: was asked to stop before this attempt; to resume it: gemctl resume {reference(run)}"
    return None


def _first_unseen_request(submission: Submission, last: Attempt | None) -> int:
    """Number of the first request that no attempt of the submission has handled; its last one may have died first."""
    own = last is not None and submission.made(last) and last.claimed
    return last.claim().first_request if last is not None and own else submission.first_request
