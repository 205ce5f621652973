"""How fast a run was and where its time went: throughput, MFU, the parts of a step, the waterfall, stragglers.

Effective MFU = local MFU × scaling ratio. The ratio is computed in two ways, which must agree:

    by division       effective MFU / local MFU
    from the ledger   (dense_forward + dense_backward) / step time

Both cover the same steps: not start-up, evaluation, the measurement of the peak, and the first step of each attempt.
Compute of the dense part is the useful work of a step. The rest is exposed communication (which has a clock of its own
inside the dense part), waits for data and for slower ranks, lookups and updates of the tables, the optimizer, saves and
logging. The two differ if layers are slower in the run than alone: recomputed activations, copies by FSDP, ranks or
other programs that compete for cores and memory.

    gemctl bench layers --run RUN && gemctl report RUN
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.report.attempts import LAUNCH, STARTUP, AttemptReport, Journal, Line
from gemctl.report.layers import AGREEMENT, Layers, cached
from gemctl.run.rollup import worst_lost
from gemctl.specs import feature_spec

COMPUTE = ("dense_forward", "dense_backward")
NOT_IN_STEPS = (*STARTUP, "peak", "eval")  # parts outside `seconds` of metrics.jsonl


@dataclass
class Efficiency:
    """`shares`: of the steps' rank-seconds by part, largest first, with compute as one part. `seconds`: of a step by
    part, mean over steps and ranks, with compute as two parts."""

    effective_mfu: float | None = None
    local_mfu: float | None = None  # None if the layers have not been measured
    scaling_ratio: float | None = None  # by division
    ledger_ratio: float | None = None
    shares: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Throughput:
    """Means over the counted steps, without start-up, evaluation and the first step of each attempt."""

    examples_per_s: float | None = None
    tokens_per_s: float | None = None
    flops_per_example: float | None = None
    rank_peak: float | None = None  # FLOP/s of one rank
    effective_mfu: float | None = None
    local_mfu: float | None = None  # needs the time of each layer alone (`gemctl bench layers`)
    scaling_ratio: float | None = None  # by division
    ledger_ratio: float | None = None  # the same from the ledger


@dataclass
class StragglerReport:
    """A rank that the others waited for. `ratio`: its own time over the others' in `steps` steps, most of it in
    `part`; `lost`: rank-seconds; `share`: of the rank-seconds of its attempt's steps."""

    attempt: int
    rank: int
    host: str | None
    first_step: int  # steps done when it was first reported
    steps: int
    ratio: float
    part: str
    lost: float
    share: float


def efficiency(journals: list[Journal], config: Config | None) -> Efficiency:
    """Over the counted steps on as many ranks as the last attempt, whose configuration is `config`."""
    found, seconds, flops, available = Efficiency(), 0.0, 0.0, 0.0
    parts: dict[str, float] = defaultdict(float)
    others = steps = 0
    for journal in journals:
        ledgers = {line["time"]: line for line in journal.ledger}
        for line, count in _timed(journal):
            if line["ranks"] != journals[-1].ranks or line["time"] not in ledgers:
                others += 1
                continue
            steps += count
            seconds += line["seconds"]
            flops += line["flops"]
            available += (line["peak"] or 0.0) * line["seconds"]
            for name, (_, mean, _, _) in ledgers[line["time"]]["parts"].items():
                parts[name] += mean
    if not seconds:
        return found
    own = {name: spent for name, spent in parts.items() if name not in NOT_IN_STEPS and spent > 0}
    found.seconds = {name: spent / steps for name, spent in sorted(own.items(), key=lambda x: -x[1])} if steps else {}
    compute = sum(own.pop(name, 0.0) for name in COMPUTE)
    rest = sorted(own.items(), key=lambda x: -x[1])
    found.shares = {name: spent / seconds for name, spent in [("compute", compute), *rest]}
    found.ledger_ratio = compute / seconds
    found.effective_mfu = flops / available if available else None
    if others:
        found.notes.append(f"{others} intervals on another number of ranks do not count for the scaling ratio")
    _compare(found, config)
    return found


