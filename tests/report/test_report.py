"""The report joins attempts, accounts for every rank-second, and says the same in the terminal, as JSON and as HTML."""

import dataclasses
import html
import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gemctl.config.compose import to_yaml
from gemctl.config.schema import Config, DataConfig, TrainConfig
from gemctl.errors import InputError
from gemctl.launch.progress import Progress
from gemctl.render.page import diff_html, report_html
from gemctl.render.show import plain, rendered
from gemctl.report.compare import compare
from gemctl.report.report import _notes, build
from gemctl.report.resources import GpuMemory
from gemctl.run.attempt import Attempt, Base, claim
from gemctl.run.base import RolledBack, record_rollback
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, create_json, read_log
from gemctl.run.manifest import Manifest, RunFacts, describe_file, publish
from gemctl.startup import Messages

PARTS = ("import", "process_group", "build", "load", "first_batch", "first_step")
RANKS = 4


def train_line(step: int, when: float, seconds: float, **more: Any) -> dict[str, Any]:
    quality = {"ne": 1 - step / 200, "base_rate": 0.2, "logloss": 0.5, "calibration": 1.0}
    return {
        "kind": "train", "step": step, "time": when, "loss": 1 - step / 100, "tasks": {"click": quality},
        "examples": 1000, "tokens": 20_000, "flops": 4e9, "seconds": seconds, "peak": 4e9, "ranks": RANKS,
        "examples_per_s": 1000 / seconds, "tokens_per_s": 20_000 / seconds, "effective_mfu": 1 / seconds,
        "unknown_ids": {"item": 3}, "skipped": 1, "lr": 0.1, "grad_norm": 1.0, **more,
    }  # fmt: skip


def ledger_line(step: int, when: float, parts: dict[str, float], unaccounted: float) -> dict[str, Any]:
    columns = {name: [seconds, seconds, seconds, 0] for name, seconds in parts.items()}
    wall = sum(parts.values()) + unaccounted
    columns["unaccounted"] = [unaccounted] * 3 + [0]
    memory = {"peak_rss": [300, 400, 500.0 * 2**20, 2], "start_rss": [1, 2, 100.0 * 2**20, 2]}
    return {"kind": "interval", "step": step, "time": when, "ranks": RANKS, "wall": [wall] * 3 + [0], "parts": columns,
            **memory}  # fmt: skip


