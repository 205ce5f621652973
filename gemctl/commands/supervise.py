"""`gemctl supervise`: the supervisor of a submitted run, in this process; batch scripts and --detach start it.

gemctl supervise RUN

It goes on where the run's attempts stand: brought back by a scheduler after its host has died, it makes the next one.
"""

import argparse

from gemctl.errors import InputError

HELP = "Follow a submitted run's attempts here; batch scripts and --detach start it."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument("--submission", type=int, metavar="N", help="only if this one is the newest")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")


def run(args: argparse.Namespace) -> None:
    from gemctl.launch.supervise import refuse_living, supervise
    from gemctl.launchers.api import launcher_of
    from gemctl.run.access import written_as
    from gemctl.run.conclusion import reference
    from gemctl.run.directory import find
    from gemctl.run.submission import newest, submissions
    from gemctl.startup import write_utf8

    write_utf8()
    target = find(args.run, args.root)
    known = {submission.number: submission for submission in submissions(target)}
    wanted = newest(target) if args.submission is None else known.get(args.submission)
    if wanted is None and args.submission is not None:
        raise InputError(f"--submission {args.submission}: {target.run_id} has {', '.join(map(str, known)) or 'none'}")
    if wanted is None:
        raise InputError(f"{target.run_id}: nothing was submitted; gemctl resume {reference(target)} does")
    last = target.last_attempt()
    if last is not None and not launcher_of(wanted.kind).takes_over(wanted):
        refuse_living(target, last)
    with written_as(target.path):
        supervise(target, wanted, last)
