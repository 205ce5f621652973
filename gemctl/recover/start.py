"""Starts an attempt: takes the run, starts agents unless those of the last attempt are alive, chooses the checkpoint to
start from, and hands the attempt to the agents.

attempt = start(context, number, first_request, last)
"""

from gemctl.durable import create
from gemctl.errors import GemctlError, InputError, TooFewHosts
from gemctl.recover.cause import Cause
from gemctl.recover.context import Context
from gemctl.recover.decide import End
from gemctl.run.attempt import Attempt, Base, claim
from gemctl.run.base import from_scratch, newest_verified, passed_over
from gemctl.run.manifest import Checkpoint, check_file, check_size


class NotStarted(GemctlError):
    """The attempt has a folder, and its ranks were never started: `end` says why."""

    def __init__(self, attempt: Attempt, end: End) -> None:
        super().__init__(str(end.error))
        self.attempt, self.end = attempt, end


def start(
    context: Context, number: int, first_request: int | None, last: Attempt | None = None, check_hashes: bool = False
) -> Attempt:
    """Starts attempt `number`, whose requests begin with `first_request`, after `last`, whose agents serve it too if
    they are alive. `check_hashes`: hash the files of the checkpoint. NotStarted if it cannot start."""
    prepared = context.prepared
    fresh = last is None or bool(context.agents.ended())
    if last is not None and fresh:
        context.kill_agents()  # survivors belong with the dead ones; one that is out of reach will find no work
    attempt = claim(
        context.run.path,
        number,
        nodes=prepared.nodes,
        ranks_per_node=prepared.ranks_per_node,
        heartbeat=context.recover.heartbeat,
        owner=None if last is None or fresh else last.claim().owner,
        first_request=first_request,
    )
    if fresh:
        _start_agents(context, attempt)  # they import while the rest is prepared
    create(attempt.config, prepared.config)
    create(attempt.plan, prepared.plan)
    for name, text in prepared.inputs.items():
        create(attempt.path / name, text)
    try:
        base = choose_base(context, check_hashes)
    except InputError as error:
        cause = Cause("checkpoint", None, None, None, str(error), None)
        raise _not_started(context, attempt, End("failed", None, cause, error=InputError(str(error)))) from error
    attempt.write_base(base)
    context.record_start(attempt, base)
    context.agents.submit(attempt)
    return attempt


def _start_agents(context: Context, attempt: Attempt) -> None:
    try:
        context.agents.start(attempt)
    except GemctlError as error:
        hosts = isinstance(error, TooFewHosts)
        lost = isinstance(error, TooFewHosts) and error.lost
        cause = Cause("host" if hosts else "agent", None, None, None, str(error), None)
        end = End("failed", None, cause, "preemption" if lost else "startup", error=error)
        raise _not_started(context, attempt, end) from error


def _not_started(context: Context, attempt: Attempt, end: End) -> NotStarted:
    """It writes no base.json, so no checkpoint becomes void."""
    context.record_start(attempt, Base(None, 0))
    return NotStarted(attempt, end)


def choose_base(context: Context, check_hashes: bool) -> Base:
    """What the next attempt starts from. Its ranks hash what they load, each its share, so checking names and sizes is
    enough here, unless ranks have just refused a checkpoint. InputError as newest_verified raises it."""
    run, given = context.run, _given(context)

    def declined(found: Checkpoint) -> str | None:
        if given is not None and found.step >= given.step and found.path.name != given.checkpoint:
            return "was damaged or incomplete when this was submitted"
        return context.history.distrusted.get(found.path.name)

    if given is not None and given.checkpoint is None:
        choice = from_scratch(run)
    else:
        choice = newest_verified(run, check_file if check_hashes else check_size, declined)
    for reason in choice.passed_over if given is None else []:  # the preflight has reported its own
        context.follower.note(f"checkpoint passed over: {reason}")
    found = choice.checkpoint
    name, step = (found.path.name, found.step) if found is not None else (None, 0)
    left_alone = sorted({*choice.left_alone, *(given.left_alone if given is not None else [])})
    over = passed_over(run.attempts(), step)
    if over:
        steps = ", ".join(map(str, over))
        context.follower.note(f"batches passed over, as a gradient was not finite: steps {steps}")
    return Base(name, step, over, left_alone)


def _given(context: Context) -> Base | None:
    """What the submission says to start from, until an attempt of it has started from there."""
    prepared = context.prepared
    own = [attempt for attempt in context.run.attempts() if attempt.number >= prepared.first]
    return None if any(attempt.started_from() for attempt in own) else prepared.base
