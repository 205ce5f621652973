"""Deeds: what is done to a run's processes from outside. `resume`: the words of a command that resumes the run."""

import signal
import time
from collections.abc import Callable

from gemctl.run.files import read_log
from tests.chaos.damage import damage
from tests.chaos.processes import Case
from tests.chaos.scenario import Damage, Deed


def _targets(case: Case, deed: Deed) -> list[int]:
    """The processes named by the last word of the deed's name."""
    match deed.what.rpartition("_")[2]:
        case "rank":
            return [pid for rank, pid in case.ranks().items() if rank == deed.rank]
        case "ranks":
            return list(case.ranks().values())
        case "agent":
            return case.agents()
        case "supervisor":
            return [case.main.pid]
    return case.everything()


def _kill(case: Case, deed: Deed, resume: list[str]) -> None:
    case.send(signal.SIGKILL, _targets(case, deed))


def _spoil_and_kill(case: Case, deed: Deed, resume: list[str]) -> None:
    """Damages the newest checkpoint and kills a rank: the next attempt has to detect the damage by itself."""
    if case.run is not None:
        touched = damage(case.run, Damage(deed.what.partition("_")[0], "data", 0.5))
        case.damaged |= {path.name for path in touched or []}
    case.send(signal.SIGKILL, [pid for rank, pid in case.ranks().items() if rank == deed.rank])


def _stop(case: Case, deed: Deed, resume: list[str]) -> None:
    """SIGSTOP, and later SIGCONT to the same processes."""
    held, until = _targets(case, deed), time.time() + deed.seconds
    case.send(signal.SIGSTOP, held)
    case.when(lambda: time.time() >= until, lambda: case.send(signal.SIGCONT, held))


def _take_over(case: Case, deed: Deed, resume: list[str]) -> None:
    """Stops everything, lets another command resume, and wakes what was stopped: after its end, or once it trains."""
    held, run, attempt = case.everything(), case.run, case.attempt()
    if run is None or attempt is None:
        return
    case.send(signal.SIGSTOP, held)
    second, following = case.start(resume, "any"), run.attempt(attempt.number + 1)

    def wakes() -> bool:
        early = deed.what == "wake_in_take_over"
        trains = early and any(line["stage"] == "step" for line in read_log(following.rank_log(0)))
        return second.code is not None or trains

    case.when(wakes, lambda: case.send(signal.SIGCONT, held))


def _resume_living(case: Case, deed: Deed, resume: list[str]) -> None:
    case.start(resume, "refused")


def _resume_too(case: Case, deed: Deed, resume: list[str]) -> None:
    case.start(resume, "any")


def _request_stop(case: Case, deed: Deed, resume: list[str]) -> None:
    if case.run is not None:
        case.start(["stop", str(case.run.path)], "any")


def _terminate(case: Case, deed: Deed, resume: list[str]) -> None:
    case.send(signal.SIGTERM, _targets(case, deed))


def _interrupt(case: Case, deed: Deed, resume: list[str]) -> None:
    case.send(signal.SIGINT, [case.main.pid])


def _interrupt_twice(case: Case, deed: Deed, resume: list[str]) -> None:
    _interrupt(case, deed, resume)
    again = time.time() + 0.1
    case.when(lambda: time.time() >= again, lambda: _interrupt(case, deed, resume))


DEEDS: dict[str, Callable[[Case, Deed, list[str]], None]] = {
    **dict.fromkeys(["kill_rank", "kill_ranks", "kill_agent", "kill_supervisor", "kill_all"], _kill),
    **dict.fromkeys(["flip_and_kill", "cut_and_kill", "remove_and_kill"], _spoil_and_kill),
    **dict.fromkeys(["stop_rank", "stop_ranks", "stop_agent", "stop_supervisor", "stop_all"], _stop),
    **dict.fromkeys(["term_agent", "term_supervisor", "term_all"], _terminate),
    **dict.fromkeys(["take_over_then_wake", "wake_in_take_over"], _take_over),
    "resume_living": _resume_living,
    "resume_too": _resume_too,
    "request_stop": _request_stop,
    "int_supervisor": _interrupt,
    "int_twice": _interrupt_twice,
}
