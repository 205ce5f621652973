"""Fault injection: named places in the code where GEMCTL_INJECT makes a rank raise, hang, die or go wrong.

    GEMCTL_INJECT="kill:rank=1,step=3,stage=step" gemctl train …
    GEMCTL_INJECT="disk_full:rank=1,stage=save,point=upload,count=1;kill:step=6" gemctl train …

    failpoint("save.upload", step)      # in the code: the point `upload` of the stage `save`
    failpoint("step", step)             # a stage begins
    if planted("nan"): …                # a fault that the caller has to make itself is due

Kinds: `raise`, `hang`, `kill` (SIGKILL), `stop` (SIGSTOP: somebody else has to send SIGCONT), `disk_full` (the rank
can't write any file beyond 16 kB), `slow` (steps take `factor` times the rank's own work, 3 by default), `nan` (in the
loss of the step that begins), `grad_nan` (in a gradient of the tables' outputs in that step).

Keys: `rank` (default 0), `step` (default: any), `stage` (default: step), `point` of a save (default: as it begins),
`attempt` (default 1, so that the next attempt runs undisturbed), `count` (how often; default: every time). Commands
call `check` before they launch. Without GEMCTL_INJECT a failpoint costs one lookup in the environment.
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

# Of a save, in order: the copy, a rank's file, hashing it; on rank 0 also DCP's metadata, the manifest, after the
# manifest, and an old checkpoint that is half deleted.
SavePoint = Literal[
    "save.copy", "save.upload", "save.hash", "save.metadata", "save.manifest", "save.published", "save.prune"
]
Planted = Literal["nan", "grad_nan"]
KINDS = ("raise", "hang", "kill", "stop", "disk_full", "slow", *get_args(Planted))
CHOICES: dict[str, tuple[str, ...]] = {
    "stage": get_args(Stage),
    "point": tuple(name.partition(".")[2] for name in get_args(SavePoint)),
}
FULL_BYTES = 16 << 10  # a rank's logs are smaller, its part of a checkpoint is larger


class InjectedError(RuntimeError):
    """The exception that `raise` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault that GEMCTL_INJECT asks for."""

    kind: str
    rank: int = 0
    step: int | None = None
    stage: str = "step"
    attempt: int = 1
    point: str | None = None
    count: int | None = None
    factor: int = 3


def failpoint(place: Stage | SavePoint, step: int | None) -> None:
    """Injects the faults that GEMCTL_INJECT asks for at this place, if any; `step`: the step that is at work."""
    text = env.inject()
    if text is None:
        return
    stage, _, point = place.partition(".")
    here = (env.rank(), stage, env.attempt(), point or None)
    for fault in parse(text):
        if (fault.rank, fault.stage, fault.attempt, fault.point) == here:
            due = _due(fault, step)
            if fault.kind == "disk_full":  # until it is no longer due at this place
                _limit_files(FULL_BYTES if due else None)
            elif due:
                _inject(fault, f"rank {fault.rank}, stage {stage}, step {step}")


def planted(kind: Planted) -> bool:
    """Whether a failpoint was asked for this fault, which the caller has to make; True once for each time."""
    due = kind in _planted
    _planted.discard(kind)
    return due


def check(world: int) -> None:
    """InputError if GEMCTL_INJECT is set and asks for unknown things, or for ranks outside of 0 to `world` − 1."""
    if (text := env.inject()) is None:
        return
    if missing := sorted({fault.rank for fault in parse(text) if fault.rank >= world}):
        raise InputError([f"GEMCTL_INJECT: rank={rank}: the run has ranks 0 to {world - 1}" for rank in missing])


@functools.cache
def parse(text: str) -> tuple[Fault, ...]:
    """The faults that `text` describes. InputError lists everything that is wrong with it."""
    problems: list[str] = []
    faults = tuple(_parse_one(part.strip(), problems) for part in text.split(";"))
    if problems:
        raise InputError(problems)
    return faults


def _parse_one(text: str, problems: list[str]) -> Fault:
    kind, _, rest = text.partition(":")
    before = len(problems)
    known = [field.name for field in fields(Fault) if field.name != "kind"]
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
    fault = Fault(kind, **values)  # type: ignore[arg-type]
    return fault if len(problems) > before else _possible(fault, problems)


def _possible(fault: Fault, problems: list[str]) -> Fault:
    if fault.kind in get_args(Planted) and fault.stage != "step":
        problems.append(f"GEMCTL_INJECT: {fault.kind} needs stage=step, not stage={fault.stage}")
    elif fault.point is not None and fault.stage != "save":
        problems.append(f"GEMCTL_INJECT: point={fault.point}: is of stage=save, not of stage={fault.stage}")
    return fault


_seen: Counter[Fault] = Counter()
_planted: set[str] = set()
_worked = 0.0  # CPU seconds of the training thread when it was last slowed down


def _due(fault: Fault, step: int | None) -> bool:
    here = fault.step in {None, step}
    _seen[fault] += here
    return here and (fault.count is None or _seen[fault] <= fault.count)


def _limit_files(size: int | None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def _inject(fault: Fault, where: str) -> None:
    match fault.kind:
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
            _slow_down(fault.factor)
        case _:
            _planted.add(fault.kind)


def _slow_down(factor: int) -> None:
    """Sleeps for `factor` − 1 times the CPU time that this thread has used since it was last slowed down."""
    global _worked  # noqa: PLW0603 (one thread of a process trains)
    worked = time.thread_time()
    if _worked:
        time.sleep(max(0, factor - 1) * (worked - _worked))
    _worked = worked
