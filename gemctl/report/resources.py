"""What a run stored, used and sent: its checkpoints, and memory and traffic beside the plan's figures.

gemctl report RUN        # "Checkpoints", "Memory …", "Traffic"
"""

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from gemctl.report.attempts import Journal, Line
from gemctl.run.checkpoints import size_of
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log, read_whole
from gemctl.run.manifest import Checkpoint, checkpoints, verify


@dataclass
class CheckpointReport:
    """`state`: verified, or the problem. Seconds that training `stalled`, and until the checkpoint was published."""

    name: str
    step: int
    attempt: int
    bytes: int
    state: str
    stalled: float | None
    saved_in: float | None


@dataclass
class SavesReport:
    """All saves of the run; seconds that training stalled. `first_stall`: in the first save of the last attempt, which
    also allocates the staging memory; `stall`: the median of later saves; `most`: the maximum. `failed`: failed tries.
    """

    saved: int
    failed: int
    first_stall: float | None
    stall: float | None
    most: float | None


@dataclass
class GpuMemory:
    """Bytes of one GPU on the rank with the highest use: planned, allocated to tensors, reserved by the allocator."""

    planned: int | None
    allocated: int
    reserved: int


@dataclass
class Memory:
    """Bytes on the rank with the highest use; `shared`: at rank start (interpreter, libraries, the agent's pages)."""

    planned: int | None
    peak: int | None
    shared: int | None
    gpu: GpuMemory | None = None


@dataclass(frozen=True)
class TrafficReport:
    """Calls and bytes that a rank sends per step. Counted: means over ranks and steps. Planned: the rank with the most
    rows, at the data's mean lengths; None if the attempt has no such plan."""

    axis: str
    collective: str
    calls: float
    bytes: float
    planned_calls: int | None
    planned_bytes: int | None


def checkpoint_reports(run: RunDir) -> list[CheckpointReport]:
    """All checkpoints; verifies the files of each."""
    reports = []
    for checkpoint in checkpoints(run):
        faults = [checkpoint.flaw] if checkpoint.flaw else verify(checkpoint.path)
        state = "; ".join(faults) if faults else "verified"
        saved = _save(run, checkpoint)
        reports.append(
            CheckpointReport(
                checkpoint.path.name,
                checkpoint.step,
                checkpoint.attempt,
                size_of(checkpoint.path),
                state,
                saved.get("stall"),
                saved.get("seconds"),
            )
        )
    return reports


def _save(run: RunDir, checkpoint: Checkpoint) -> Line:
    """The record of the save that wrote a checkpoint; empty if there is none."""
    lines = read_log(run.attempt(checkpoint.attempt).saves)
    saved = [line for line in lines if line["event"] == "saved" and line["step"] == checkpoint.step]
    return saved[-1] if saved else {}


def saves_report(journals: list[Journal]) -> SavesReport:
    """All saves of all attempts."""
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


def memory(journal: Journal) -> Memory:
    """The memory of an attempt's ranks."""
    plan = read_whole(journal.attempt.plan)
    last = journal.ledger[-1] if journal.ledger else {}
    allocated = last.get("gpu_allocated", [0, 0, 0])[2]
    gpu = GpuMemory(_planned_bytes(plan, "device"), int(allocated), int(last["gpu_reserved"][2])) if allocated else None
    planned = _planned_bytes(plan, "host") if gpu else _planned_bytes(plan, "device", "host")
    if not last:
        return Memory(planned, None, None)
    return Memory(planned, int(last["peak_rss"][2]), int(last["start_rss"][2]), gpu)


def _planned_bytes(plan: Line | None, *places: str) -> int | None:
    """Bytes in these places on the rank for which the plan has the highest total."""
    if plan is None:
        return None
    sizes = plan["classes"]["listed"][0]["bytes"]
    return sum(int(sizes[item["name"]]) for item in plan["objects"] if item["place"] in places)


def traffic(journal: Journal) -> list[TrafficReport]:
    """By axis and collective, over all steps in the attempt's ledger; empty if no rank sent anything."""
    steps, calls, sent = 0, defaultdict[tuple[str, str], float](float), defaultdict[tuple[str, str], float](float)
    for line in journal.ledger:
        counted = line.get("traffic", {"steps": 0, "sent": []})
        steps += counted["steps"]
        for axis, collective, count, size in counted["sent"]:
            calls[axis, collective] += count
            sent[axis, collective] += size
    planned = _planned_traffic(read_whole(journal.attempt.plan))
    return [
        TrafficReport(axis, collective, calls[axis, collective] / steps, sent[axis, collective] / steps,
                      *planned.get((axis, collective), (None, None)))
        for axis, collective in sorted(calls)
    ]  # fmt: skip


def _planned_traffic(plan: Line | None) -> dict[tuple[str, str], tuple[int, int]]:
    """(calls, bytes) by axis and collective."""
    planned: dict[tuple[str, str], tuple[int, int]] = {}
    for part in [] if plan is None else plan.get("traffic", []):
        key = part["axis"], part["collective"]
        calls, size = planned.get(key, (0, 0))
        planned[key] = calls + part["messages"], size + part["bytes"]
    return planned
