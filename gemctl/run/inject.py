"""Plants one event in a run, to test what it does about it: raise, hang, kill, or a NaN loss.

    GEMCTL_INJECT="kill:rank=1,step=3,stage=step" gemctl train …

Keys: `rank` (default 0), `step` (default: any), `stage` (default: step), `attempt` (default 1, so that the next attempt
runs undisturbed). Commands call `check` before they launch, the worker `maybe_inject` as it enters each stage.
"""

import functools
import os
import signal
import time
from dataclasses import dataclass, fields
from typing import get_args

from gemctl import env
from gemctl.errors import InputError
from gemctl.run.stages import Stage

KINDS = ("raise", "hang", "kill", "nan")


class InjectedError(RuntimeError):
    """The exception that `raise` plants."""


@dataclass(frozen=True)
class Event:
    kind: str
    rank: int = 0
    step: int | None = None
    stage: str = "step"
    attempt: int = 1


@functools.cache
def parse(text: str) -> Event:
    """The event that `text` describes; InputError names what is wrong with it."""
    kind, _, rest = text.partition(":")
    known = [field.name for field in fields(Event) if field.name != "kind"]
    problems = [] if kind in KINDS else [f"GEMCTL_INJECT: {kind!r} is none of {', '.join(KINDS)}"]
    values: dict[str, str | int] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            problems.append(f"GEMCTL_INJECT: {key!r} is none of {', '.join(known)}")
        elif key == "stage" and value not in get_args(Stage):
            problems.append(f"GEMCTL_INJECT: stage {value!r} is none of {', '.join(get_args(Stage))}")
        elif key != "stage" and not value.isdigit():
            problems.append(f"GEMCTL_INJECT: {key}={value!r} is not a whole number")
        else:
            values[key] = value if key == "stage" else int(value)
    if problems:
        raise InputError(problems)
    return Event(kind, **values)  # type: ignore[arg-type]


def check() -> None:
    """InputError if GEMCTL_INJECT is set and asks for what there is not."""
    if (text := env.inject()) is not None:
        parse(text)


def maybe_inject(rank: int, stage: Stage, step: int | None) -> bool:
    """Does what GEMCTL_INJECT asks for at this place; True means: make this step's loss NaN."""
    text = env.inject()
    if text is None:
        return False
    event = parse(text)
    here = (event.rank, event.stage, event.attempt) == (rank, stage, env.attempt())
    if not here or event.step not in {None, step}:
        return False
    if event.kind == "raise":
        raise InjectedError(f"planted in rank {rank}, stage {stage}, step {step}")
    if event.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while event.kind == "hang":
        time.sleep(3600)
    return True
