"""What a model has and costs, torch-free: every parameter's name and shape, and the useful FLOPs of a batch.

    from gemctl.specs.count import parameters, step_flops
    parameters(ModelConfig(), spec)                                     # [("tables.pooled…", (rows, dim)), …]
    step_flops(ModelConfig(), spec, 2, {"history": np.array([5, 0])})   # FLOPs of a step over two rows

Useful FLOPs are those of matrix products and of the attention family (gemctl/specs/flops.py): forward once, backward
twice, at the real lengths. Lookups, norms, activations and recomputed work count nothing. `FlopCounterMode` sees the
same forward to the last one; in its backward only the gradients of floats and ages are missing, which nobody needs.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemctl.specs.count_interaction import interaction_weights
from gemctl.specs.count_sequence import Pairs, SequencePart, block_parts, summary_part
from gemctl.specs.data import FeatureSpec, SequenceSpec
from gemctl.specs.layout import History, Layer, Layout, layout
from gemctl.specs.model import PLACE_SCALES, ModelConfig
from gemctl.specs.weights import Shape, Weight, gate, linear, mlp, token_linear, total

Lengths = Mapping[str, NDArray[np.int64]]


class Module(NamedTuple):
    """A module of the dense part: what multiplies each row, each event of `history`, and the pairs of its attention.

    `history` names one of the stack's; with "raw " before it, its events before CLS tokens join them.
    """

    name: str
    by_row: list[Weight]
    by_event: list[Weight] = []  # noqa: RUF012  never written to
    pairs: list[Pairs] = []  # noqa: RUF012
    history: str = ""

    @property
    def weights(self) -> list[Weight]:
        """All that have a name are parameters."""
        return [*self.by_row, *self.by_event]


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
        for weight in module.weights
        if weight.name is not None
    ]


def step_flops(model: ModelConfig, spec: FeatureSpec, rows: int, lengths: Lengths) -> float:
    """Useful FLOPs of forward and backward over `rows` rows; `lengths` [rows]: events of each, by sequence."""
    return 3.0 * sum(module_flops(model, spec, rows, lengths).values())


def module_flops(model: ModelConfig, spec: FeatureSpec, rows: int, lengths: Lengths) -> dict[str, int]:
    """Forward FLOPs of each module of the dense part that has any, by its name in `DenseModel`; arguments as above."""
    plan = layout(model, spec)
    seen = {f"raw {name}": own for name, own in lengths.items()}
    for history in plan.histories:
        seen[f"raw {history.name}"] = merged_lengths(history, lengths)
        seen[history.name] = seen[f"raw {history.name}"] + plan.cls
    found: dict[str, int] = {}
    for module in modules(model, spec, plan):
        forward = rows * total(module.by_row)
        if module.history:
            own = seen[module.history]
            forward += int(own.sum()) * total(module.by_event) + sum(pair.forward_flops(own) for pair in module.pairs)
        if any(weight.times for weight in module.weights):
            found[module.name] = forward
    return found


def merged_lengths(history: History, lengths: Lengths) -> NDArray[np.int64]:
    """int64 [rows]: events of a history of the stack, those of its longest source."""
    found: NDArray[np.int64] = np.max([np.asarray(lengths[name], np.int64) for name in history.sources], axis=0)
    return found


def event_features(model: ModelConfig, sequence: SequenceSpec) -> int:
    """Numbers of an event beside its ids: its floats, its age by scale, its place."""
    return len(sequence.floats) + len(model.age_scales) + 1 + len(PLACE_SCALES)


def modules(model: ModelConfig, spec: FeatureSpec, plan: Layout | None = None) -> list[Module]:
    """Every module with parameters or products, in the model's order; no one holds another."""
    plan = plan or layout(model, spec)
    found = [*_tokens(model, spec), *_events(model, spec, plan)]
    for index, layer in enumerate(plan.layers):
        found += [
            module._replace(name=f"layers.{index}.{module.name}")
            for module in _layer(model, layer, plan.cls, index == 0)
        ]
    domains = spec.domain.count if spec.domain else 1
    for task in range(len(spec.labels)):
        weights = mlp("", plan.outputs * model.dim, model.head_hidden, domains)
        found.append(Module(f"heads.tasks.{task}", weights))
    return found


def _tokens(model: ModelConfig, spec: FeatureSpec) -> Iterator[Module]:
    if spec.dense:
        yield Module("tokens.dense", mlp("", len(spec.dense), [model.dim], model.dim))
    if spec.domain:
        yield Module("tokens.domain", [Weight("weight", (spec.domain.count, model.dim))])


def _events(model: ModelConfig, spec: FeatureSpec, plan: Layout) -> Iterator[Module]:
    for sequence in spec.sequences:
        weights = linear("linear", event_features(model, sequence), model.dim)
        yield Module(f"events.{sequence.name}", [], weights, history=f"raw {sequence.name}")
    for history in plan.histories:
        if model.merge:
            width, hidden = len(history.sources) * model.dim, model.merge.hidden
            weights = mlp("mask", width, [hidden], width) + mlp("mlp", width, [hidden], model.dim)
            yield Module("merge", [], weights, history=f"raw {history.name}")


def _layer(model: ModelConfig, layer: Layer, cls: int, first: bool) -> Iterator[Module]:
    if layer.x_sum:
        weights = token_linear("compression", layer.inputs, layer.x_sum, model.dim)
        weights += gate("gate", model.dim, layer.x_sum) if layer.spec.x_sum_gate != "none" else []
        yield Module("x_sum", weights)
    for row in layer.histories:
        name, own_dim = row.history.name, row.history.dim
        if first and own_dim != model.dim:
            adapter = Weight("weight", (own_dim, model.dim), 1)
            yield Module(f"adapters.{name}", [], [adapter], history=name)
        for part, own in block_parts(row, layer.x_sum, model.dim).items():
            yield _sequence_module(f"sequence.{name}.{part}", own, name)
        if row.summary is not None:
            yield _sequence_module(f"summary.{name}", summary_part(row.summary, row.history, cls, model.dim), name)
    yield Module("interaction", interaction_weights(layer.spec.interaction, layer.reads, model.dim))


def _sequence_module(name: str, part: SequencePart, history: str) -> Module:
    return Module(name, part.by_row, part.by_event, part.pairs, history)
