"""A run's report, two runs side by side, and evaluations, as titled tables.

    gemctl report RUN; gemctl report RUN --diff RUN; gemctl eval RUN

page.py makes an HTML page of the same tables.
"""

import re
import shlex
from collections.abc import Callable
from typing import Any

from rich.console import Group

from gemctl.render.sections import Section, rich
from gemctl.report.attempts import AttemptReport
from gemctl.report.compare import Diff
from gemctl.report.efficiency import COMPUTE
from gemctl.report.report import Evaluation, Report
from gemctl.units import DASH, binary, count, date, milliseconds, number, percent, plural, rate, si

SCORES = ["task", "scorer", "examples", "base rate", "NE", "AUC", "calibration", "best possible NE", "gap closed"]
BASELINE = "logistic regression"
FACTORS = {"ranks": rate, "peak of one rank (FLOP/s)": si, "FLOPs per example": si, "local MFU": percent,
           "scaling ratio": number, "effective MFU": percent, "examples/s": rate}  # fmt: skip
QUALITY = (("ne", "NE", number), ("auc", "AUC", number), ("best_ne", "best possible NE", number),
           ("gap_closed", "gap closed", percent))  # fmt: skip
SPEED = (("examples_per_s", "examples/s", rate), ("flops_per_example", "FLOPs per example", si),
         ("rank_peak", "peak of one rank (FLOP/s)", si), ("effective_mfu", "effective MFU", percent),
         ("local_mfu", "local MFU", percent), ("scaling_ratio", "scaling ratio, effective / local MFU", number),
         ("ledger_ratio", "scaling ratio, from the ledger", number))  # fmt: skip


def report(value: Report) -> Group:
    """A report for a terminal."""
    return rich(sections(value))


def diff(value: Diff) -> Group:
    """Two runs side by side for a terminal."""
    return rich(diff_sections(value))


def sections(value: Report) -> list[Section]:
    """The tables of a report that have rows."""
    tables = [_identity(value), _quality(value), _throughput(value), _step(value), _waterfall(value)]
    tables += [
        _stragglers(value),
        _first_step(value),
        _attempts(value),
        _checkpoints(value),
        _memory(value),
        _traffic(value),
    ]
    if value.notes:
        tables.append(Section("Notes", [""], [[note] for note in value.notes]))
    return [section for section in tables if section.rows]


def _identity(value: Report) -> Section:
    run, last = value.run, value.attempts[-1]
    git = run.get("git") or {}
    commit = (git.get("commit") or DASH)[:12] + (" (changed)" if git.get("changed") else "")
    versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
    rows = [
        ["run", f"{run['name']}/{run['run_id']}"],
        ["directory", value.path],
        ["command", shlex.join(run.get("command", [])) or DASH],  # run.json may have been truncated
        ["created", f"{date(run['created'])} on {run.get('host', DASH)}"],
        ["commit", commit],
        ["versions", versions],
        ["state", f"{value.outcome}, {value.step} of {value.steps or DASH} steps on {plural(last.ranks, 'rank')}"],
        *([["how it ended", value.conclusion]] if value.conclusion is not None else []),
        ["steps skipped", _skipped(value)],
        ["unknown ids", ", ".join(f"{table} {seen:,}" for table, seen in value.unknown_ids.items() if seen) or "none"],
    ]
    return Section("Run", ["", ""], rows)


def _skipped(value: Report) -> str:
    counts = ((value.skipped, "non-finite loss"), (value.spikes, "loss spike"), (len(value.passed_over), "rolled back"))
    return ", ".join(f"{count:,} {what}" for count, what in counts if count) or "none"


def _quality(value: Report) -> Section:
    columns = [name for name in SCORES if name != "scorer"]
    rows = [[task, *_scores(quality)] for task, quality in value.tasks.items()]
    note = (
        "NE: log loss / entropy of the base rate (1 = constant prediction). Best possible NE: that of the generator's "
        "true probabilities, on the same labels. Gap closed: (1 − NE) / (1 − best possible NE)."
    )
    return Section(f"Quality ({value.tasks_from} at step {value.tasks_step})", columns, rows, note)


