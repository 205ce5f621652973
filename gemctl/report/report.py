"""What a run reached and where its time went, from the files of all its attempts; and the result of `gemctl eval`.

    report = build(RunDir.open("runs/synthetic/20261129-…"))

Steps that a later attempt repeated count as lost work, not as progress. Rank-seconds are summed over the ranks.
"""

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gemctl.config.compose import from_yaml
from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.report.attempts import AttemptReport, Journal, Line, attempt_reports, read_journals
from gemctl.report.efficiency import StragglerReport, Throughput, efficiency, stragglers, throughput, waterfall
from gemctl.report.resources import (
    CheckpointReport,
    Memory,
    SavesReport,
    TrafficReport,
    checkpoint_reports,
    memory,
    saves_report,
    traffic,
)
from gemctl.run.conclusion import ending
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log, read_text, read_whole
from gemctl.run.inputs import here


@dataclass
class Report:
    """`conclusion`: how it ended, unless it has finished or is running; `step_shares`: of the steps' rank-seconds, by
    part; `step_seconds`: of a step, mean over steps and ranks, by part; `waterfall`: rank-seconds of all attempts by
    part; `unaccounted`: the share of them that no clock covers; `first_step`: seconds by stage of the last attempt;
    `stragglers`: the most costly first; `curve`: the lines of metrics.jsonl that count, in order."""

    run: dict[str, Any]
    path: str
    outcome: str
    conclusion: str | None
    step: int
    steps: int | None
    tasks: dict[str, dict[str, Any]]
    tasks_step: int | None
    tasks_from: str  # "evaluation" or "training"
    throughput: Throughput
    step_shares: dict[str, float]
    step_seconds: dict[str, float]
    waterfall: dict[str, float]
    unaccounted: float | None
    first_step: dict[str, float]
    checkpoints: list[CheckpointReport]
    saves: SavesReport
    stragglers: list[StragglerReport]
    attempts: list[AttemptReport]
    memory: Memory
    traffic: list[TrafficReport]  # of the last attempt
    unknown_ids: dict[str, int]
    skipped: int  # steps with a non-finite loss
    spikes: int  # steps with a loss spike
    uncounted: dict[str, int]  # by task, steps without a row that counts for it
    passed_over: list[int]  # steps whose batches were skipped, as the run had been rolled back from them
    notes: list[str]
    curve: list[Line] = field(default_factory=list)


@dataclass
class Evaluation:
    """A checkpoint's quality on a data set, and a baseline's on the same rows. `tasks` and `baseline`: the metrics of
    gemctl/train/metrics.py by task; without a `baseline`, `baseline_reason` says why. `out`: the Parquet file with the
    scores, if one was asked for."""

    run: str
    checkpoint: str
    step: int
    data: str
    rows: int
    seconds: float
    tasks: dict[str, dict[str, Any]]
    baseline: dict[str, dict[str, Any]] | None
    baseline_reason: str | None
    out: str | None
    notes: list[str]


def build(run: RunDir) -> Report:
    """Reads the run. InputError if it has no attempt."""
    journals = read_journals(run)
    if not journals:
        raise InputError(f"{run.path}: the run has no attempt yet, so there is nothing to report")
    counted = [line for journal in journals for line in journal.metrics if line["step"] <= journal.limit]
    train = [line for line in counted if line["kind"] == "train"]
    evaluations = [line for line in counted if line["kind"] == "eval"]
    attempts = attempt_reports(journals)
    final = (evaluations or train or [{}])[-1]
    config = _config(run, journals[-1])
    speed = efficiency(journals, config)
    parts = waterfall(journals, attempts)
    total = sum(parts.values())
    report = Report(
        run=run.info(),
        path=str(run.path),
        outcome=attempts[-1].outcome,
        conclusion=ending(run),
        step=max([attempts[-1].last_step, *(line["step"] for line in train)]),
        steps=config.train.steps if config else None,
        tasks=final.get("tasks", {}),
        tasks_step=final.get("step"),
        tasks_from="evaluation" if evaluations else "training",
        throughput=throughput(train, speed),
        step_shares=speed.shares,
        step_seconds=speed.seconds,
        waterfall=parts,
        unaccounted=parts["unaccounted"] / total if total else None,
        first_step=journals[-1].startup(),
        checkpoints=checkpoint_reports(run),
        saves=saves_report(journals),
        stragglers=stragglers(journals),
        attempts=attempts,
        memory=memory(journals[-1]),
        traffic=traffic(journals[-1]),
        unknown_ids=_sums(train, "unknown_ids"),
        skipped=sum(line["skipped"] for line in train),
        spikes=sum(line.get("spikes", 0) for line in train),
        uncounted=_sums(train, "uncounted"),
        passed_over=sorted({step for journal in journals for step in journal.base().passed_over}),
        notes=speed.notes,
        curve=counted,
    )
    report.notes += _notes(report) + _state_notes(run)
    return report


