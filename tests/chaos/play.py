"""Plays one scenario in this process: its commands, deeds and damage, then a final resume unless the run has finished.

If the resume is refused because no checkpoint can be used, the run is resumed from scratch.

case = play(draw(17), folder, config)
"""

import time
from pathlib import Path

from gemctl.run.directory import RunDir
from gemctl.run.files import LogTail
from gemctl.run.manifest import checkpoints, folder_name
from tests.chaos.damage import damage
from tests.chaos.deeds import DEEDS
from tests.chaos.layouts import LAYOUTS
from tests.chaos.oracle import FROM_SCRATCH
from tests.chaos.processes import Case, ranks, stopped
from tests.chaos.scenario import Command, Deed, Scenario, When


def play(scenario: Scenario, folder: Path, config: Path) -> Case:
    """Plays the scenario and returns its record. `config`: the file that layouts.prepare wrote."""
    case = Case(folder)
    for command in scenario.commands:
        _run(case, scenario, command, config)
    if case.touched or not _finished(case.run):
        _run(case, scenario, Command(scenario.layout.name), config)
    if case.commands[-1].code == 2 and FROM_SCRATCH in case.commands[-1].err:
        _run(case, scenario, Command(scenario.layout.name), config, FROM_SCRATCH)
    return case


def _finished(run: RunDir | None) -> bool:
    last = run.last_attempt() if run else None
    return last is not None and (last.end() or {}).get("outcome") == "finished"


def _run(case: Case, scenario: Scenario, command: Command, config: Path, *more: str) -> None:
    attempts = case.run.attempts() if case.run else []
    first = attempts[-1].number + 1 if attempts else 1
    words = [*_words(case.run, scenario, command), *more]
    again = ["resume", f"{case.folder}/runs/chaos", *words[2:]]
    for deed in command.deeds:
        _await(case, deed, first, again)
    if case.run is None:
        words = ["train", str(config), "run.name=chaos", f"run.root={case.folder}/runs", *words[2:]]
    case.start(words, "well" if command.well else "any", ";".join(plant.text(first) for plant in command.plants))
    case.follow()
    for one in command.damage:
        touched = damage(case.run, one) if case.run else None
        case.touched |= touched is not None
        case.damaged |= {path.name for path in touched or []}
        found = checkpoints(case.run) if case.run else []
        case.holds = {one.path.name: folder_name(one.step, one.attempt) for one in found}
        if touched is None:
            case.missed.append(f"{one.what}: there was no such checkpoint")


def _words(run: RunDir | None, scenario: Scenario, command: Command) -> list[str]:
    return [
        "resume",
        str(run.path) if run else "",
        *LAYOUTS[command.layout].words(),
        f"checkpoint.keep={scenario.keep}",
        f"recover.watchdog={command.watchdog}",
        f"recover.budgets.crash={command.budget}",
    ]


def _await(case: Case, deed: Deed, first: int, again: list[str]) -> None:
    """Schedules the deed for its moment. `again`: the command that resumes the run."""
    tails: dict[int, LogTail] = {}
    moments: list[float] = []

    def due() -> bool:
        if not moments and _reached(case, deed.when, first, tails):
            moments.append(time.time() + deed.when.delay)
        return bool(moments) and time.time() >= moments[0]

    def do() -> None:
        resume = [again[0], str(case.run.path) if case.run else "", *again[2:]]
        DEEDS[deed.what](case, deed, resume)

    case.when(due, do, f"{deed.what}: its moment did not come")


def _reached(case: Case, when: When, first: int, tails: dict[int, LogTail]) -> bool:
    if when.stage == "command":
        return True
    number = first + when.attempt
    if case.run is None or not (attempt := case.run.attempt(number)).claimed:
        return False
    if when.stage == "stopped":
        return any(stopped(pid) for rank, pid in ranks(attempt).items() if rank == when.rank)
    lines = tails.setdefault(number, LogTail(attempt.rank_log(when.rank))).new()
    return any(line["stage"] == when.stage and when.step in {None, line["step"]} for line in lines)