def _throughput(value: Report) -> Section:
    t = value.throughput
    rows = [
        ["examples/s", rate(t.examples_per_s)],
        ["events/s", rate(t.tokens_per_s)],
        ["useful FLOPs per example", si(t.flops_per_example)],
        ["peak of one rank (FLOP/s)", si(t.rank_peak)],
        ["effective MFU", percent(t.effective_mfu)],
        ["local MFU", percent(t.local_mfu)],
        ["scaling ratio, effective MFU / local MFU", number(t.scaling_ratio, 3)],
        ["scaling ratio, from the ledger", number(t.ledger_ratio, 3)],
    ]
    note = (
        "Without start-up and evaluation. On CPU the peak is the measured rate of an fp32 1,024³ matmul with all local "
        "ranks running it at once. Local MFU, and the scaling ratio derived from it, need the time of each layer "
        "alone: – until `gemctl bench layers --run RUN` has measured it."
    )
    return Section("Throughput", ["", ""], rows, note)


def _step(value: Report) -> Section:
    shares = value.step_shares
    seconds = value.step_seconds | {"compute": sum(value.step_seconds.get(name, 0.0) for name in COMPUTE)}
    rows = [[name, milliseconds(seconds.get(name)), percent(share)] for name, share in shares.items()]
    note = (
        "Means over the steps that count for throughput, and over ranks. compute: forward and backward of the dense "
        "part; its share is the scaling ratio from the ledger. flag_wait: waiting for slower ranks."
    )
    return Section("Step time", ["part", "ms", "share"], rows, note, list(shares.values()))


def _waterfall(value: Report) -> Section:
    total = sum(value.waterfall.values())
    rows = [[name, f"{seconds:,.1f}", percent(seconds / total if total else None)]
            for name, seconds in value.waterfall.items()]  # fmt: skip
    bars = [seconds / total if total else 0.0 for seconds in value.waterfall.values()]
    note = (
        f"{total:,.0f} rank-seconds in total. flag_wait: from a rank's own arrival to the last rank's. lost_work: "
        "steps that a later attempt repeated. lost_at_failure: after the last ledger line of a failed attempt. "
        "recovery: from the end of an attempt to the start of the next; per attempt below."
    )
    return Section("Where the time went", ["part", "rank-seconds", "share"], rows, note, bars)


def _stragglers(value: Report) -> Section:
    columns = ["rank", "host", "attempt", "reported at step", "slow steps", "× the others", "mostly in",
               "rank-seconds lost", "share of step time"]  # fmt: skip
    rows = [
        [
            str(one.rank), one.host or DASH, str(one.attempt), f"{one.first_step:,}", f"{one.steps:,}",
            number(one.ratio, 1), one.part, f"{one.lost:,.1f}", percent(one.share),
        ]
        for one in value.stragglers
    ]  # fmt: skip
    return Section("Stragglers", columns, rows, "Ranks that the others waited for, and the cost of waiting.")


def _first_step(value: Report) -> Section:
    stages = value.first_step
    rows = [[name, f"{seconds:.2f}"] for name, seconds in stages.items()]
    if rows:
        rows.append(["total", f"{sum(stages.values()):.2f}"])
    note = "From the claim of the attempt. The ranks' own stages (import …) are means over ranks."
    return Section(f"Time to first step (attempt {value.attempts[-1].number})", ["stage", "seconds"], rows, note)