def _config(run: RunDir, journal: Journal) -> Config | None:
    """The attempt's configuration, if it got that far, with the current paths of its data."""
    if not journal.attempt.configured:
        return None
    config = from_yaml(read_text(journal.attempt.config), str(journal.attempt.config))
    return replace(config, data=here(config.data, journal.attempt.path, run.path))


def _sums(lines: list[Line], name: str) -> dict[str, int]:
    """The sums over all lines of the counts in the mapping `name`."""
    counts = Counter[str]()
    for line in lines:
        counts.update(line.get(name, {}))
    return dict(counts)


def _state_notes(run: RunDir) -> list[str]:
    """What each attempt loaded, and which saves failed."""
    notes = []
    for attempt in run.attempts():
        if (loaded := read_whole(attempt.loaded)) is not None:
            kinds = ", ".join(f"{kind} {count['objects']}" for kind, count in loaded["tensors"].items())
            checked = sum(count["checked"] for count in loaded["tensors"].values())
            what = f"attempt {attempt.number} loaded {Path(loaded['checkpoint']).name}: {kinds} tensors"
            notes.append(f"{what}, {checked} of them compared with what was saved")
        notes += [_failed_save(line) for line in read_log(attempt.saves) if "fault" in line]
    return notes


def _failed_save(line: Line) -> str:
    if line["event"] == "failed":
        end = "training continued without it" if line["tolerated"] else "the attempt ended"
        return f"saving step {line['step']} failed, {end}: {line['fault']}"
    return f"step {line['step']}: {line['event']}: {line['fault']}"


def _notes(report: Report) -> list[str]:
    """What a reader must know to interpret the figures."""
    notes = []
    if report.outcome == "no end written":
        age = time.time() - max([line["time"] for line in report.curve], default=report.attempts[-1].start)
        notes.append(f"the last attempt has not recorded its end; its last line is {age:.0f} s old")
    redone = sum(attempt.redone for attempt in report.attempts)
    if redone:
        notes.append(f"{redone} steps were repeated by a later attempt; they count as lost_work and lost_at_failure")
    if report.tasks and report.tasks_from == "training":
        notes.append("there was no evaluation: quality is that of the last training interval")
    for task, quality in report.tasks.items():
        if lost := quality.get("nonfinite"):
            notes.append(f"task {task}: {lost} rows have non-finite scores and are left out of all figures")
    taken = report.step - report.skipped - report.spikes - len(report.passed_over)
    for task, count in report.uncounted.items():
        steps = "any step, so nothing was learned of it" if count >= taken else f"{count:,} of {taken:,} steps"
        notes.append(f"task {task}: no row counted (label null or masked, or weight 0) in {steps}")
    if report.skipped:
        notes.append(f"steps skipped for a non-finite loss: {report.skipped}")
    if report.spikes:
        notes.append(f"steps skipped for a loss spike (train.spike): {report.spikes}")
    if report.passed_over:
        steps = ", ".join(map(str, report.passed_over))
        notes.append(f"batches skipped, as their gradients were not finite: of step {steps} (counted from 0)")
    if report.unaccounted is not None and report.unaccounted > 0.05:
        notes.append(f"{report.unaccounted:.1%} of the time is unaccounted for, more than the expected 5%")
    return notes
