"""`gemctl supervise`: the supervisor of a submitted run, in this process; batch scripts and --detach start it.

gemctl supervise RUN

It continues from the run's last attempt: restarted by a scheduler after its host has died, it starts the next one.
"""

import argparse

from gemctl.errors import InputError
from gemctl.launch.liveness import refuse_beating
from gemctl.launch.supervise import supervise
from gemctl.launchers.api import launcher_of
from gemctl.run.access import written_as
from gemctl.run.conclusion import reference
from gemctl.run.directory import find
from gemctl.run.submission import newest, submissions
from gemctl.startup import write_utf8


def run(args: argparse.Namespace) -> None:
    write_utf8()
    target = find(args.run, args.root)
    known = {submission.number: submission for submission in submissions(target)}
    wanted = newest(target) if args.submission is None else known.get(args.submission)
    if wanted is None and args.submission is not None:
        raise InputError(f"--submission {args.submission}: {target.run_id} has {', '.join(map(str, known)) or 'none'}")
    if wanted is None:
        raise InputError(f"{target.run_id}: nothing was submitted; to submit it: gemctl resume {reference(target)}")
    last = target.last_attempt()
    if last is not None and not launcher_of(wanted.kind).replaces_supervisor(wanted):
        refuse_beating(target, last)
    with written_as(target.path):
        supervise(target, wanted, last)
