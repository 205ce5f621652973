"""What a run reached and where its time went, joined from the files of all its attempts.

    report = build(RunDir.open("runs/synthetic/20261129-…"))

Attempts overlap: what an attempt did past the checkpoint that a later one started from was done again. Such lines are
marked and count as lost work, not as progress. All seconds are rank-seconds: the sum over the ranks.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.report.efficiency import Efficiency, efficiency
from gemctl.report.journal import LAUNCH, STARTUP, Journal, Line, read_journals
from gemctl.report.traffic import TrafficReport, traffic
from gemctl.report.waiting import StragglerReport, stragglers
from gemctl.run.base import rolled_back
from gemctl.run.checkpoints import size_of
from gemctl.run.conclusion import cause_of, ending
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log, read_text, read_whole
from gemctl.run.inputs import here
from gemctl.run.manifest import Checkpoint, checkpoints, verify


@dataclass
class AttemptReport:
    """One attempt. `redone`: steps that a later attempt did again. Times are seconds since the epoch.

    Its recovery, where it followed by itself, is `recovery_s` + `first_step_s`.
    """

    number: int
    start: float
    end: float | None
    outcome: str  # finished, stopped, failed, killed, or "no end written" (running, or killed with its supervisor)
    cause: str | None
    host: str
    ranks: int
    base_step: int
    last_step: int
    redone: int
    first_step_s: float | None  # from the claim to the end of the first step
    recovery_s: float | None  # from the end of the attempt before, if the same supervisor made both
    passed_over: list[int]  # steps whose batches it did not look at, as earlier attempts had rolled back from them
    rolled_back: str | None  # why it gave up its steps since its last checkpoint


@dataclass
class CheckpointReport:
    """`state`: verified, or what is wrong with it. Seconds that training was `stalled`, and until it was published."""

    name: str
    step: int
    attempt: int
    bytes: int
    state: str
    stalled: float | None
    saved_in: float | None


@dataclass
class SavesReport:
    """All saves of the run; seconds that training was stalled. `first_stall`: of the last attempt's first, which also
    gets its memory; `stall`: the later ones' median; `most`: of all. `failed`: tries that the storage refused."""

    saved: int
    failed: int
    first_stall: float | None
    stall: float | None
    most: float | None


@dataclass
class Throughput:
    """Means over the steps that counted, without start-up, evaluations and the first step of each attempt."""

    examples_per_s: float | None = None
    tokens_per_s: float | None = None
    flops_per_example: float | None = None
    rank_peak: float | None = None  # FLOP/s of one rank
    effective_mfu: float | None = None
    local_mfu: float | None = None  # needs the layers' own times (`gemctl bench layers`)
    scaling_ratio: float | None = None  # by division
    ledger_ratio: float | None = None  # the same from the ledger


@dataclass
class Memory:
    """Bytes on the rank that has most; `shared` is what it had when it began: interpreter, libraries, agent's pages."""

    planned: int | None
    peak: int | None
    shared: int | None
    gpu: "GpuMemory | None" = None


@dataclass
class GpuMemory:
    """Bytes of one GPU on the rank that has most: planned, given to tensors, held by the allocator."""

    planned: int | None
    allocated: int
    reserved: int


@dataclass
class Report:
    """`conclusion`: how it ended, unless it has finished or goes on; `step_shares`: of the steps' rank-seconds, by
    part; `step_seconds`: of one step, mean over steps and ranks, by part; `waterfall`: rank-seconds by part over all
    attempts; `unaccounted`: the share of them that no clock covers; `first_step`: seconds by stage of the last attempt;
    `stragglers`: those that cost most first; `curve`: the lines of metrics.jsonl that counted, in order."""

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
    skipped: int  # for a loss that was not finite
    spikes: int  # for a loss that was a spike
    uncounted: dict[str, int]  # by task, steps that were taken in which no row counted for it
    passed_over: list[int]  # steps whose batches were not looked at, as the run had rolled back from them
    notes: list[str]
    curve: list[Line] = field(default_factory=list)


def build(run: RunDir) -> Report:
    """Reads the run. InputError if it has no attempt."""
    journals = read_journals(run)
    if not journals:
        raise InputError(f"{run.path}: no attempt was made yet, so there is nothing to report")
    counted = [line for journal in journals for line in journal.metrics if line["step"] <= journal.limit]
    train = [line for line in counted if line["kind"] == "train"]
    evaluations = [line for line in counted if line["kind"] == "eval"]
    attempts = _attempts(journals)
    final = (evaluations or train or [{}])[-1]
    waterfall = _waterfall(journals, attempts)
    config = _config(run, journals[-1])
    found = efficiency(journals, config)
    total = sum(waterfall.values())
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
        throughput=_throughput(train, found),
        step_shares=found.shares,
        step_seconds=found.seconds,
        waterfall=waterfall,
        unaccounted=waterfall["unaccounted"] / total if total else None,
        first_step=journals[-1].startup(),
        checkpoints=_checkpoints(run),
        saves=_saves(journals),
        stragglers=stragglers(journals),
        attempts=attempts,
        memory=_memory(journals[-1]),
        traffic=traffic(journals[-1]),
        unknown_ids=_unknown_ids(train),
        skipped=sum(line["skipped"] for line in train),
        spikes=sum(line.get("spikes", 0) for line in train),
        uncounted=_uncounted(train),
        passed_over=sorted({step for journal in journals for step in journal.base().passed_over}),
        notes=found.notes,
        curve=counted,
    )
    report.notes += _notes(report) + _state_notes(run)
    return report


