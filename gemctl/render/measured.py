"""The tables of `gemctl bench layers` and `gemctl bench model`.

gemctl bench layers --run RUN
"""

from statistics import median
from typing import Any

from gemctl.render.report import Section, rich
from gemctl.report.measured import Layers, LayerTime, ModelBench
from gemctl.units import count, number, percent, rate, si


def layers(value: Layers) -> Any:
    """For a terminal."""
    return rich(layer_sections(value))


def model(value: ModelBench) -> Any:
    """For a terminal."""
    return rich(model_sections(value))


def layer_sections(value: Layers) -> list[Section]:
    """The layers, then what they come to and what they were measured on."""
    columns = ["module", "forward (ms)", "backward (ms)", "useful FLOPs", "FLOP/s", "of peak"]
    rows = [_layer(layer, value.peak) for layer in value.layers]
    note = "Of all batches together. Indented rows are parts of the row above them; the others are summed."
    subject = value.subject
    facts = [
        ["local MFU", percent(value.local_mfu)],
        ["Σ of the layers' own times", f"{1e3 * value.seconds:,.1f} ms"],
        ["the dense part in one go", f"{1e3 * value.together:,.1f} ms"],
        ["peak of one rank (FLOP/s)", si(value.peak)],
        ["batches", f"{value.batches} of {subject['rows']:,} rows; {value.events:,} events"],
        ["lengths", value.lengths],
        [
            "measured on",
            f"{subject['device']}; ranks at once: {subject['ranks']}, threads of each: {subject['threads']}",
        ],
    ]
    facts += [["note", value.note]] if value.note else []
    explained = (
        "Local MFU = Σ FLOPs / (peak · Σ times), forward and backward, without communication or recomputed work."
    )
    return [Section("Layers alone", columns, rows, note), Section("Local MFU", ["", ""], facts, explained)]


def _layer(layer: LayerTime, peak: float) -> list[str]:
    name = f"  {layer.name.partition('.')[2].partition('.')[2]}" if layer.inside else layer.name
    return [
        name, number(1e3 * layer.forward, 2), number(1e3 * layer.backward, 2), si(layer.flops), si(layer.rate),
        percent(layer.rate / peak),
    ]  # fmt: skip


def model_sections(value: ModelBench) -> list[Section]:
    """Both contenders, where a step's time goes in each, and what they were measured on."""
    contenders = list(value.seconds)
    speed = [
        ["examples/s", *(rate(value.examples_per_s(name)) for name in contenders)],
        ["ms a step, median", *(number(1e3 * median(value.seconds[name]) / value.batches, 1) for name in contenders)],
        ["ms a step, least", *(number(1e3 * min(value.seconds[name]) / value.batches, 1) for name in contenders)],
        ["MFU, of real events", *(percent(value.mfu(name)) for name in contenders)],
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
        ["ranks", f"{value.ranks}, threads of each: {race.threads}"],
        ["turns", f"{race.repeats} of each, {value.batches} steps a turn, in turns"],
        ["results apart by", f"{value.apart:.1e} at most, relative (logits and gradients)"],
        ["peak of all ranks (FLOP/s)", si(value.peak)],
        ["measured on", value.device],
    ]
    note = "Padded: the same parameters and batches, histories padded to the longest, scaled_dot_product_attention."
    return [
        Section(f"A training step of {value.model}", ["", *contenders], speed),
        Section("Milliseconds of a step by part", ["part", *contenders], parts),
        Section("The race", ["", ""], facts, note),
    ]
