"""What the suite's tests run in a forked process: outcomes of seeds, and cases that are wrong on purpose."""

import functools
import importlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gemctl.run.base import Choice
from gemctl.run.manifest import checkpoints
from tests.chaos import commands, suite
from tests.chaos.layouts import STEPS
from tests.chaos.oracle import judge
from tests.chaos.play import play
from tests.chaos.processes import Case
from tests.chaos.scenario import Command, Damage, Deed, Plant, Scenario, When


def references(root: Path) -> None:
    commands.preload()
    suite.make_references(root)


def outcomes(root: Path, seeds: list[int]) -> list[suite.Outcome]:
    return list(suite.play_all(root, seeds))


def objections(root: Path) -> dict[str, list[str]]:
    """The suite's objections to each kind of wrong case."""
    commands.preload()
    found = suite.make_references(root)
    calls = {name: functools.partial(_objections, root, name, wrong, found) for name, wrong in WRONG.items()}
    return dict(suite.in_forks(calls, suite.LANES))


def _nothing(case: Any = None) -> None:
    pass


@dataclass(frozen=True)
class _Wrong:
    """`before`: applied to this process and all its forks; `after`: to what the case has left."""

    commands: tuple[Command, ...]
    before: Callable[[], None] = _nothing
    after: Callable[[Case], None] = _nothing
    step: int = STEPS  # of the reference


def _objections(root: Path, name: str, wrong: _Wrong, found: dict[str, Path]) -> list[str]:
    wrong.before()
    scenario = Scenario(0, name, 3, wrong.commands)
    case = play(scenario, root / "wrong" / name.replace(" ", "-"), root / suite.CONFIG)
    wrong.after(case)
    expected = found["two"].with_name(f"step_{wrong.step}.a1")
    return judge(case, scenario, {"two": expected})


def _patch(module: str, name: str, value: Any) -> None:
    patch.object(importlib.import_module(module), name, value).start()


def _spoil_load() -> None:
    """Loading slightly changes the saved values."""
    load = importlib.import_module("gemctl.ranks.worker").load

    def nearly(folder: Path, state: dict[str, Any], *rest: Any) -> Any:
        manifest = load(folder, state, *rest)
        key = next(key for key in state if key.endswith("exp_avg"))
        state[key].to_local().mul_(1 + 1e-6)
        return manifest

    _patch("gemctl.ranks.worker", "load", nearly)


def _keep_orphans() -> None:
    _patch("gemctl.process", "die_with_parent", lambda parent: None)
    _patch("tests.chaos.processes", "ORPHAN_SECONDS", 1.0)


def _delete_one(case: Case) -> None:
    assert case.run is not None
    shutil.rmtree(next(one.path for one in checkpoints(case.run) if one.step == STEPS - 2))


def _pass_over() -> None:
    def older(run: Any) -> Any:
        return Choice(sorted((one for one in checkpoints(run) if one.flaw is None), key=lambda one: one.step)[0])

    _patch("gemctl.launch.preflight", "newest_verified", older)


def _from_zero() -> None:
    _patch("gemctl.launch.preflight", "newest_verified", lambda run: Choice())
    _patch("gemctl.recover.start", "newest_verified", lambda *_: Choice())


def _impatient() -> None:
    _patch("tests.chaos.processes", "COMMAND_SECONDS", 4.0)


def _fail() -> None:
    def preflight(*_: Any) -> None:
        raise ValueError("planted")

    _patch("gemctl.commands.resume", "preflight", preflight)


def replay(root: Path) -> dict[str, list[str]]:
    """The suite's outcome for each fault that it has found before."""
    commands.preload()
    found = suite.make_references(root)
    calls = {name: functools.partial(_objections, root, name, wrong, found) for name, wrong in FOUND.items()}
    return dict(suite.in_forks(calls, suite.LANES))


KILLED = Command("two", deeds=(Deed("kill_all", When(0, "step", STEPS - 1)),))
ORPHANED = Command("two", (Plant("stop", 1, "step", 3),), (Deed("kill_supervisor", When(1, "stopped")),))
HANGING = Command("two", (Plant("hang", 0, "step", 2),), watchdog=60.0)
WRONG = {
    "nothing": _Wrong((KILLED,)),
    "another state": _Wrong((KILLED,), before=_spoil_load),
    "an earlier state": _Wrong((KILLED,), step=STEPS - 2),
    "an orphan": _Wrong((ORPHANED,), before=_keep_orphans),
    "a lost checkpoint": _Wrong((KILLED,), after=_delete_one),
    "a passed over checkpoint": _Wrong((KILLED,), before=_pass_over),
    "a start from zero": _Wrong((KILLED,), before=_from_zero),
    "a hang": _Wrong((HANGING,), before=_impatient),
    "a traceback": _Wrong((KILLED,), before=_fail),
}


def _damaged(*damage: Damage) -> Command:
    return replace(KILLED, damage=damage)


FOUND = {
    "two checkpoints have changed places": _Wrong((_damaged(Damage("swap_folders", "data", 0.5)),)),
    "three have": _Wrong((_damaged(*(Damage("swap_folders", "data", 0.5, newest) for newest in range(2))),)),
    "no checkpoint is whole": _Wrong((_damaged(*(Damage("flip", "data", 0.5, newest) for newest in range(3))),)),
    "a planted pickle is all that there is to read": _Wrong((_damaged(Damage("plant", "data", 0.5)),)),
    "two resumes at once": _Wrong((KILLED, Command("two", deeds=(Deed("resume_too", When(0, "command")),)))),
}
