"""Plants events in a run, to test what it does about them: raise, hang, kill, stop, disk_full, slow, nan, grad_nan.

    GEMCTL_INJECT="kill:rank=1,step=3,stage=step" gemctl train …
    GEMCTL_INJECT="disk_full:rank=1,stage=save,point=upload,count=1;kill:step=6" gemctl train …

Keys: `rank` (default 0), `step` (default: any), `stage` (default: step), `point` (a place within a save; default: as
the stage begins), `attempt` (default 1, so that the next attempt runs undisturbed), `count` (how often; default: every
time). Commands call `check` before they launch, a worker `maybe_inject` as it enters each stage, a save at its points.

`stop` is SIGSTOP: someone else has to send SIGCONT. After `disk_full` the rank cannot write any file beyond 16 kB.
`slow` makes the rank's steps `factor` (default 3) times its own work long. `nan` is a loss, `grad_nan` a gradient of
the tables' outputs; the worker plants them.
"""

import functools
import os
import resource
import signal
import time
from collections import Counter
from dataclasses import dataclass, fields
from typing import Literal, get_args

from gemctl import env
from gemctl.errors import InputError
from gemctl.run.rank_records import Stage

KINDS = ("raise", "hang", "kill", "stop", "disk_full", "slow", "nan", "grad_nan")
PLANTED = ("nan", "grad_nan")  # by the worker, into the step that begins
# In their order: the copy begins, a rank's file is begun, DCP's metadata, hashes; on rank 0 then the manifest, after
# it, and an old checkpoint whose manifest has just been deleted.
Point = Literal["copy", "upload", "metadata", "hash", "manifest", "published", "prune"]
CHOICES: dict[str, tuple[str, ...]] = {"stage": get_args(Stage), "point": get_args(Point)}
FULL_BYTES = 16 << 10  # a rank's logs are smaller, its part of a checkpoint is larger


class InjectedError(RuntimeError):
    """The exception that `raise` plants."""


@dataclass(frozen=True)
class Event:
    kind: str
    rank: int = 0
    step: int | None = None
    stage: str = "step"
    attempt: int = 1
    point: str | None = None
    count: int | None = None
    factor: int = 3


@functools.cache
def parse(text: str) -> tuple[Event, ...]:
    """The events that `text` describes; InputError names all that is wrong with it."""
    problems: list[str] = []
    events = tuple(_parse_one(part.strip(), problems) for part in text.split(";"))
    if problems:
        raise InputError(problems)
    return events


def _parse_one(text: str, problems: list[str]) -> Event:
    kind, _, rest = text.partition(":")
    known = [field.name for field in fields(Event) if field.name != "kind"]
    if kind not in KINDS:
        problems.append(f"GEMCTL_INJECT: {kind!r} is none of {', '.join(KINDS)}")
    values: dict[str, str | int] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            problems.append(f"GEMCTL_INJECT: {key!r} is none of {', '.join(known)}")
        elif key in CHOICES and value not in CHOICES[key]:
            problems.append(f"GEMCTL_INJECT: {key} {value!r} is none of {', '.join(CHOICES[key])}")
        elif key not in CHOICES and not value.isdecimal():
            problems.append(f"GEMCTL_INJECT: {key}={value!r} is not a whole number")
        else:
            values[key] = value if key in CHOICES else int(value)
    return Event(kind, **values)  # type: ignore[arg-type]


def check(world: int) -> None:
    """InputError if GEMCTL_INJECT is set and asks for what there is not, in a run of `world` ranks."""
    if (text := env.inject()) is None:
        return
    if missing := sorted({event.rank for event in parse(text) if event.rank >= world}):
        raise InputError([f"GEMCTL_INJECT: rank={rank}: the run has ranks 0 to {world - 1}" for rank in missing])


_seen: Counter[Event] = Counter()
_worked = 0.0  # seconds that this thread had worked when it was last slowed


def maybe_inject(rank: int, stage: Stage, step: int | None, point: Point | None = None) -> set[str]:
    """Does what GEMCTL_INJECT asks for at this place; returns the kinds that are the caller's to plant."""
    text = env.inject()
    if text is None:
        return set()
    place = (rank, stage, env.attempt(), point)
    planted = set()
    for event in parse(text):
        if (event.rank, event.stage, event.attempt, event.point) == place:
            due = _due(event, step)
            if event.kind == "disk_full":  # until it is not due at such a place
                _limit_files(FULL_BYTES if due else None)
            elif due:
                _act(event, f"rank {rank}, stage {stage}, step {step}")
                planted |= {event.kind} & set(PLANTED)
    return planted


def _due(event: Event, step: int | None) -> bool:
    here = event.step in {None, step}
    _seen[event] += here
    return here and (event.count is None or _seen[event] <= event.count)


def _limit_files(size: int | None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def _act(event: Event, where: str) -> None:
    match event.kind:
        case "raise":
            raise InjectedError(f"planted in {where}")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)  # another thread may have taken the signal, and this one runs on for a moment
        case "hang":
            while True:
                time.sleep(3600)
        case "slow":
            _slow_down(event.factor)


def _slow_down(factor: int) -> None:
    """Sleeps for as long as this thread has worked since the last time, `factor` − 1 times over."""
    global _worked  # noqa: PLW0603 (one thread of a process trains)
    worked = time.thread_time()
    if _worked:
        time.sleep(max(0, factor - 1) * (worked - _worked))
    _worked = worked
