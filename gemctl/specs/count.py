"""What a model has, costs and keeps, torch-free: every parameter's name and shape, FLOPs, values kept for backward.

    from gemctl.specs.count import parameters, step_flops
    parameters(ModelConfig(), spec)                                     # [("tables.pooled…", (rows, dim)), …]
    step_flops(ModelConfig(), spec, 2, {"history": np.array([5, 0])})   # FLOPs of a step over two rows

A step is one forward and a backward of twice its useful FLOPs (gemctl/specs/weights.py). `FlopCounterMode` sees the
same forward to the last one; in its backward only the gradients of floats and ages are missing, which nobody needs.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemctl.specs.data import FeatureSpec, SequenceSpec
from gemctl.specs.layout import History, Layer, Layout, layout
from gemctl.specs.model import INDEX, PLACE_SCALES, ModelConfig
from gemctl.specs.weights import NO_EVENTS, NORM, Counts, Shape, Weight, gate, linear, mlp, token_linear

Lengths = Mapping[str, NDArray[np.int64]]


class Module(NamedTuple):
    """A module of the dense part, or a step between two that only keeps values; `layer`: the number of its layer.

    `history`: the history of the stack whose events it reads; `raw`: before CLS tokens join them.
    """

    name: str
    counts: Counts
    history: str | None = None
    raw: bool = False
    layer: int | None = None


def parameters(model: ModelConfig, spec: FeatureSpec) -> list[tuple[str, Shape]]:
    """Name and shape of every parameter of `GemModel(model, spec)`, tables first, names as in `named_parameters()`."""
    rows = {table.name: table.rows for table in spec.tables}
    kinds = {"pooled.embedding_bags": spec.pooled_tables(), "sequence.embeddings": spec.sequence_tables()}
    tables = [(f"tables.{kind}.{name}.weight", (rows[name], model.dim)) for kind in kinds for name in kinds[kind]]
    return tables + [(f"dense.{name}", shape) for name, shape in dense_parameters(model, spec)]


def dense_parameters(model: ModelConfig, spec: FeatureSpec) -> list[tuple[str, Shape]]:
    """Name and shape of every parameter of the dense part, `GemModel(model, spec).dense`."""
    return [
        (f"{module.name}.{weight.name}", weight.shape)
        for module in modules(model, spec)
        for weight in module.counts.weights
        if weight.name is not None
    ]


def step_flops(model: ModelConfig, spec: FeatureSpec, rows: int, lengths: Lengths) -> float:
    """Useful FLOPs of forward and backward over `rows` rows; `lengths` [rows]: events of each, by sequence."""
    return 3.0 * sum(module_flops(model, spec, rows, lengths).values())


def module_flops(model: ModelConfig, spec: FeatureSpec, rows: int, lengths: Lengths) -> dict[str, int]:
    """Forward FLOPs of each module of the dense part that has any, by its name in `DenseModel`; arguments as above."""
    plan = layout(model, spec)
    raw = dict(lengths) | {history.name: merged_lengths(history, lengths) for history in plan.histories}
    stack = {history.name: raw[history.name] + plan.cls for history in plan.histories}
    flops: dict[str, int] = {}
    for module in modules(model, spec, plan):
        if any(weight.times for weight in module.counts.weights):
            own = NO_EVENTS if module.history is None else (raw if module.raw else stack)[module.history]
            flops[module.name] = module.counts.flops(rows, own)
    return flops


def activation_floats(
    model: ModelConfig, spec: FeatureSpec, recompute: Literal["none", "layers"] = "none"
) -> tuple[dict[str, int], int]:
    """(values kept for backward per event, by sequence; values kept per row); an estimate.

    With `recompute` = "layers" each layer keeps its inputs alone, and the largest one has its values once more while
    backward runs. Merged histories count as if no two events met: an upper bound, as their lengths together are not
    known.
    """
    plan = layout(model, spec)
    parts, depth = modules(model, spec, plan), len(plan.layers)

    def total(kept: Iterable[tuple[int | None, int]], inputs: int) -> int:
        """Of values by layer (None: of no layer); `inputs`: those that recomputed layers keep."""
        outside, layers = 0, [0] * depth
        for layer, values in kept:
            if layer is None:
                outside += values
            else:
                layers[layer] += values
        return outside + (sum(layers) if recompute == "none" else max(layers) + inputs)

    row = total(
        ((part.layer, part.counts.kept_by_row) for part in parts),
        model.dim * sum(layer.inputs + sum(one.tokens for one in layer.histories) for layer in plan.layers),
    )
    events = {sequence.name: 0 for sequence in spec.sequences}
    sources = {history.name: history.sources for history in plan.histories}
    for part in parts:
        if part.history is not None and part.raw:
            for name in sources.get(part.history, (part.history,)):
                events[name] += part.counts.kept_by_event
    for history in plan.histories:
        own = (part for part in parts if part.history == history.name and not part.raw)
        stack = total(((part.layer, part.counts.kept_by_event) for part in own), (depth - 1) * history.dim)
        row += stack * plan.cls
        for name in history.sources:
            events[name] += stack
    return events, row


def merged_lengths(history: History, lengths: Lengths) -> NDArray[np.int64]:
    """int64 [rows]: events of a history of the stack, those of its longest source."""
    longest: NDArray[np.int64] = np.max([np.asarray(lengths[name], np.int64) for name in history.sources], axis=0)
    return longest


def event_features(model: ModelConfig, sequence: SequenceSpec) -> int:
    """Numbers of an event beside its ids: its floats, its age by scale, its place."""
    return len(sequence.floats) + len(model.age_scales) + 1 + len(PLACE_SCALES)


def modules(model: ModelConfig, spec: FeatureSpec, plan: Layout | None = None) -> list[Module]:
    """Every module that has, costs or keeps anything, in the model's order; none of them contains another."""
    plan = plan or layout(model, spec)
    return [
        *_tokens(model, spec, plan),
        *_events(model, spec, plan),
        *(module for index, layer in enumerate(plan.layers) for module in _layer(model, layer, plan.cls, index)),
        *_heads(model, spec, plan),
    ]