def _attempts(value: Report) -> Section:
    columns = ["attempt", "start", "seconds", "ranks", "from step", "to step", "repeated", "recovery (s)", "outcome",
               "cause"]  # fmt: skip
    rows = [
        [
            str(a.number), date(a.start), f"{a.end - a.start:,.1f}" if a.end else DASH, str(a.ranks),
            str(a.base_step), str(a.last_step), str(a.redone), number(_recovered(a), 2), a.outcome, a.cause or DASH,
        ]
        for a in value.attempts
    ]  # fmt: skip
    note = (
        "The time of repeated steps is lost_work up to the last ledger line of their attempt (train.log_every), and "
        "lost_at_failure after it. recovery: from the end of the previous attempt to the end of the first step."
    )
    return Section("Attempts", columns, rows, note)


def _recovered(attempt: AttemptReport) -> float | None:
    if attempt.recovery_s is None or attempt.first_step_s is None:
        return None
    return attempt.recovery_s + attempt.first_step_s


def _checkpoints(value: Report) -> Section:
    rows = [
        [c.name, str(c.step), binary(c.bytes), number(c.stalled, 3), number(c.saved_in, 1), c.state]
        for c in value.checkpoints
    ]
    s = value.saves
    failed = f", {plural(s.failed, 'failed try', 'failed tries')}" if s.failed else ""
    note = (
        f"{plural(s.saved, 'save')}{failed}. Training stalled {number(s.first_stall, 3)} s in the first save, which "
        f"also allocates the staging memory, and {number(s.stall, 3)} s in later ones (median); at most "
        f"{number(s.most, 3)} s."
    )
    return Section("Checkpoints", ["checkpoint", "step", "size", "stall (s)", "save time (s)", "state"], rows, note)


def _memory(value: Report) -> Section:
    m = value.memory
    own = m.peak - m.shared if m.peak is not None and m.shared is not None else None
    rows = []
    if m.gpu:
        rows += [
            ["GPU: planned", binary(m.gpu.planned)],
            ["GPU: allocated to tensors", binary(m.gpu.allocated)],
            ["GPU: reserved by the allocator", binary(m.gpu.reserved)],
            ["GPU: allocated / planned", number(m.gpu.allocated / m.gpu.planned, 2) if m.gpu.planned else DASH],
        ]
    rows += [
        ["planned" if m.gpu is None else "host: planned", binary(m.planned)],
        ["measured: peak resident memory", binary(m.peak)],
        ["  of it at rank start (interpreter, libraries, pages shared with the agent)", binary(m.shared)],
        ["  growth since then, which the plan covers", binary(own)],
        ["growth / planned", number(own / m.planned, 2) if own is not None and m.planned else DASH],
    ]
    return Section("Memory of the rank with the highest use", ["", ""], rows)


def _traffic(value: Report) -> Section:
    rows = [
        [
            t.axis, t.collective, number(t.calls, 1), binary(round(t.bytes)),
            DASH if t.planned_calls is None else str(t.planned_calls), binary(t.planned_bytes),
        ]
        for t in value.traffic
    ]  # fmt: skip
    columns = ["axis", "collective", "calls", "sent", "planned calls", "planned"]
    note = (
        "Per rank and step of the last attempt, with the byte counts of ring algorithms. Calls and sent: means over "
        "ranks and steps. Planned: the rank with the most rows, at the data's mean lengths."
    )
    return Section("Traffic", columns, rows, note)


def diff_sections(value: Diff) -> list[Section]:
    """The tables of two runs side by side that have rows."""
    first, second = value.runs
    names = [f"{report.run['name']}/{report.run['run_id']}" for report in value.runs]
    quality = [
        _pair(f"{task} {label}", first.tasks.get(task, {}).get(key), second.tasks.get(task, {}).get(key), shown)
        for task in dict.fromkeys([*first.tasks, *second.tasks])
        for key, label, shown in QUALITY
        if any(report.tasks.get(task, {}).get(key) is not None for report in value.runs)
    ]
    speed = [_pair(label, getattr(first.throughput, key), getattr(second.throughput, key), shown)
             for key, label, shown in SPEED]  # fmt: skip
    shares = [_shares(report) for report in value.runs]
    times = [
        _pair(name, shares[0].get(name), shares[1].get(name), percent)
        for name in dict.fromkeys([*shares[0], *shares[1]])
    ]
    columns = ["", *names, "second − first"]
    tables = [
        Section("Settings that differ", ["key", *names], [[s.key, s.first, s.second] for s in value.settings]),
        Section("Quality", columns, quality),
        Section("Throughput", columns, speed),
        _factors(value, names),
        _parts(value, columns),
        Section("Share of rank-seconds", columns, times),
    ]
    return [section for section in tables if section.rows]


