"""Effective MFU = local MFU × scaling ratio, with the ratio got in two ways that must agree.

    by division       effective MFU / local MFU                     what the layers alone would take, of a step's time
    from the ledger   (dense_forward + dense_backward) / the steps' seconds       what they took in the run, of the same

Both are over the same steps: without start-up, evaluations, the peak's measurement and each attempt's first step. A
step's time is all the rest: compute of the dense part is its useful work, and what is left of it is exposed
communication (a clock of its own inside the dense part), waits for data and for slower ranks, the tables' lookups and
updates, the optimizer, saves and logging. They differ where layers are slower in the run than alone: recomputed
activations, FSDP's copies, ranks or other programs that take each other's cores and memory.

    gemctl bench layers --run RUN && gemctl report RUN
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.report.journal import STARTUP, Journal, Line
from gemctl.report.measured import AGREEMENT, Layers, cached

COMPUTE = ("dense_forward", "dense_backward")
ASIDE = (*STARTUP, "peak", "eval")  # not of the steps' time, as in metrics.jsonl's `seconds`


@dataclass
class Efficiency:
    """`shares`: of the steps' rank-seconds, by part, largest first; compute is one part. `seconds`: of one step, mean
    over steps and ranks, by part, compute in two."""

    effective_mfu: float | None = None
    local_mfu: float | None = None  # None: the layers were not measured
    scaling_ratio: float | None = None  # by division
    ledger_ratio: float | None = None
    shares: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def efficiency(journals: list[Journal], config: Config | None) -> Efficiency:
    """Of the steps that counted and ran on as many ranks as the last attempt, whose configuration is `config`."""
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
    own = {name: spent for name, spent in parts.items() if name not in ASIDE and spent > 0}
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
    """The training intervals that count, and the steps whose time is in each: not the attempt's first one's."""
    before = journal.base_step() + 1
    for line in journal.metrics:
        if line["kind"] == "train" and line["step"] <= journal.limit:
            if line["examples"]:
                yield line, line["step"] - before
            before = line["step"]


def _compare(found: Efficiency, config: Config | None) -> None:
    """Local MFU and the ratio by division, where the layers were measured."""
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
            f"{apart:.0%} apart, more than the {bound:.0%} that may be. In the run the layers took "
            f"{found.ledger_ratio / found.scaling_ratio:.2f} × the time that they take alone"
        )


def _layers(config: Config | None) -> tuple[Layers | None, str | None]:
    from gemctl.specs import feature_spec  # noqa: PLC0415

    if config is None:
        return None, None
    try:
        return cached(config, feature_spec.load(config.data.spec))
    except InputError:  # the data have gone, and with them what the layers were measured on
        return None, None