def _attempts(journals: list[Journal]) -> list[AttemptReport]:
    reports: list[AttemptReport] = []
    before: tuple[tuple[str, int], float | None] | None = None
    for journal in journals:
        back = rolled_back(journal.attempt)
        claim, end = journal.attempt.claim(), journal.attempt.end()
        last = journal.last_step()
        redone = int(last - max(journal.limit, journal.base_step())) if journal.limit < last else 0
        recovery = claim.time - before[1] if before and before[0] == (claim.host, claim.pid) and before[1] else None
        reports.append(
            AttemptReport(
                number=journal.attempt.number,
                start=claim.time,
                end=end["time"] if end else None,
                outcome=end["outcome"] if end else "no end written",
                cause=cause_of(end),
                host=claim.host,
                ranks=journal.ranks,
                base_step=journal.base_step(),
                last_step=last,
                redone=redone,
                first_step_s=sum(journal.startup().values()) or None,
                recovery_s=recovery,
                passed_over=journal.base().passed_over,
                rolled_back=back.text() if back else None,
            )
        )
        before = ((claim.host, claim.pid), end["time"] if end else None)
    return reports


def _config(run: RunDir, journal: Journal) -> Config | None:
    """The attempt's configuration, if it got that far, with the places where its data are now."""
    from gemctl.config.compose import from_yaml  # noqa: PLC0415

    if not journal.attempt.configured:
        return None
    config = from_yaml(read_text(journal.attempt.config), str(journal.attempt.config))
    return replace(config, data=here(config.data, journal.attempt.path, run.path))


def _throughput(train: list[Line], found: Efficiency) -> Throughput:
    timed = [line for line in train if line["examples"]]
    seconds = sum(line["seconds"] for line in timed)
    if not seconds:
        return Throughput()
    total = {name: sum(line[name] for line in timed) for name in ("examples", "tokens", "flops")}
    with_peak = [line for line in timed if line["peak"]]
    available = sum(line["peak"] * line["seconds"] for line in with_peak)
    return Throughput(
        examples_per_s=total["examples"] / seconds,
        tokens_per_s=total["tokens"] / seconds,
        flops_per_example=total["flops"] / total["examples"],
        rank_peak=with_peak[-1]["peak"] / with_peak[-1]["ranks"] if with_peak else None,
        effective_mfu=sum(line["flops"] for line in with_peak) / available if available else None,
        local_mfu=found.local_mfu,
        scaling_ratio=found.scaling_ratio,
        ledger_ratio=found.ledger_ratio,
    )


def _waterfall(journals: list[Journal], attempts: list[AttemptReport]) -> dict[str, float]:
    """Rank-seconds by part, largest first, `unaccounted` last."""
    total: dict[str, float] = defaultdict(float)
    for journal, attempt in zip(journals, attempts, strict=True):
        for name, seconds in _rank_seconds(journal, attempt):
            total[name] += seconds
    unaccounted = total.pop("unaccounted", 0.0)
    ordered = sorted(((name, seconds) for name, seconds in total.items() if seconds > 0), key=lambda item: -item[1])
    return dict(ordered) | {"unaccounted": unaccounted}


def _rank_seconds(journal: Journal, attempt: AttemptReport) -> Iterator[tuple[str, float]]:
    """(part, rank-seconds) of one attempt, from its claim to its end; work done again is `lost_work`."""
    if attempt.recovery_s:
        yield "recovery", attempt.recovery_s * attempt.ranks
    if not journal.ledger:
        if attempt.end is not None:
            yield "failed_start", (attempt.end - attempt.start) * attempt.ranks
        return
    startup = journal.startup()
    yield "launch", sum(startup[name] for name in LAUNCH) * attempt.ranks
    for line in journal.ledger:
        lost = line["step"] > journal.limit
        for name, (_, mean, _, _) in line["parts"].items():
            keeps_name = not lost or name in STARTUP or name == "unaccounted"
            yield name if keeps_name else "lost_work", mean * line["ranks"]
    if attempt.end is not None:
        after = max(0.0, attempt.end - journal.ledger[-1]["time"]) * attempt.ranks
        yield "close" if attempt.outcome in {"finished", "stopped"} else "lost_at_failure", after


