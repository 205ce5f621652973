"""Sums over an attempt's lines: a report by them says what one by the single lines says, and takes no longer."""

import resource
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gemctl.report.report import build
from gemctl.run import rollup
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog
from tests.report.test_report import PARTS, ledger_line, train_line, write_attempt

START = 1e9 + 50


def straggler(rank: int, lost: float) -> dict[str, Any]:
    return {"rank": rank, "host": None, "lost": lost, "steps": 10, "own": 2.0, "others": 1.0, "part": f"part {lost}"}


def lines(intervals: int) -> list[tuple[str, dict[str, Any]]]:
    """(file, line) in the order in which a run writes them: ten steps an interval, every seventh with an evaluation."""
    found: list[tuple[str, dict[str, Any]]] = []
    for index in range(intervals):
        step, when = 10 * (index + 1), START + 8 + 5.0 * index
        startup = dict.fromkeys(PARTS, 1.0 if index == 0 else 0.0)
        train = train_line(step, when, 4.0 + index % 3, spikes=index % 2, passed_over=0)
        train |= {"unknown_ids": {"item": index, f"table {index % 2}": 1}, "uncounted": {"click": index % 2}}
        if index == 0:
            train |= {"examples": 0, "tokens": 0, "flops": 0.0}
        parts = startup | {"dense_forward": 3.0 + index % 5, "data_wait": 1.0}
        sent = [["ep", "all-gather", 20.0, 40_960.0 + index], ["world", "all-reduce", 10.0, 160.0]]
        ledger = ledger_line(step, when, parts, 0.1) | {"traffic": {"steps": 10, "sent": sent}, "stragglers": []}
        if index % 4 == 1:
            ledger["stragglers"] = [straggler(2, float(index)), straggler(index % 3, 1.0)]
            found.append(("ledger", {"kind": "straggler", "time": when - 1, "rank": 2, "step": step - 5}))
        found += [("metrics", train), ("ledger", ledger)]
        if index % 7 == 6:
            quality = {"examples": 50, "ne": 0.9, "auc": 0.7, "base_rate": 0.2, "calibration": 1.0, "best_ne": None}
            found.append(
                ("metrics", {"kind": "eval", "step": step, "time": when, "seconds": 2.0, "tasks": {"click": quality}})
            )
    return found


def last_line(step: int) -> dict[str, Any]:
    """What an attempt says of the time after its last interval: the ledger alone, without traffic."""
    return ledger_line(step, START + 8 + 0.5 * step + 3, {"eval": 2.0, "checkpoint_stall": 0.5}, 0.1)


def write(attempt: Attempt, intervals: int, *, summed: bool) -> None:
    logs = {"metrics": JsonLog(attempt.metrics), "ledger": JsonLog(attempt.ledger)}
    sums = rollup.Rollup(attempt.rollup) if summed else None
    for file, line in lines(intervals):
        logs[file].write(line)
        if sums is not None:
            sums.add(file, line)
            if line["kind"] == "interval":
                sums.interval_done(logs["metrics"].size(), logs["ledger"].size())
    logs["ledger"].write(last_line(10 * intervals))


def run_of(folder: Path, intervals: int, base: int | None, *, summed: bool) -> RunDir:
    """A run whose first attempt wrote so many intervals, and whose second started from step `base`."""
    run = RunDir.create(str(folder), "long", ["gemctl", "train"])
    write(write_attempt(run, 1, 0, [], {"outcome": "failed", "step": 10 * intervals}), intervals, summed=summed)
    if base is not None:
        write_attempt(run, 2, base, [base + 10], {"outcome": "finished", "step": base + 10})
    return run


def said(run: RunDir) -> dict[str, Any]:
    """The report without its curve, its checkpoints (there are none) and what names the run."""
    found = asdict(build(run))
    left_out = {"curve", "checkpoints", "run", "path", "conclusion", "notes"}
    return {key: rounded(found[key]) for key in found if key not in left_out}


def rounded(value: Any) -> Any:
    """Sums in another order differ in their last digits."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


@pytest.mark.parametrize("base", [None, 5, 10, 110, 505, 1240])
@pytest.mark.parametrize("way", ["written while training", "summed while read"])
def test_a_report_by_sums_says_what_the_lines_say(
    base: int | None, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`base`: where the next attempt started, between intervals, at the end of one, of a sum, beyond all."""
    monkeypatch.setattr(rollup, "EVERY", 10)
    plain = said(run_of(tmp_path / "plain", 124, base, summed=False))
    if way == "summed while read":
        monkeypatch.setattr(rollup, "LARGE", 0)
    run = run_of(tmp_path / "summed", 124, base, summed=way == "written while training")
    assert said(run) == plain
    assert len(build(run).curve) < 60, "sums were read, not the lines"


def test_lines_after_the_last_sum_are_added_and_sums_alone_are_enough(tmp_path: Path) -> None:
    attempt = write_attempt(RunDir.create(str(tmp_path), "x", []), 1, 0, [], None)
    write(attempt, 250, summed=True)
    metrics, ledger = rollup.lines(attempt, float("inf"))
    steps = [line["step"] for line in ledger if line["kind"] == "interval"]
    assert steps == [10, 1010, 2010, 2500, 2500]
    assert sum(line["examples"] for line in metrics if line["kind"] == "train") == 249 * 1000
    assert [line["step"] for line in metrics if line["kind"] == "eval"] == list(range(70, 2501, 70))
    attempt.metrics.unlink()
    attempt.ledger.unlink()
    metrics, ledger = rollup.lines(attempt, float("inf"))
    assert [line["step"] for line in ledger if line["kind"] == "interval"] == [10, 1010, 2010]


@pytest.mark.slow
def test_ten_million_steps_are_reported_in_seconds_and_little_memory(tmp_path: Path) -> None:
    attempt = write_attempt(RunDir.create(str(tmp_path), "x", []), 1, 0, [], {"outcome": "finished", "step": 10**7})
    log, sums = JsonLog(attempt.rollup), rollup.Sums()
    for file, line in lines(rollup.EVERY)[-300:]:
        sums.add(file, line)
    metrics, ledger = sums.take()
    del metrics[:-2], ledger[:-2]  # an evaluation and a straggler each
    for number in range(10**6 // rollup.EVERY):
        for line in (*metrics, *ledger):
            line["step"] = 10 * rollup.EVERY * (number + 1)
        log.write({"metrics": metrics, "ledger": ledger, "read": [0, 0]})
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    report = build(RunDir.open(attempt.path.parents[1]))
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
    assert report.step == 10**7


def test_an_attempts_last_line_takes_no_traffic_from_the_sum() -> None:
    parts = dict.fromkeys(PARTS, 0.0)
    sent = {"traffic": {"steps": 10, "sent": [["ep", "all-gather", 20.0, 4096.0]]}}
    sums = rollup.Sums()
    for line in (ledger_line(10, START, parts, 0.1) | sent, ledger_line(20, START, parts, 0.1) | sent):
        sums.add("ledger", line)
    sums.add("ledger", ledger_line(20, START, parts, 0.1))  # what came after the last interval: a save, an evaluation
    assert sums.take()[1][0]["traffic"] == {"steps": 20, "sent": [["ep", "all-gather", 40.0, 8192.0]]}
