"""A real run that is recorded, and what power losses leave of it resumed for real: the command line, supervisor, agent
and ranks of a tiny model, forked from a process that has imported everything (tests/chaos/commands.py).
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gemctl.cluster import software
from gemctl.run import attempt
from gemctl.run.checkpoints import verify_all
from gemctl.run.directory import list_runs
from tests.chaos import commands
from tests.chaos.layouts import LAYOUTS, prepare
from tests.chaos.suite import CONFIG, ENVIRONMENT, in_forks
from tests.recover.disk_record import load, recording
from tests.recover.power_loss import Crash, Promises, check_all, each, saved_in
from tests.support.waiting import wait_for

LANES = os.cpu_count() or 1
MORE = 2  # steps that a resumed run does


def tell(folder: Path) -> None:
    """Records to folder/record, below folder/runs: saves and prunes on two ranks, of which one is killed, so that a
    second attempt finishes; then a resume that is stopped."""
    commands.preload()
    prepare(folder)
    root = folder / "runs"
    root.mkdir()
    with recording(root, folder / "record") as record:
        words = [*LAYOUTS["two"].words(), f"run.root={root}", "run.name=told", "checkpoint.keep=2"]
        _wait(_start(folder, ["train", str(folder / CONFIG), *words], "kill:rank=1,step=5"))
        (run,) = list_runs(str(root))
        resumed = _start(folder, ["resume", str(run.path), "train.steps=1000"])
        wait_for(lambda: any(found.step > 8 for found in saved_in(run)))
        _wait(_start(folder, ["stop", str(run.path)]))
        record.promise(f"told/{run.run_id}/requests/1.json")
        _wait(resumed)


def _start(folder: Path, words: list[str], inject: str = "") -> tuple[int, Path]:
    output = folder / f"command-{time.monotonic_ns()}"
    return commands.start(words, output, {**ENVIRONMENT, "GEMCTL_INJECT": inject}, folder), output


def _wait(started: tuple[int, Path]) -> None:
    pid, output = started
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        raise RuntimeError(f"exit code {code}: {output.with_name(f'{output.name}.err').read_text()}")


def check(folder: Path, crashes: Sequence[Crash], states: Path) -> list[str]:
    """Faults of what the crashes leave of the recording in folder/record."""
    software.builds = functools.cache(software.builds)  # a quarter of the time otherwise
    return _in_lanes(check_all, folder, crashes, states)


def resume(folder: Path, crashes: Sequence[Crash], states: Path) -> list[str]:
    """Faults of resuming what the crashes leave."""
    commands.preload()
    attempt.PATIENCE = 0.5  # nothing there is alive
    return _in_lanes(_resume_all, folder, crashes, states)


def _in_lanes(work: Callable[..., list[str]], folder: Path, crashes: Sequence[Crash], states: Path) -> list[str]:
    events = load(folder / "record")
    parts = {lane: functools.partial(work, events, crashes[lane::LANES], states) for lane in range(LANES)}
    found = in_forks(parts, LANES)
    return [fault for lane, faults in found for fault in ([f"lane {lane} died"] if faults is None else faults)]


def _resume_all(events: Any, crashes: Sequence[Crash], states: Path) -> list[str]:
    faults: list[str] = []

    def resumed(crash: Crash, root: Path, promised: Promises) -> None:
        try:
            _resume(root, promised)
        except Exception as error:
            faults.append(f"{crash.text()}: {type(error).__name__}: {error}")

    each(events, crashes, states, resumed)
    return faults


def _resume(root: Path, promised: Promises) -> None:
    (run,) = list_runs(str(root))
    before = max((checkpoint.step for checkpoint in saved_in(run)), default=0)
    last = run.last_attempt()
    _wait(_start(root, ["resume", str(run.path), f"train.steps={before + MORE}"]))
    made = run.attempts()[-1]
    assert made.number == (last.number if last is not None else 0) + 1
    assert made.base().step == before >= max((step for step, _ in promised.checkpoints), default=0)
    assert (made.end() or {})["outcome"] == "finished"
    assert saved_in(run)[0].step == before + MORE
    assert not any(verify_all(str(run.path), "").faults.values())
