"""`gemctl logs`: what a run's processes said and did, with the cause of a failure first.

gemctl logs RUN                  # the newest attempt: supervisor, training, and the rank that failed first or rank 0
gemctl logs RUN -f --merged      # all ranks, from now to the end of the run
"""

import argparse
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from gemctl.errors import InputError, Interrupted

if TYPE_CHECKING:
    from gemctl.report.logs import Line, Selection
    from gemctl.run.attempt import Attempt
    from gemctl.run.directory import RunDir

HELP = "Show what a run's processes said and did, the cause of a failure first."
POLL = 0.2


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument("-f", "--follow", action="store_true", help="go on, over its next attempts, until the run ends")
    parser.add_argument("--attempt", type=int, metavar="N", help="default: the newest")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="this rank alone")
    which.add_argument("--merged", action="store_true", help="all ranks, merged by time")
    parser.add_argument("--tail", type=int, metavar="N", help="the last N lines (with -f: and what comes after them)")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> None:
    from gemctl.render.logs import write
    from gemctl.report.logs import Selection
    from gemctl.run.directory import find

    target = find(args.run, args.root)
    if args.tail is not None and args.tail < 1:
        raise InputError(f"--tail {args.tail}: give a number of lines, 1 or more")
    selection = Selection(args.rank, args.merged, args.tail)
    if args.follow and args.attempt is not None:
        raise InputError("--attempt shows one attempt as it is, --follow goes on over all: leave one out")
    if not args.follow:
        write(_shown(target, _attempt(target, args), selection), args.json)
        return
    try:
        write(_followed(target, selection), args.json)
    except KeyboardInterrupt as interrupt:
        if type(interrupt) is not KeyboardInterrupt:  # SIGTERM
            raise
        raise Interrupted(f"run {target.run_id} is no longer followed; whatever it does, it goes on") from None


def _attempt(run: "RunDir", args: argparse.Namespace) -> "Attempt":
    """The attempt that is asked for. InputError if there is none, or none of its ranks has that number."""
    attempts = {attempt.number: attempt for attempt in run.attempts() if attempt.claimed}
    number = max(attempts, default=0) if args.attempt is None else args.attempt
    if number not in attempts:
        known = f"it has {', '.join(map(str, attempts))}" if attempts else _unstarted(run)
        raise InputError(f"{run.run_id}: no attempt {number or ''}".rstrip() + f" ({known})")
    claim = attempts[number].claim()
    if args.rank is not None and not 0 <= args.rank < claim.nodes * claim.ranks_per_node:
        ranks = claim.nodes * claim.ranks_per_node
        raise InputError(f"--rank {args.rank}: attempt {number} has {ranks} ranks, 0 to {ranks - 1}")
    return attempts[number]


def _unstarted(run: "RunDir") -> str:
    """Why a run has no attempt."""
    from gemctl.launch.follow import job_of
    from gemctl.run.submission import newest

    submission = newest(run)
    if submission is None:
        return "it was never launched"
    job = job_of(submission)
    said = f"; its supervisor's output: {submission.output}" if submission.output.exists() else ""
    return (job.detail if job is not None else f"submission {submission.number} was not handed over") + said


def _shown(run: "RunDir", attempt: "Attempt", selection: "Selection") -> "Iterator[Line | str]":
    """Of a failed attempt the cause, then its lines."""
    from gemctl.report.logs import AttemptTail
    from gemctl.run.conclusion import conclusion

    end = attempt.end()
    if end is not None and end["outcome"] != "finished":
        yield f"{conclusion(run, attempt)}\n"
    yield from _last(AttemptTail(run, attempt, selection).new(), selection.tail)


def _last(lines: "Iterator[Line]", count: int | None) -> "Iterable[Line]":
    """The last `count`; all if it is None."""
    return lines if count is None else deque(lines, maxlen=count)


def _followed(run: "RunDir", selection: "Selection") -> "Iterator[Line | str]":
    """The lines of the newest attempt and of those after it; how each ended stands behind it."""
    from gemctl.launch.follow import Vigil, own_attempt
    from gemctl.report.logs import AttemptTail
    from gemctl.run.conclusion import conclusion

    vigil, tail, over = Vigil(run), None, True  # over: the tail's attempt has been shown to its end
    while True:
        reason = vigil.over()
        attempt = own_attempt(run, vigil.submission)
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
