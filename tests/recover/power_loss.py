"""Judges the run directories that a power loss may leave of a recorded story: what was promised must be there, and
every command must work.

    for fault in check_all(events, draw(events, 2000, seed=0), tmp_path): print(fault)
"""

import argparse
import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemctl.cli import parser_of
from gemctl.commands import list as listing
from gemctl.commands import resume, status
from gemctl.report.report import build
from gemctl.run.checkpoints import verify_all
from gemctl.run.directory import RunDir, list_runs
from gemctl.run.files import read_whole
from gemctl.run.manifest import FOLDER, Checkpoint, checkpoints
from tests.recover.disk_record import Event
from tests.recover.disk_states import Disk, Loss

STEPS = 100  # more than any story has done, so that there is something to resume
SAVES = re.compile(r"(.+)/attempts/(\d+)/saves\.jsonl")
RANKS_BEGIN = re.compile(r"(.+/attempts/\d+)/ranks/0\.jsonl")
DELETED = re.compile(rf"/{FOLDER.pattern}(/manifest\.json)?$")  # what goes first
FIRST_ATTEMPT = re.compile(r"(.+)/attempts/1")
OF_ATTEMPT = ("claim.json", "base.json", "config.yaml", "plan.json", "request.json")
OF_SUBMISSION = ("config.yaml", "plan.json", "request.json")


@dataclass(frozen=True, order=True)
class Crash:
    """The power goes after `events` of them; what is then on the disk. `how`: see Loss."""

    events: int
    how: str
    seed: int

    def text(self) -> str:
        return f"after event {self.events}, {self.how} is on the disk, seed {self.seed}"


class Promises:
    """What somebody relies on already, by the events so far."""

    def __init__(self) -> None:
        self.run: str | None = None
        self.files: set[str] = set()
        self.checkpoints: set[tuple[int, int]] = set()  # step and attempt of those that were said to be saved
        self._deleted: set[tuple[int, int]] = set()

    def see(self, event: Event) -> None:
        if event.kind == "promise":
            self.files.add(event.path)
        elif event.kind == "mkdir" and (match := FIRST_ATTEMPT.fullmatch(event.path)):
            self.run = match[1]
            self.files |= {f"{self.run}/run.json", *(f"{self.run}/submissions/1/{name}" for name in OF_SUBMISSION)}
        elif event.kind == "create" and (match := RANKS_BEGIN.fullmatch(event.path)):
            self.files |= {f"{match[1]}/{name}" for name in OF_ATTEMPT}
        elif event.kind in {"unlink", "rename"} and (match := DELETED.search(event.path)):
            self._deleted.add((int(match[1]), int(match[2])))
        elif event.kind == "data" and (match := SAVES.fullmatch(event.path)):
            lines = [json.loads(line) for line in event.data.splitlines(keepends=True) if line.endswith(b"\n")]
            self.checkpoints |= {(line["step"], int(match[2])) for line in lines if line["event"] == "saved"}
        self.checkpoints -= self._deleted


def draw(events: Sequence[Event], count: int, seed: int) -> list[Crash]:
    """That many crashes, over all of the story: the worst and the mildest of moments, and others."""
    chance = random.Random(seed)
    ways = ["least", "drawn", "drawn", "drawn", "most"]
    return [Crash(chance.randrange(1, len(events) + 1), chance.choice(ways), number) for number in range(count)]


def at_end(events: Sequence[Event]) -> Crash:
    """After the last event all that was not fsynced is lost."""
    return Crash(len(events), "least", 0)


def check_all(events: Sequence[Event], crashes: Iterable[Crash], folder: Path) -> list[str]:
    """Every fault of the states that the crashes leave, which are made in `folder`."""
    faults: list[str] = []

    def check(crash: Crash, root: Path, promised: Promises) -> None:
        try:
            judge(root, promised)
            if crash.seed % 4 == 0:
                report(root)
        except Exception as error:
            faults.append(f"{crash.text()}: {type(error).__name__}: {error}")

    each(events, crashes, folder, check)
    return faults


def each(
    events: Sequence[Event], crashes: Iterable[Crash], folder: Path, do: Callable[[Crash, Path, Promises], None]
) -> None:
    """Calls `do` with each crash, the folder that it leaves, and what had been promised by then."""
    disk, promised, done = Disk(), Promises(), 0
    for crash in sorted(crashes):
        for event in events[done : crash.events]:
            disk.do(event)
            promised.see(event)
        done = crash.events
        root = folder / f"state-{crash.events}-{crash.how}-{crash.seed}"
        root.mkdir()
        disk.write(root, Loss(crash.how, random.Random(crash.seed)))
        do(crash, root, promised)
        shutil.rmtree(root)


def judge(root: Path, promised: Promises) -> None:
    """AssertionError, or whatever a command raises, where something promised is gone or a command does not work."""
    found = listing.run(argparse.Namespace(root=str(root), last=None, json=False))
    assert found.unreadable == [], f"not listed: {found.unreadable}"
    for path in promised.files:
        file = root / path
        assert file.is_file() and file.stat().st_size > 0, f"{path} is gone"
        assert file.suffix != ".json" or read_whole(file) is not None, f"{path} is cut"
    paths = [run.path for run in found.runs]
    assert promised.run is None or paths == [str(root / promised.run)], f"listed: {paths}"
    for one in found.runs:
        run = RunDir.open(one.path)
        status.run(argparse.Namespace(run=one.path, root=""))
        saved = saved_in(run)
        there = {(checkpoint.step, checkpoint.attempt) for checkpoint in saved}
        assert promised.checkpoints <= there, f"lost: {sorted(promised.checkpoints - there)}"
        if saved:
            faults = [fault for faults in verify_all(one.path, "").faults.values() for fault in faults]
            assert faults == [], f"damaged: {faults}"
        if promised.run is not None:
            ahead = resume.run(resuming(one.path))
            numbers = [*(attempt.attempt for attempt in one.attempts), *(checkpoint.attempt for checkpoint in saved), 0]
            goes_on = (ahead.step, ahead.attempt)
            assert goes_on[0] == max((checkpoint.step for checkpoint in saved), default=0), f"goes on from {goes_on}"
            assert goes_on[1] > max(numbers), f"attempt {goes_on[1]} again, after {numbers}"


def report(root: Path) -> None:
    """Whatever a command raises."""
    for run in list_runs(str(root)):
        if any(attempt.claimed for attempt in run.attempts()):
            build(run)


def saved_in(run: RunDir) -> list[Checkpoint]:
    """The checkpoints that count, newest first."""
    return [checkpoint for checkpoint in checkpoints(run) if checkpoint.state == "valid"]


def resuming(path: str) -> Any:
    """The arguments of `gemctl resume PATH --dry-run`."""
    return parser_of("resume").parse_args([path, f"train.steps={STEPS}", "--dry-run"])