def write_attempt(run: RunDir, number: int, base: int, steps: list[int], end: dict[str, Any] | None) -> Attempt:
    """Each start takes 2 s to launch and 6 s of stages, each interval 5 s, of them 0.1 s unaccounted."""
    attempt = claim(run.path, number, nodes=1, ranks_per_node=RANKS, heartbeat=1.0, owner="supervisor")
    start = 1e9 + 50 * number
    facts = json.loads(attempt.claim_file.read_text())
    attempt.claim_file.write_text(json.dumps(facts | {"time": start}))
    attempt.write_base(Base(None if base == 0 else f"step_{base}.a{number - 1}", base))
    attempt.config.write_text(to_yaml(Config(data=DataConfig("spec.yaml", "t"), train=TrainConfig(steps=40))))
    planned = [{"axis": "ep", "collective": "all-gather", "messages": 1, "bytes": 3000}] * 2
    objects = [{"name": "tables", "place": "device"}, {"name": "input batches", "place": "host"}]
    classes = {"count": 1, "listed": [{"bytes": {"tables": 150 * 2**20, "input batches": 50 * 2**20}}]}
    create_json(attempt.plan, {"classes": classes, "objects": objects, "traffic": planned})
    now = start + 2
    agent = JsonLog(attempt.agent_log(0))
    agent.write({"event": "agent", "pid": 1, "host": "h", "time": start + 0.25})
    agent.write({"event": "ready", "time": start + 1.5, "seconds": 1.25})
    metrics, ledger = JsonLog(attempt.metrics), JsonLog(attempt.ledger)
    for index, step in enumerate(steps):
        startup = dict.fromkeys(PARTS, 1.0 if index == 0 else 0.0)
        now += sum(startup.values()) + 5
        metrics.write(train_line(step, now, 5.0))
        traffic = {"steps": 10, "sent": [["ep", "all-gather", 20.0, 40_960.0], ["world", "all-reduce", 10.0, 160.0]]}
        line = ledger_line(step, now, startup | {"dense_forward": 3.9, "data_wait": 1.0}, 0.1)
        ledger.write(line | {"traffic": traffic})
    if end is not None:
        create_json(attempt.end_file, {"time": now + 3, **end})
    return attempt


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Attempt 1 fails after step 30, attempt 2 goes on from step 20 to the end at step 40."""
    run = RunDir.create(str(tmp_path), "demo", ["gemctl", "train", "x=1"])
    cause = {"text": "rank 2 failed first, in stage step, step 31: killed by SIGKILL", "rank": 2, "log": None}
    write_attempt(run, 1, 0, [10, 20, 30], {"outcome": "failed", "step": 31, "cause": cause})
    second = write_attempt(run, 2, 20, [30, 40], {"outcome": "finished", "step": 40})
    quality = {"examples": 5000, "base_rate": 0.2, "ne": 0.86, "auc": 0.75, "calibration": 1.01, "best_ne": 0.8,
               "gap_closed": 0.7}  # fmt: skip
    JsonLog(second.metrics).write({"kind": "eval", "step": 40, "time": time.time(), "seconds": 2.0, "tasks": {
        "click": quality, "like": quality | {"best_ne": None, "gap_closed": None, "auc": None}}})  # fmt: skip
    return run


def save(run: RunDir, step: int, attempt: int) -> Path:
    folder = run.checkpoints / f"step_{step}.a{attempt}"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"tensors" * 100)
    facts = RunFacts(1, {"dp_shard": 1}, ["host"], "p", "c", 0, {"dense": "adamw"})
    files = {"__0_0.distcp": describe_file(folder / "__0_0.distcp")}
    publish(folder, Manifest(step, attempt, facts, {"step": step}, {}, files))
    return folder


def text(value: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(rendered(value))
    return out.getvalue()


def test_steps_done_again_are_marked_and_leave_the_curve(run: RunDir) -> None:
    report = build(run)
    assert [(line["step"], line["kind"]) for line in report.curve] == [
        (10, "train"), (20, "train"), (30, "train"), (40, "train"), (40, "eval"),
    ]  # fmt: skip
    first, second = report.attempts
    assert (first.outcome, first.redone, first.last_step) == ("failed", 10, 30)
    assert (second.outcome, second.redone, second.base_step) == ("finished", 0, 20)
    assert first.cause == "rank 2 failed first, in stage step, step 31: killed by SIGKILL"
    assert report.step == report.steps == 40 and report.skipped == 4 and report.unknown_ids == {"item": 12}
    assert any("10 steps were repeated" in note for note in report.notes)


def test_steps_after_the_last_line_were_done_too(run: RunDir) -> None:
    JsonLog(run.attempt(1).rank_log(0)).write({"event": "stage", "stage": "step", "step": 34, "time": 1e9})
    first = build(run).attempts[0]
    assert (first.last_step, first.redone) == (34, 14)


def test_scores_that_are_not_finite_are_told(run: RunDir) -> None:
    assert not any("scores that are not finite" in note for note in build(run).notes)
    tasks = {"click": {"examples": 0, "nonfinite": 5000, "ne": None, "auc": None}}
    JsonLog(run.attempt(2).metrics).write(
        {"kind": "eval", "step": 40, "time": time.time(), "seconds": 2.0, "tasks": tasks}
    )
    assert "task click: 5000 rows have non-finite scores and are left out of all figures" in build(run).notes


def test_an_attempt_loses_only_steps_that_it_did_itself(run: RunDir) -> None:
    write_attempt(run, 3, 10, [20], None)
    assert [attempt.redone for attempt in build(run).attempts] == [20, 20, 0]  # 10 to 30, 20 to 40
    write_attempt(run, 4, 0, [10], None)
    assert [attempt.redone for attempt in build(run).attempts] == [30, 20, 10, 0]


def test_traffic_of_a_step_stands_beside_the_planned(run: RunDir) -> None:
    report = build(run)
    gather, agree = report.traffic
    assert (gather.axis, gather.calls, gather.bytes) == ("ep", 2.0, 4096.0)
    assert (gather.planned_calls, gather.planned_bytes) == (2, 6000)
    assert (agree.axis, agree.calls, agree.bytes, agree.planned_calls) == ("world", 1.0, 16.0, None)
    shown = [" ".join(line.split()) for line in text(report).splitlines()]
    assert "ep all-gather 2.0 4.0 KiB 2 5.9 KiB" in shown and "world all-reduce 1.0 16 B – –" in shown


def test_every_rank_second_from_claim_to_end_is_in_the_waterfall(run: RunDir) -> None:
    report = build(run)
    spans = [a.end - a.start for a in report.attempts if a.end is not None]
    recovery = report.attempts[1].recovery_s
    assert recovery is not None
    assert sum(report.waterfall.values()) == pytest.approx(RANKS * (sum(spans) + recovery), rel=1e-9)
    # Attempt 1's third interval was done again; its unaccounted second keeps its name.
    assert report.waterfall["lost_work"] == pytest.approx(4.9 * RANKS)
    assert report.waterfall["lost_at_failure"] == report.waterfall["close"] == pytest.approx(3 * RANKS)
    assert report.waterfall["dense_forward"] == pytest.approx(4 * 3.9 * RANKS)
    assert report.waterfall["launch"] == pytest.approx(2 * 2 * RANKS)
    assert list(report.waterfall)[-1] == "unaccounted"
    assert report.waterfall["unaccounted"] == pytest.approx(5 * 0.1 * RANKS)
    assert report.unaccounted == pytest.approx(report.waterfall["unaccounted"] / sum(report.waterfall.values()))


def test_throughput_first_step_and_memory(run: RunDir) -> None:
    report = build(run)
    assert report.throughput.examples_per_s == pytest.approx(200) and report.throughput.tokens_per_s == pytest.approx(
        4000
    )
    assert report.throughput.effective_mfu == pytest.approx(0.2) and report.throughput.rank_peak == 1e9
    assert report.throughput.flops_per_example == 4e6
    assert report.throughput.local_mfu is None and report.throughput.scaling_ratio is None
    launch = {"agent_start": 0.25, "agent_import": 1.25, "fork": 0.5}
    assert report.first_step == pytest.approx(launch | dict.fromkeys(PARTS, 1.0), abs=1e-3)
    assert report.memory.planned == 200 * 2**20 and report.memory.peak == 500 * 2**20


def test_saves_are_timed_and_failed_ones_and_loads_are_told(run: RunDir) -> None:
    first = run.attempt(1)
    log = JsonLog(first.saves)
    log.write({"event": "saved", "step": 10, "stall": 0.25, "seconds": 2.0})
    log.write({"event": "retry", "step": 20, "fault": "rank 1: disk full", "left": 1})
    log.write({"event": "failed", "step": 20, "fault": "rank 1: disk full", "tolerated": True, "left": 0})
    log.close()
    counts = {"AdamW state": {"objects": 6, "bytes": 100, "checked": 6}}
    create_json(first.loaded, {"checkpoint": "/a/step_5.a9", "step": 5, "tensors": counts})
    notes = build(run).notes
    assert "attempt 1 loaded step_5.a9: AdamW state 6 tensors, 6 of them compared with what was saved" in notes
    assert "step 20: retry: rank 1: disk full" in notes
    assert "saving step 20 failed, training continued without it: rank 1: disk full" in notes


def test_checkpoints_are_verified_and_damage_is_named(run: RunDir) -> None:
    save(run, 20, 1)
    save(run, 30, 1)
    damaged = save(run, 40, 2)
    (damaged / "__0_0.distcp").write_bytes(b"tensorz" * 100)
    states = {c.name: c.state for c in build(run).checkpoints}
    assert states["step_20.a1"] == "verified"
    assert "void" in states["step_30.a1"] and "its hash is not the one" in states["step_40.a2"]


def test_terminal_json_and_html_show_the_same_figures(run: RunDir) -> None:
    save(run, 40, 2)
    report = build(run)
    shown, page = text(report), report_html(report)
    for figure in ("0.8600", "70.0%", "0.7500", "1.010", "20.0%", "step_40.a2", "verified", "killed by SIGKILL",
                   "lost_work", "unaccounted", "10 steps were repeated"):  # fmt: skip
        assert figure in shown and figure in html.unescape(page), figure
    assert "local MFU" in shown and "–" in shown
    assert not re.search(r"(src|href)=|https?://", page), "the page must need no other file"
    back = json.loads(json.dumps(plain(report)))
    assert back["tasks"]["click"]["gap_closed"] == 0.7 and back["unaccounted"] == report.unaccounted


def test_unaccounted_time_above_5_percent_is_said(run: RunDir) -> None:
    attempt = run.attempts()[-1]
    JsonLog(attempt.ledger).write(ledger_line(40, time.time(), {"eval": 1.0}, 30.0))
    assert any("unaccounted" in note for note in build(run).notes)


def test_a_run_that_goes_on_or_never_logged_is_reported_too(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path), "demo", ["gemctl"])
    with pytest.raises(InputError, match="no attempt"):
        build(run)
    write_attempt(run, 1, 0, [], None)
    report = build(run)
    assert report.outcome == "no end written" and report.tasks == {} and report.waterfall == {"unaccounted": 0.0}
    assert "no end written" in text(report) and "no end written" in report_html(report)


def test_two_runs_side_by_side(run: RunDir, tmp_path: Path) -> None:
    other = RunDir.create(str(tmp_path), "other", ["gemctl"])
    attempt = write_attempt(other, 1, 0, [10, 40], {"outcome": "finished", "step": 40})
    config = Config(data=DataConfig("spec.yaml", "t", histories="empty"), train=TrainConfig(steps=40))
    attempt.config.write_text(to_yaml(config))
    JsonLog(attempt.metrics).write({"kind": "eval", "step": 40, "time": 1.0, "seconds": 2.0, "tasks": {
        "click": {"ne": 0.9, "auc": 0.7, "best_ne": 0.8, "gap_closed": 0.5}}})  # fmt: skip
    diff = compare(run, other)
    assert [(s.key, s.first, s.second) for s in diff.settings] == [("data.histories", "keep", "empty")]
    shown = text(diff)
    assert re.search(r"click gap closed +70.0% +50.0% +−20.0 points", shown)
    assert re.search(r"click NE +0.8600 +0.9000 +\+0.0400", shown)


def test_the_diff_tells_shape_from_system(run: RunDir, tmp_path: Path) -> None:
    """The second run's model has half the FLOPs; its steps take 2.5 s in place of 5, of which it waits more."""
    other = RunDir.create(str(tmp_path), "other", ["gemctl"])
    attempt = write_attempt(other, 1, 0, [], {"outcome": "finished", "step": 40})
    metrics, ledger = JsonLog(attempt.metrics), JsonLog(attempt.ledger)
    for step in (10, 40):
        metrics.write(train_line(step, float(step), 2.5, flops=2e9))
        parts = dict.fromkeys(PARTS, 0.0) | {"dense_forward": 1.0, "dense_backward": 0.5, "flag_wait": 1.0}
        ledger.write(ledger_line(step, float(step), parts, 0.0))
    diff = compare(run, other)
    changes = {factor.name: factor.changes for factor in diff.factors}
    assert changes == pytest.approx(
        {
            "FLOPs per example": 2.0,
            "effective MFU": 1.0,
            "ranks": 1.0,
            "peak of one rank (FLOP/s)": 1.0,
            "examples/s": 2.0,
        }
    )
    assert diff.parts["flag_wait"] == (0.0, pytest.approx(2 / 39), pytest.approx(2 / 39))
    assert diff.parts["a step"][1] == pytest.approx(5.0 / 39)
    assert sum(one for name, (one, _, _) in diff.parts.items() if name != "a step") == pytest.approx(
        diff.parts["a step"][0]
    )
    shown = [" ".join(line.split()) for line in text(diff).splitlines()]
    assert "FLOPs per example 4 M 2 M × 2.000" in shown and "flag_wait 0.00 51.28 +51.28" in shown
    page = html.unescape(diff_html(diff))
    assert "Why the speed differs" in page and "+51.28" in page and "× 2.000" in page
    back = json.loads(json.dumps(plain(diff)))
    assert back["parts"]["flag_wait"][2] == pytest.approx(2 / 39)
    assert {factor["name"]: factor["changes"] for factor in back["factors"]} == changes


