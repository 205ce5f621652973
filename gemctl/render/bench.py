"""The kernel benchmark as tables: one for each op, a row for each case and contender.

gemctl bench kernels
"""

from statistics import median
from typing import Any

from gemctl.bench.results import NOT_DONE, KernelBench, Timing
from gemctl.render.report import Section, rich
from gemctl.units import DASH, percent, si


def kernels(value: KernelBench) -> Any:
    """The tables for a terminal."""
    return rich(sections(value))


def sections(value: KernelBench) -> list[Section]:
    """One table for each op, then what it was measured on."""
    columns = ["case", "contender", "forward", "range", "of best", "backward", "range", "of best"]
    found = []
    prefix, flops = ("T", 1e12) if value.device != "CPU" else ("G", 1e9)
    matmul = "matmul" if value.settings["small"] == "True" else "8192³ matmul"
    for op in dict.fromkeys(timing.op for timing in value.timings):
        of_op = [timing for timing in value.timings if timing.op == op and timing.why_not != NOT_DONE]
        rows = [_row(forward, backward, flops) for forward, backward in zip(of_op[::2], of_op[1::2], strict=True)]
        unit = "GB/s, every tensor once; of the copy" if of_op[0].unit == "B/s" else f"{prefix}FLOP/s; of the {matmul}"
        found.append(Section(f"{op}: {unit}", columns, rows))
    return [*found, _facts(value)]


def _row(forward: Timing, backward: Timing, flops: float) -> list[str]:
    if forward.why_not is not None:
        return [forward.case, forward.contender, forward.why_not[:60], *[DASH] * 5]
    return [forward.case, forward.contender, *_figures(forward, flops), *_figures(backward, flops)]


def _figures(timing: Timing, flops: float) -> list[str]:
    if timing.rate is None or timing.median is None:
        return [DASH] * 3
    factor = 1e9 if timing.unit == "B/s" else flops
    rates = [timing.rate * timing.median / seconds / factor for seconds in timing.seconds]
    return [f"{timing.rate / factor:.0f}", f"{min(rates):.0f}–{max(rates):.0f}", percent(timing.share)]


def _facts(value: KernelBench) -> Section:
    host = ", ".join(f"{op} {1e6 * seconds:.0f} µs" for op, seconds in value.host.items())
    rows = [
        ["device", value.device],
        ["versions", ", ".join(f"{name} {version}" for name, version in value.versions.items())],
        ["settings", ", ".join(f"{name} {setting}" for name, setting in value.settings.items())],
        ["matmul", f"{si(median(value.matmul))}FLOP/s ({si(min(value.matmul))} – {si(max(value.matmul))})"],
        ["copy", f"{si(median(value.copy))}B/s ({si(min(value.copy))} – {si(max(value.copy))})"],
        ["host time of a forward call", host],
        ["tile schedule", f"{1e6 * value.schedule:.0f} µs" if value.schedule else DASH],
        ["date", value.date],
        ["command", " ".join(value.command)],
    ]
    return Section("Measured on", ["", ""], rows, "Backward counts 2.5 forwards. Median and range over the repeats.")