def _timed(journal: Journal) -> Iterator[tuple[Line, int]]:
    """The counted training intervals, each with the number of its steps, without the first step of the attempt."""
    before = journal.base_step() + 1
    for line in journal.metrics:
        if line["kind"] == "train" and line["step"] <= journal.limit:
            if line["examples"]:
                yield line, line["step"] - before
            before = line["step"]


def _compare(found: Efficiency, config: Config | None) -> None:
    """Adds local MFU and the ratio by division if the layers have been measured."""
    layers, note = _layers(config)
    found.notes += [note] if note else []
    if config is None or layers is None or found.effective_mfu is None or found.ledger_ratio is None:
        return
    found.local_mfu = layers.local_mfu
    found.scaling_ratio = found.effective_mfu / layers.local_mfu
    bound, apart = AGREEMENT[config.cluster.device], abs(found.ledger_ratio / found.scaling_ratio - 1)
    if apart > bound:
        found.notes.append(
            f"the scaling ratio is {found.scaling_ratio:.3f} by division and {found.ledger_ratio:.3f} from the ledger: "
            f"they differ by {apart:.0%}, more than the expected {bound:.0%}. In the run the layers took "
            f"{found.ledger_ratio / found.scaling_ratio:.2f} × their time alone"
        )


def _layers(config: Config | None) -> tuple[Layers | None, str | None]:
    if config is None:
        return None, None
    try:
        return cached(config, feature_spec.load(config.data.spec))
    except InputError:  # the data are gone, so it is unknown what was measured
        return None, None


def throughput(train: list[Line], found: Efficiency) -> Throughput:
    """Over the counted training intervals `train`."""
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


def waterfall(journals: list[Journal], attempts: list[AttemptReport]) -> dict[str, float]:
    """Rank-seconds of all attempts by part, largest first, `unaccounted` last."""
    total: dict[str, float] = defaultdict(float)
    for journal, attempt in zip(journals, attempts, strict=True):
        for name, seconds in _rank_seconds(journal, attempt):
            total[name] += seconds
    unaccounted = total.pop("unaccounted", 0.0)
    ordered = sorted(((name, seconds) for name, seconds in total.items() if seconds > 0), key=lambda item: -item[1])
    return dict(ordered) | {"unaccounted": unaccounted}


def _rank_seconds(journal: Journal, attempt: AttemptReport) -> Iterator[tuple[str, float]]:
    """(part, rank-seconds) of an attempt from its claim to its end; repeated work is `lost_work`."""
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


def stragglers(journals: list[Journal]) -> list[StragglerReport]:
    """The stragglers of all attempts (gemctl/train/stragglers.py), the most costly first."""
    found = [report for journal in journals for report in _stragglers(journal)]
    return sorted(found, key=lambda report: -report.lost)


def _stragglers(journal: Journal) -> list[StragglerReport]:
    lines = [one for line in journal.ledger for one in line.get("stragglers", [])]
    seconds = sum(_step_seconds(line) for line in journal.ledger)
    ranks = dict.fromkeys(one["rank"] for one in lines)
    return [_straggler(journal, [one for one in lines if one["rank"] == rank], seconds) for rank in ranks]


def _step_seconds(line: Line) -> float:
    """Rank-seconds of the steps of an interval."""
    aside = (*NOT_IN_STEPS, "checkpoint_stall")
    parts: dict[str, list[float]] = line["parts"]
    return sum(stats[1] for name, stats in parts.items() if name not in aside) * int(line["ranks"])


def _straggler(journal: Journal, lines: list[Line], seconds: float) -> StragglerReport:
    worst = max(lines, key=worst_lost)
    lost = sum(line["lost"] for line in lines)
    return StragglerReport(
        attempt=journal.attempt.number,
        rank=worst["rank"],
        host=worst["host"],
        first_step=min((line["step"] for line in journal.named if line["rank"] == worst["rank"]), default=0),
        steps=sum(line["steps"] for line in lines),
        ratio=sum(line["own"] for line in lines) / sum(line["others"] for line in lines),
        part=worst["part"],
        lost=lost,
        share=lost / seconds,
    )