def test_a_step_is_told_part_by_part_in_milliseconds(run: RunDir) -> None:
    """38 steps counted: 9 and 10 of the first attempt, and 9 and 10 of the second."""
    assert build(run).step_seconds == pytest.approx(
        {"dense_forward": 4 * 3.9 / 38, "data_wait": 4 / 38, "unaccounted": 0.4 / 38}
    )


def test_a_difference_that_shows_as_nothing_has_no_sign(run: RunDir) -> None:
    shown = text(compare(run, run))
    assert not re.search(r"[+−]0[.0]*( |$)", shown), shown
    assert re.search(r"click NE +0.8600 +0.8600 +0.0000", shown)


def test_stragglers_saves_and_roll_backs_are_told(run: RunDir) -> None:
    first, second = run.attempts()
    ledger = JsonLog(second.ledger)
    named = {"kind": "straggler", "step": 25, "time": 1.0, "rank": 3, "host": "n4", "ratio": 3.0, "share": 0.5,
             "part": "dense_backward"}  # fmt: skip
    ledger.write(named)
    cost = {"rank": 3, "host": "n4", "lost": 30.0, "steps": 10, "own": 30.0, "others": 12.0, "part": "dense_backward"}
    line = ledger_line(40, 1.0, dict.fromkeys(PARTS, 0.0) | {"dense_forward": 30.0}, 0.0)
    ledger.write(line | {"stragglers": [cost, cost | {"rank": 1, "host": "n2", "lost": 3.0}]})
    ledger.write(line | {"stragglers": [cost | {"lost": 10.0, "part": "data_wait"}]})
    record_rollback(first, RolledBack(30, "gradient", [2]))
    save(run, 40, 2)
    log = JsonLog(first.saves)
    for step, stall in ((10, 2.0), (20, 0.25), (30, 0.5)):
        log.write({"event": "saved", "step": step, "stall": stall, "seconds": 2.0})
    report = build(run)
    worst, other = report.stragglers
    assert (worst.rank, worst.host, worst.attempt, worst.first_step, worst.steps) == (3, "n4", 2, 25, 20)
    assert (worst.ratio, worst.part, worst.lost) == (2.5, "dense_backward", 40.0)
    assert worst.share == pytest.approx(40 / (RANKS * (2 * 5.0 + 60))) and other.rank == 1
    assert (report.saves.saved, report.saves.first_stall, report.saves.stall, report.saves.most) == (3, 2.0, 0.375, 2.0)
    skipped = "batches skipped, as their gradients were not finite: of step 30 (counted from 0)"
    assert skipped in _notes(dataclasses.replace(report, passed_over=[30]))
    back, recovered = report.attempts
    assert back.rolled_back is not None and back.rolled_back.startswith("rank 2: step 30: a gradient is not finite")
    assert recovered.recovery_s is not None and recovered.first_step_s is not None
    shown, page = text(report), html.unescape(report_html(report))
    for figure in ("Stragglers", "n4", "40.0", "Training stalled", "2.000", "recovery (s)",
                   f"{recovered.recovery_s + recovered.first_step_s:.2f}"):  # fmt: skip
        assert figure in shown and figure in page, figure