def _checkpoints(run: RunDir) -> list[CheckpointReport]:
    found = []
    for checkpoint in checkpoints(run):
        faults = [checkpoint.flaw] if checkpoint.flaw else verify(checkpoint.path)
        size = size_of(checkpoint.path)
        state = "; ".join(faults) if faults else "verified"
        saved = _save(run, checkpoint)
        times = (saved.get("stall"), saved.get("seconds"))
        found.append(CheckpointReport(checkpoint.path.name, checkpoint.step, checkpoint.attempt, size, state, *times))
    return found


def _save(run: RunDir, checkpoint: Checkpoint) -> Line:
    """What its attempt wrote of the save."""
    lines = read_log(run.attempt(checkpoint.attempt).saves)
    saved = [line for line in lines if line["event"] == "saved" and line["step"] == checkpoint.step]
    return saved[-1] if saved else {}


def _saves(journals: list[Journal]) -> SavesReport:
    lines = [read_log(journal.attempt.saves) for journal in journals]
    saved = [[line["stall"] for line in of if line["event"] == "saved"] for of in lines]
    first = [stalls[0] for stalls in saved if stalls]
    later = [stall for stalls in saved for stall in stalls[1:]]
    return SavesReport(
        saved=len(first) + len(later),
        failed=sum("fault" in line for of in lines for line in of),
        first_stall=first[-1] if first else None,
        stall=median(later) if later else None,
        most=max([*first, *later], default=None),
    )


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
        end = "training went on without it" if line["tolerated"] else "the run ended"
        return f"saving step {line['step']} failed, {end}: {line['fault']}"
    return f"step {line['step']}: {line['event']}: {line['fault']}"


def _memory(journal: Journal) -> Memory:
    plan = read_whole(journal.attempt.plan)
    last = journal.ledger[-1] if journal.ledger else {}
    allocated = last.get("gpu_allocated", [0, 0, 0])[2]
    gpu = GpuMemory(_planned(plan, "device"), int(allocated), int(last["gpu_reserved"][2])) if allocated else None
    planned = _planned(plan, "host") if gpu else _planned(plan, "device", "host")
    if not last:
        return Memory(planned, None, None)
    return Memory(planned, int(last["peak_rss"][2]), int(last["start_rss"][2]), gpu)


def _planned(plan: Line | None, *places: str) -> int | None:
    """Bytes that the plan has in these places on the rank that has most in all."""
    if plan is None:
        return None
    sizes = plan["classes"]["listed"][0]["bytes"]
    return sum(int(sizes[item["name"]]) for item in plan["objects"] if item["place"] in places)


def _uncounted(train: list[Line]) -> dict[str, int]:
    counts = Counter[str]()
    for line in train:
        counts.update(line.get("uncounted", {}))
    return dict(counts)


def _unknown_ids(train: list[Line]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for line in train:
        for table, count in line["unknown_ids"].items():
            counts[table] += count
    return dict(counts)


def _notes(report: Report) -> list[str]:
    """What a reader must know before believing the figures."""
    notes = []
    if report.outcome == "no end written":
        age = time.time() - max([line["time"] for line in report.curve], default=report.attempts[-1].start)
        notes.append(f"the last attempt has not written its end; its last line is {age:.0f} s old")
    redone = sum(attempt.redone for attempt in report.attempts)
    if redone:
        notes.append(f"{redone} steps were done again by a later attempt; they count as lost_work and lost_at_failure")
    if report.tasks and report.tasks_from == "training":
        notes.append("no evaluation was made: the figures are of the last training interval")
    for task, quality in report.tasks.items():
        if lost := quality.get("nonfinite"):
            notes.append(f"task {task}: {lost} rows have scores that are not finite; they are in no other figure")
    taken = report.step - report.skipped - report.spikes - len(report.passed_over)
    for task, count in report.uncounted.items():
        steps = "any step; nothing was learned of it" if count >= taken else f"{count:,} of {taken:,} steps"
        notes.append(f"task {task}: no row counted (its label null or masked, or the weight 0) in {steps}")
    if report.skipped:
        notes.append(f"steps skipped, as the loss was not finite: {report.skipped}")
    if report.spikes:
        notes.append(f"steps skipped, as the loss was a spike (train.spike): {report.spikes}")
    if report.passed_over:
        steps = ", ".join(map(str, report.passed_over))
        notes.append(f"the batches of steps {steps} (from 0) were passed over, as their gradients were not finite")
    if report.unaccounted is not None and report.unaccounted > 0.05:
        notes.append(f"{report.unaccounted:.1%} of the time is unaccounted, more than the 5% that may be")
    return notes
