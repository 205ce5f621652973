"""`gemctl logs`: the output and events of a run's processes, the cause of a failure first.

gemctl logs RUN                  # the newest attempt: supervisor, training, and the rank that failed first or rank 0
gemctl logs RUN -f --merged      # all ranks, from now to the end of the run
"""

import argparse
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gemctl.errors import InputError, Interrupted
from gemctl.launch.liveness import SupervisorWatch, attempt_of, job_of
from gemctl.render.status import write_log
from gemctl.report.logs import AttemptTail, Line, Selection
from gemctl.run.attempt import Attempt
from gemctl.run.conclusion import conclusion
from gemctl.run.directory import RunDir, find
from gemctl.run.submission import newest

POLL = 0.2


def run(args: argparse.Namespace) -> None:
    target = find(args.run, args.root)
    if args.tail is not None and args.tail < 1:
        raise InputError(f"--tail {args.tail}: give a number of lines, 1 or more")
    selection = Selection(args.rank, args.merged, args.tail)
    if args.follow and args.attempt is not None:
        raise InputError("--attempt shows one attempt, --follow the newest and all later ones: use only one of them")
    if not args.follow:
        write_log(_shown(target, _attempt(target, args), selection), args.json)
        return
    try:
        write_log(_followed(target, selection), args.json)
    except KeyboardInterrupt as interrupt:
        if type(interrupt) is not KeyboardInterrupt:  # SIGTERM
            raise
        raise Interrupted(f"no longer following run {target.run_id}, which is left as it is") from None


def _attempt(run: RunDir, args: argparse.Namespace) -> Attempt:
    """The attempt that was asked for. InputError if there is none, or if it has no rank of that number."""
    attempts = {attempt.number: attempt for attempt in run.attempts() if attempt.claimed}
    number = max(attempts, default=0) if args.attempt is None else args.attempt
    if number not in attempts:
        known = f"it has {', '.join(map(str, attempts))}" if attempts else _why_no_attempt(run)
        raise InputError(f"{run.run_id}: no attempt {number or ''}".rstrip() + f" ({known})")
    claim = attempts[number].claim()
    if args.rank is not None and not 0 <= args.rank < claim.nodes * claim.ranks_per_node:
        ranks = claim.nodes * claim.ranks_per_node
        raise InputError(f"--rank {args.rank}: attempt {number} has {ranks} ranks, 0 to {ranks - 1}")
    return attempts[number]


def _why_no_attempt(run: RunDir) -> str:
    submission = newest(run)
    if submission is None:
        return "it was never launched"
    job = job_of(submission)
    output = f"; its supervisor's output: {submission.output}" if submission.output.exists() else ""
    return (job.detail if job is not None else f"submission {submission.number} was not handed over") + output


def _shown(run: RunDir, attempt: Attempt, selection: Selection) -> Iterator[Line | str]:
    """The cause of a failed attempt, then its lines."""
    end = attempt.end()
    if end is not None and end["outcome"] != "finished":
        yield f"{conclusion(run, attempt)}\n"
    yield from _last(AttemptTail(run, attempt, selection).new(), selection.tail)


def _last(lines: Iterator[Line], count: int | None) -> Iterable[Line]:
    """The last `count` lines; all of them for None."""
    return lines if count is None else deque(lines, maxlen=count)


def _followed(run: RunDir, selection: Selection) -> Iterator[Line | str]:
    """The lines of the newest attempt and of those after it, each with its conclusion."""
    watch, tail, over = SupervisorWatch(run), None, True  # over: the tail's attempt has been shown to its end
    while True:
        reason = watch.over()
        attempt = attempt_of(run, watch.submission)
        if attempt is not None and (tail is None or (over and tail.attempt.number != attempt.number)):
            tail, over = AttemptTail(run, attempt, selection), False
        if tail is not None and not over:
            over = attempt is None or tail.attempt.number != attempt.number or tail.attempt.end_file.exists()
            yield from _last(tail.new(), selection.tail)  # nothing comes after its end
            selection = replace(selection, tail=None)
            if over:
                yield conclusion(run, tail.attempt) or ""
                continue
        if reason is not None:
            yield reason
            return
        time.sleep(POLL)