def test_progress_names_a_straggler_and_says_no_time_that_it_does_not_know(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemctl.launch.progress.READ_EVERY", 0.0)
    out = io.StringIO()
    third = claim(run.path, 3, nodes=1, ranks_per_node=RANKS, heartbeat=1.0)
    named = {"kind": "straggler", "step": 15, "time": 1.0, "rank": 3, "host": "n4", "ratio": 2.96, "share": 0.5,
             "part": "dense_forward"}  # fmt: skip
    with Progress(40, out) as progress:
        JsonLog(third.metrics).write(train_line(10, 100.0, 5.0))
        JsonLog(third.ledger).write(named)
        progress.follow(third)
        progress.follow(third)
    said = out.getvalue()
    wanted = "rank 3 on n4 takes 3.0 × the others' time, most of it in dense_forward: 50% of all ranks' time is lost"
    assert said.count(wanted) == 1
    assert "step 10/40" in said and "left" not in said


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_that_nobody_reads_falls_silent(terminal: bool, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal was closed, or the reader of the pipe has gone: the run must not end by it."""
    monkeypatch.setattr("gemctl.launch.progress.READ_EVERY", 0.0)
    reader, writer = os.pipe()
    os.close(reader)
    out = io.TextIOWrapper(io.BufferedWriter(Messages(writer, "w")), line_buffering=True)
    monkeypatch.setattr(Messages, "isatty", lambda self: terminal)
    monkeypatch.setattr("sys.stderr", out)
    with Progress(40) as progress:
        progress.follow(run.attempts()[0])
        progress.note("a line that stays")
        progress.follow(run.attempts()[1])
    out.write("said after the run")
    out.close()


def test_progress_follows_the_files_line_by_line(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemctl.launch.progress.READ_EVERY", 0.0)
    monkeypatch.setattr("gemctl.launch.progress.PLAIN_EVERY", 0.0)
    out = io.StringIO()
    first, _ = run.attempts()
    third = claim(run.path, 3, nodes=1, ranks_per_node=RANKS, heartbeat=1.0)
    with Progress(40, out) as progress:
        progress.follow(first)
        progress.follow(third)
        JsonLog(third.rank_log(0)).write({"event": "stage", "stage": "build", "step": None, "time": 0.0})
        progress.follow(third)
        metrics = JsonLog(third.metrics)
        metrics.write(train_line(10, 100.0, 5.0))
        metrics.write(train_line(20, 150.0, 5.0))
        progress.note("a rank failed; trying again")
        progress.follow(third)
    lines = out.getvalue().splitlines()
    assert "step 30/40" in lines[0]
    assert lines[1] == "attempt 3, launching" and lines[2] == "attempt 3, building the model"
    assert lines[3] == "a rank failed; trying again"
    assert len(lines) == 5, "an unchanged state is not said again"
    for figure in ("attempt 3, step 20/40", "loss 0.8000", "NE click 0.9000", "200 examples/s", "4,000 events/s",
                   "effective MFU 20.0%", "1:40 left"):  # fmt: skip
        assert figure in lines[4], figure


def test_progress_on_a_terminal_shows_a_bar(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("gemctl.launch.progress.READ_EVERY", 0.0)
    out = Terminal()
    with Progress(40, out) as progress:
        progress.follow(run.attempts()[0])
        progress.note("a note that stays")
    assert "━" in out.getvalue() and "step 30/40" in out.getvalue() and "a note that stays" in out.getvalue()


def test_a_gpus_peak_is_compared_with_what_the_plan_puts_on_it(run: RunDir) -> None:
    attempt = run.attempt(2)
    line = read_log(attempt.ledger)[-1]
    line |= {"gpu_allocated": [1, 2, 120.0 * 2**20, 1], "gpu_reserved": [1, 2, 130.0 * 2**20, 1]}
    JsonLog(attempt.ledger).write(line)
    memory = build(run).memory
    assert memory.gpu == GpuMemory(150 * 2**20, 120 * 2**20, 130 * 2**20)
    assert memory.planned == 50 * 2**20, "the host's part alone"
    assert re.search(r"GPU: allocated / planned +0\.80", text(build(run)))