def _tokens(model: ModelConfig, spec: FeatureSpec, plan: Layout) -> Iterator[Module]:
    if spec.dense:
        weights = mlp("", len(spec.dense), [model.dim], model.dim)
        yield Module("tokens.dense", Counts(weights, kept_by_row=len(spec.dense) + 2 * model.dim))
    if spec.domain:
        yield Module("tokens.domain", Counts([Weight("weight", (spec.domain.count, model.dim))]))
    yield Module("tokens", Counts(kept_by_row=plan.tokens * (model.dim + NORM)))


def _events(model: ModelConfig, spec: FeatureSpec, plan: Layout) -> Iterator[Module]:
    for sequence in spec.sequences:
        features = event_features(model, sequence)
        counts = Counts([], linear("linear", features, model.dim), kept_by_event=features)
        yield Module(f"events.{sequence.name}", counts, sequence.name, raw=True)
    for history in plan.histories:
        if model.merge:
            yield Module("merge", model.merge.counts(len(history.sources), model.dim), history.name, raw=True)
        # The events that enter the first layer, what the adapter reads, and where CLS tokens move each event to.
        kept = history.dim + (model.dim if history.dim != model.dim else 0) + (3 * INDEX if plan.cls else 0)
        yield Module(f"histories.{history.name}", Counts(kept_by_event=kept), history.name)


def _layer(model: ModelConfig, layer: Layer, cls: int, index: int) -> Iterator[Module]:
    dim, prefix = model.dim, f"layers.{index}"
    if layer.x_sum:
        weights = token_linear("compression", layer.inputs, layer.x_sum, dim)
        gated = gate(layer.spec.x_sum_gate, layer.x_sum, dim)
        kept = dim * (layer.inputs + layer.x_sum) + gated.kept_by_row
        yield Module(f"{prefix}.x_sum", Counts(weights + gated.by_row, kept_by_row=kept), layer=index)
    for row in layer.histories:
        name, width, heads = row.history.name, row.history.dim, row.history.heads
        if index == 0 and width != dim:
            adapter = Counts([], [Weight("weight", (width, dim), 1)])
            yield Module(f"{prefix}.adapters.{name}", adapter, name, layer=index)
        if row.block is not None:
            for part, counts in row.block.counts(width, heads, layer.x_sum * dim, row.attends).items():
                yield Module(f"{prefix}.sequence.{name}.{part}", counts, name, layer=index)
        if row.summary is not None:
            counts = row.summary.counts(width, heads, cls, dim)
            yield Module(f"{prefix}.summary.{name}", counts, name, layer=index)
    yield Module(f"{prefix}.interaction", layer.spec.interaction.counts(layer.reads, dim), layer=index)


def _heads(model: ModelConfig, spec: FeatureSpec, plan: Layout) -> Iterator[Module]:
    inputs, domains = plan.outputs * model.dim, spec.domain.count if spec.domain else 1
    yield Module("heads", Counts(kept_by_row=inputs))
    for task in range(len(spec.labels)):
        weights = mlp("", inputs, model.head_hidden, domains)
        yield Module(f"heads.tasks.{task}", Counts(weights, kept_by_row=2 * sum(model.head_hidden)))
