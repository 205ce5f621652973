"""What must hold after a case, whatever was done to it; returns one line per objection, none if all is well.

    objections = judge(case, scenario, references)

`references`: by layout, the folder of the last checkpoint of an undisturbed run.
"""

import re
from pathlib import Path

import torch

from gemctl.checkpoint.load import read_object
from gemctl.checkpoint.storage import Reader
from gemctl.errors import GemctlError
from gemctl.run.directory import RunDir
from gemctl.run.manifest import FOLDER, checkpoints, read, verify
from tests.chaos.damage import PLANTED
from tests.chaos.layouts import STEPS
from tests.chaos.processes import Case, Ran
from tests.chaos.scenario import Scenario

FROM_SCRATCH = "--from-scratch"  # offered by a resume if no checkpoint can be used
ENDS = {0, 1, 2, 130, 143}  # legitimate exit codes of a command
TOLERANCE = 1e-4  # relative difference of a tensor if only the order of summation differs


def judge(case: Case, scenario: Scenario, references: dict[str, Path]) -> list[str]:
    """All objections to what the case has recorded and to the final state of its run."""
    said = [*case.hung, *case.orphans, *(case.gaps if not case.damaged else [])]
    said += [objection for ran in case.commands for objection in _of_command(ran, bool(case.missed))]
    if (case.folder / PLANTED).exists():
        said.append("a planted pickle ran")
    if case.run is None:
        return [*said, "no run was made"]
    return (
        said
        + _taken(case.run, scenario)
        + _lost(case, case.run, scenario.keep)
        + _of_state(case, case.run, scenario, references)
    )


def _of_command(ran: Ran, missed: bool) -> list[str]:
    """A command succeeds or reports why not; only the suite kills it."""
    name, told = f"gemctl {ran.words[0]}", ran.err.strip().splitlines()
    if "Traceback (most recent call last)" in ran.err:
        return [f"{name} ended with a traceback: {told[-1]}"]
    if ran.code == -9:
        return []
    if ran.code not in ENDS:
        return [f"{name} ended with exit code {ran.code}: {told[-1:]}"]
    if ran.code in {1, 2} and not any(line.startswith("error: ") for line in told):
        return [f"{name} ended with exit code {ran.code} and does not say why: {told[-1:]}"]
    refused = ran.code == 2 and FROM_SCRATCH in ran.err  # right if no checkpoint was intact, which _lost checks
    if ran.wanted == "well" and ran.code != 0 and not missed and not refused:
        return [f"{name} should have ended well, and ended with exit code {ran.code}: {told[-2:]}"]
    return [f"{name} should have been refused"] if ran.wanted == "refused" and ran.code == 0 and not missed else []


def _taken(run: RunDir, scenario: Scenario) -> list[str]:
    """A run may only be taken over from an attempt that has stopped."""
    if any("take_over" in deed.what for command in scenario.commands for deed in command.deeds):
        return []
    ends = {attempt.number: attempt.end() or {} for attempt in run.attempts()}
    taken = [number for number, end in ends.items() if (end.get("cause") or {}).get("kind") == "takeover"]
    return [f"attempt {number} was taken over while it lived" for number in taken]


def _lost(case: Case, run: RunDir, keep: int) -> list[str]:
    """Published checkpoints that the suite has not damaged but that can't be loaded or were passed over."""
    bases = {one.number: (one.base(), one.claim().time) for one in run.attempts() if one.base_file.exists()}
    held = {name: FOLDER.fullmatch(case.holds.get(name, name)) for name in case.published}
    steps = {name: tuple(map(int, match.groups())) for name, match in held.items() if match}

    def void(name: str, before: float) -> bool:
        """Whether an attempt claimed before `before` started from an earlier checkpoint."""
        step, attempt = steps[name]
        return any(number > attempt and base.step < step and at < before for number, (base, at) in bases.items())

    def outlived(name: str, before: float) -> bool:
        """Whether `keep` newer ones existed by then, so that retention may have deleted it."""
        return sum(steps[one] > steps[name] and seen < before for one, seen in case.published.items()) >= keep

    said = []
    for number, (base, claimed) in bases.items():
        there = [
            name
            for name, seen in case.published.items()
            if seen < claimed and steps[name][1] < number and not void(name, claimed)
        ]
        known = [name for name in there if name not in case.damaged and not outlived(name, claimed)]
        best = max((steps[name][0] for name in known), default=0)
        if base.step < best:
            said.append(f"attempt {number} started from step {base.step}, though step {best} was published before it")
        if there and base.checkpoint is None and not base.left_alone:
            said.append(f"attempt {number} started from zero, though {', '.join(sorted(there))} had been published")
        gone = [name for name in base.left_alone if not (run.checkpoints / name).exists()]
        said += [f"{name} was passed over by attempt {number} and is gone" for name in gone]
    present = {one.path.name: one for one in checkpoints(run)}
    for name in case.published.keys() - case.damaged:
        if name in present and present[name].flaw is None:
            said += verify(present[name].path)
        elif not void(name, float("inf")) and not outlived(name, float("inf")):
            said.append(f"{name} was published and is gone")
    return said


def _of_state(case: Case, run: RunDir, scenario: Scenario, references: dict[str, Path]) -> list[str]:
    """The run must have done all its steps, with the state of an undisturbed run."""
    valid = [one for one in checkpoints(run) if one.flaw is None and not verify(one.path)]
    if not valid or valid[0].step != STEPS:
        last = case.commands[-1]
        if scenario.refusal and last.code not in {0, None} and re.search(scenario.refusal, last.err):
            return []
        told = last.err.strip().splitlines()[-2:]
        return [f"the run ended at step {valid[0].step if valid else 0} of {STEPS}; exit code {last.code}: {told}"]
    try:
        return differences(valid[0].path, references[scenario.layout.name], TOLERANCE if scenario.changed else 0.0)
    except GemctlError as error:
        refused = valid[0].path.name in case.damaged and scenario.refusal and re.search(scenario.refusal, str(error))
        return [] if refused else [f"the last checkpoint can't be read: {error}"]


def differences(folder: Path, expected: Path, tolerance: float) -> list[str]:
    """Where the two checkpoints' states differ: by more than the tolerance or, if that is 0, in any bit."""
    mine, reference = read(folder), read(expected)
    if mine.position != reference.position:
        return [f"the position is {mine.position}, it should be {reference.position}"]
    if mine.objects.keys() != reference.objects.keys():
        return [f"other tensors: {sorted(mine.objects.keys() ^ reference.objects.keys())}"]
    readers = Reader(folder, mine), Reader(expected, reference)
    said = []
    for key, stored in reference.objects.items():
        values = [torch.empty(stored.shape, dtype=getattr(torch, stored.dtype)) for _ in readers]
        for reader, value in zip(readers, values, strict=True):
            read_object(reader, key, value)
        if not torch.equal(*(value.view(-1).view(torch.uint8) for value in values)):
            first, second = (value.double() for value in values)
            distance = float((first - second).norm() / second.norm().clamp(min=1e-12))
            if not (tolerance and distance <= tolerance):
                said.append(f"{key} is off by {distance:.2g} of its norm")
    return said
