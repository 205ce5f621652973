"""The tables of `gemctl bench kernels`, `layers` and `model`."""

from statistics import median

from rich.console import Group

from gemctl.bench.results import NOT_DONE, KernelBench, ModelBench, Timing
from gemctl.render.sections import Section, rich
from gemctl.report.layers import Layers, LayerTime
from gemctl.units import DASH, count, number, percent, rate, si


def kernels(value: KernelBench) -> Group:
    """For a terminal."""
    return rich(kernel_sections(value))


def kernel_sections(value: KernelBench) -> list[Section]:
    """One table per op, a row per case and contender; then what it was measured on."""
    columns = ["case", "contender", "forward", "range", "of best", "backward", "range", "of best"]
    tables = []
    prefix, flops = ("T", 1e12) if value.device != "CPU" else ("G", 1e9)
    matmul = "matmul" if value.settings["small"] == "True" else "8192³ matmul"
    for op in dict.fromkeys(timing.op for timing in value.timings):
        of_op = [timing for timing in value.timings if timing.op == op and timing.why_not != NOT_DONE]
        rows = [_case(forward, backward, flops) for forward, backward in zip(of_op[::2], of_op[1::2], strict=True)]
        if of_op[0].unit == "B/s":
            unit = "GB/s, every tensor counted once; share of the copy's rate"
        else:
            unit = f"{prefix}FLOP/s; share of the {matmul}'s rate"
        tables.append(Section(f"{op}: {unit}", columns, rows))
    return [*tables, _measured_on(value)]


def _case(forward: Timing, backward: Timing, flops: float) -> list[str]:
    if forward.why_not is not None:
        return [forward.case, forward.contender, forward.why_not[:60], *[DASH] * 5]
    return [forward.case, forward.contender, *_figures(forward, flops), *_figures(backward, flops)]


def _figures(timing: Timing, flops: float) -> list[str]:
    if timing.rate is None or timing.median is None:
        return [DASH] * 3
    factor = 1e9 if timing.unit == "B/s" else flops
    rates = [timing.rate * timing.median / seconds / factor for seconds in timing.seconds]
    return [f"{timing.rate / factor:.0f}", f"{min(rates):.0f}–{max(rates):.0f}", percent(timing.share)]


def _measured_on(value: KernelBench) -> Section:
    host = ", ".join(f"{op} {1e6 * seconds:.0f} µs" for op, seconds in value.host.items())
    rows = [
        ["device", value.device],
        ["versions", ", ".join(f"{name} {version}" for name, version in value.versions.items())],
        ["settings", ", ".join(f"{name} {setting}" for name, setting in value.settings.items())],
        ["matmul", f"{si(median(value.matmul))}FLOP/s ({si(min(value.matmul))} – {si(max(value.matmul))})"],
        ["copy", f"{si(median(value.copy))}B/s ({si(min(value.copy))} – {si(max(value.copy))})"],
        ["host time per forward call", host],
        ["tile schedule", f"{1e6 * value.schedule:.0f} µs" if value.schedule else DASH],
        ["date", value.date],
        ["command", " ".join(value.command)],
    ]
    return Section("Measured on", ["", ""], rows, "A backward counts as 2.5 forwards. Median and range over repeats.")


def layers(value: Layers) -> Group:
    """For a terminal."""
    return rich(layer_sections(value))


def model(value: ModelBench) -> Group:
    """For a terminal."""
    return rich(model_sections(value))


def layer_sections(value: Layers) -> list[Section]:
    """The layers, then their sum and what they were measured on."""
    columns = ["module", "forward (ms)", "backward (ms)", "useful FLOPs", "FLOP/s", "of peak"]
    rows = [_layer(layer, value.peak) for layer in value.layers]
    note = "Over all batches. Indented rows are parts of the row above; only the others are summed."
    subject = value.subject
    facts = [
        ["local MFU", percent(value.local_mfu)],
        ["sum of the layer times", f"{1e3 * value.seconds:,.1f} ms"],
        ["whole dense part at once", f"{1e3 * value.together:,.1f} ms"],
        ["peak of one rank (FLOP/s)", si(value.peak)],
        ["batches", f"{value.batches} of {subject['rows']:,} rows; {value.events:,} events"],
        ["lengths", value.lengths],
        [
            "measured on",
            f"{subject['device']}; ranks: {subject['ranks']}, threads per rank: {subject['threads']}",
        ],
    ]
    facts += [["note", value.note]] if value.note else []
    explained = "Local MFU = Σ FLOPs / (peak · Σ times), forward and backward, without communication and recomputation."
    return [Section("Layers alone", columns, rows, note), Section("Local MFU", ["", ""], facts, explained)]


def _layer(layer: LayerTime, peak: float) -> list[str]:
    name = f"  {layer.name.partition('.')[2].partition('.')[2]}" if layer.inside else layer.name
    return [
        name, number(1e3 * layer.forward, 2), number(1e3 * layer.backward, 2), si(layer.flops), si(layer.rate),
        percent(layer.rate / peak),
    ]  # fmt: skip


def model_sections(value: ModelBench) -> list[Section]:
    """Speed and step time by part of both contenders, and what they were measured on."""
    contenders = list(value.seconds)
    speed = [
        ["examples/s", *(rate(value.examples_per_s(name)) for name in contenders)],
        ["ms per step, median", *(number(1e3 * median(value.seconds[name]) / value.batches, 1) for name in contenders)],
        ["ms per step, minimum", *(number(1e3 * min(value.seconds[name]) / value.batches, 1) for name in contenders)],
        ["MFU, real events only", *(percent(value.mfu(name)) for name in contenders)],
    ]
    turns = value.race.repeats * value.batches
    names = [name for name in value.parts[contenders[0]] if name != "wall"]
    parts = [
        [name, *(number(1e3 * value.parts[contender][name] / turns, 1) for contender in contenders)]
        for name in names
        if any(value.parts[contender][name] > 1e-3 * value.parts[contender]["wall"] for contender in contenders)
    ]
    race = value.race
    facts = [
        ["ratio, jagged over padded", number(value.ratio, 2)],
        ["batch", f"{race.rows:,} rows, {count(value.events)} events; longest {race.longest}, mean fill {race.fill}"],
        ["ranks", f"{value.ranks}, threads per rank: {race.threads}"],
        ["turns", f"{race.repeats} per contender, alternating, {value.batches} steps each"],
        ["largest difference", f"{value.apart:.1e}, relative, of logits and gradients"],
        ["peak of all ranks (FLOP/s)", si(value.peak)],
        ["measured on", value.device],
    ]
    note = "Padded: the same parameters and batches, histories padded to the longest, scaled_dot_product_attention."
    return [
        Section(f"Training step of {value.model}", ["", *contenders], speed),
        Section("Step time by part (ms)", ["part", *contenders], parts),
        Section("Comparison", ["", ""], facts, note),
    ]