def _factors(value: Diff, names: list[str]) -> Section:
    rows = [[f.name, FACTORS[f.name](f.first), FACTORS[f.name](f.second), f"× {f.changes:.3f}"] for f in value.factors]
    note = (
        "examples/s = ranks × peak of one rank × local MFU × scaling ratio / FLOPs per example: the effects multiply "
        "to the last row. Model and data determine FLOPs per example, layer shapes and kernels local MFU, the system "
        "around them the scaling ratio. Without local MFU (gemctl bench layers), effective MFU stands for both."
    )
    return Section("Why the speed differs", ["factor", *names, "effect on examples/s"], rows, note)


def _parts(value: Diff, columns: list[str]) -> Section:
    rows = [_pair(name, first, second, milliseconds) for name, (first, second, _) in value.parts.items()]
    return Section("Step time by part (ms)", columns, rows, "Means over steps and ranks.")


def _shares(report: Report) -> dict[str, float]:
    total = sum(report.waterfall.values()) or 1.0
    return {name: seconds / total for name, seconds in report.waterfall.items()}


def _pair(label: str, first: float | None, second: float | None, shown: Callable[[float | None], str]) -> list[str]:
    return [label, shown(first), shown(second), _delta(first, second, shown)]


def _delta(first: float | None, second: float | None, shown: Callable[[float | None], str]) -> str:
    if first is None or second is None:
        return DASH
    difference = second - first
    text = f"{abs(100 * difference):.1f} points" if shown is percent else shown(abs(difference))
    if not re.search("[1-9]", text):
        return text  # a difference that rounds to zero has no sign
    return ("+" if difference >= 0 else "−") + text


def evaluation(value: Evaluation) -> Group:
    """The model and the logistic regression on the same rows, for a terminal."""
    return rich(evaluation_sections(value))


def evaluation_sections(value: Evaluation) -> list[Section]:
    """What was evaluated, and the quality of each task."""
    rows = []
    for task, quality in value.tasks.items():
        rows.append([task, "model", *_scores(quality)])
        if value.baseline is not None:
            rows.append(["", BASELINE, *_scores(value.baseline[task])])
    facts = [
        ["run", value.run],
        ["checkpoint", f"{value.checkpoint} (step {value.step})"],
        ["rows", f"{value.data}: {value.rows:,} in {value.seconds:.1f} s"],
    ]
    if value.out is not None:
        facts.append(["scores", value.out])
    if value.baseline_reason is not None:
        facts.append([BASELINE, f"none: {value.baseline_reason}"])
    facts += [["note", note] for note in value.notes]
    note = (
        "NE: log loss / entropy of the base rate of these rows. The regression is fitted on the training rows; it sees "
        "the dense features, the domain and each id's smoothed mean label over strictly earlier rows, but no event "
        "histories."
    )
    return [Section("Evaluation", ["", ""], facts), Section("Quality", SCORES, rows, note)]


def _scores(quality: dict[str, Any]) -> list[str]:
    return [
        count(quality.get("examples")), number(quality.get("base_rate")), number(quality.get("ne")),
        number(quality.get("auc")), number(quality.get("calibration"), 3), number(quality.get("best_ne")),
        percent(quality.get("gap_closed")),
    ]  # fmt: skip
