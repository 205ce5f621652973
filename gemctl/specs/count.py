"""What a model has and costs, torch-free: every parameter's name and shape, and the useful FLOPs of a batch.

    from gemctl.specs.count import parameters, step_flops
    parameters(ModelConfig(), spec)                                     # [("tables.pooled…", (rows, dim)), …]
    step_flops(ModelConfig(), spec, 2, {"history": np.array([5, 0])})   # FLOPs of a step over two rows

Useful FLOPs are those of matrix products and of the attention family (gemctl/specs/flops.py): forward once, backward
twice, at the real lengths. Lookups, norms, activations and recomputed work count nothing. `FlopCounterMode` sees the
same forward to the last one; in its backward only the gradients of floats and ages are missing, which nobody needs.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemctl.specs import flops
from gemctl.specs.data import FeatureSpec, SequenceSpec
from gemctl.specs.model import BLOCK_SIZE, PLACE_SCALES, ModelConfig

Shape = tuple[int, ...]

ROWS, COLUMNS = "rows of the batch", "columns of every row's tokens"


class Weight(NamedTuple):
    """A parameter of the dense part, and what it multiplies: `times` each of the rows, columns or events `over`.

    `over` is None where the parameter is in no matrix product; events are named by their sequence, [name].
    """

    module: str
    name: str
    shape: Shape
    over: str | None = None
    times: int = 1

    @property
    def flops(self) -> int:
        """FLOPs for each thing it multiplies; two a number."""
        return 2 * self.times * self.shape[0] * self.shape[1]


def parameters(model: ModelConfig, spec: FeatureSpec) -> list[tuple[str, Shape]]:
    """Name and shape of every parameter of `GemModel(model, spec)`, tables first, names as in `named_parameters()`."""
    rows = {table.name: table.rows for table in spec.tables}
    kinds = {"pooled.embedding_bags": spec.pooled_tables(), "sequence.embeddings": spec.sequence_tables()}
    tables = [(f"tables.{kind}.{name}.weight", (rows[name], model.dim)) for kind in kinds for name in kinds[kind]]
    return tables + [(f"dense.{name}", shape) for name, shape in dense_parameters(model, spec)]


def dense_parameters(model: ModelConfig, spec: FeatureSpec) -> list[tuple[str, Shape]]:
    """Name and shape of every parameter of the dense part, `GemModel(model, spec).dense`."""
    return [(f"{weight.module}.{weight.name}", weight.shape) for weight in _weights(model, spec)]


def step_flops(model: ModelConfig, spec: FeatureSpec, rows: int, lengths: Mapping[str, NDArray[np.int64]]) -> float:
    """Useful FLOPs of forward and backward over `rows` rows; `lengths` [rows]: events of each, by sequence."""
    return 3.0 * sum(module_flops(model, spec, rows, lengths).values())


def module_flops(
    model: ModelConfig, spec: FeatureSpec, rows: int, lengths: Mapping[str, NDArray[np.int64]]
) -> dict[str, int]:
    """Forward FLOPs of each module of the dense part that has any, by its name in `DenseModel`; arguments as above."""
    counts = {ROWS: rows, COLUMNS: rows * model.dim}
    counts |= {_events(s.name): int(lengths[s.name].sum()) for s in spec.sequences}
    found: dict[str, int] = {}
    for weight in _weights(model, spec):
        if weight.over is not None:
            found[weight.module] = found.get(weight.module, 0) + weight.flops * counts[weight.over]
    for sequence in spec.sequences:
        for module, forward in _attention_flops(model, lengths[sequence.name]).items():
            for layer in range(model.layers):
                found[f"layers.{layer}.{module.format(sequence.name)}"] += forward
    return found


def _attention_flops(model: ModelConfig, lengths: NDArray[np.int64]) -> dict[str, int]:
    """Forward FLOPs of one layer's attention ops over one sequence, by module ("{}": the sequence's name)."""
    block = model.sequence
    if block.attention == "block_attention":
        seen = flops.block_pairs(lengths, BLOCK_SIZE)
    else:
        seen = flops.pairs(lengths, lengths, window=block.window)
    pairs = {
        "sequence.{}.ffn": flops.pooled_pairs(block.ffn_hidden, lengths),
        "sequence.{}.attention": seen,
        "summary.{}": flops.pooled_pairs(model.summary.seeds, lengths),
    }
    width = model.dim // model.heads
    return {module: flops.attention_forward(count, model.heads, width) for module, count in pairs.items()}


def event_features(model: ModelConfig, sequence: SequenceSpec) -> int:
    """Numbers of an event beside its ids: its floats, its age by scale, its place."""
    return len(sequence.floats) + len(model.age_scales) + 1 + len(PLACE_SCALES)


def _weights(model: ModelConfig, spec: FeatureSpec) -> list[Weight]:
    dim = model.dim
    found: list[Weight] = []
    if spec.dense:
        found += _mlp("tokens.dense", len(spec.dense), [dim], dim)
    if spec.domain:
        found.append(Weight("tokens.domain", "weight", (spec.domain.count, dim)))
    for sequence in spec.sequences:
        width = event_features(model, sequence)
        found += _linear(f"events.{sequence.name}", "linear", width, dim, _events(sequence.name))
    tokens = len(spec.categorical) + bool(spec.dense) + bool(spec.domain)
    for layer in range(model.layers):
        for sequence in spec.sequences:
            found += _sequence(model, sequence.name, f"layers.{layer}", tokens)
        found += _interaction(model, f"layers.{layer}.interaction", tokens + len(spec.sequences) * model.summary.seeds)
        tokens = model.interaction.fm_tokens + model.interaction.lc_tokens
    domains = spec.domain.count if spec.domain else 1
    for task in range(len(spec.labels)):
        found += _mlp(f"heads.tasks.{task}", tokens * dim, model.head_hidden, domains)
    return found


def _sequence(model: ModelConfig, name: str, layer: str, tokens: int) -> list[Weight]:
    """A layer's sequence block and summary."""
    dim, seeds, block, over = model.dim, model.summary.seeds, model.sequence, _events(name)
    ffn, attention = (f"{layer}.sequence.{name}.{part}" for part in ("ffn", "attention"))
    summary = f"{layer}.summary.{name}"
    return [
        Weight(ffn, "compression.weight", (block.weight_tokens, tokens), COLUMNS),
        *_linear(ffn, "keys", block.weight_tokens * dim, block.ffn_hidden * dim, ROWS),
        Weight(ffn, "values.weight", (block.ffn_hidden * dim, block.weight_tokens * dim), ROWS),
        Weight(attention, "queries_keys_values.weight", (3 * dim, dim), over),
        Weight(attention, "output.weight", (dim, dim), over),
        Weight(summary, "seeds", (seeds, dim)),
        Weight(summary, "keys.weight", (dim, dim), over),
    ]


def _interaction(model: ModelConfig, module: str, tokens: int) -> list[Weight]:
    """A Wukong block over `tokens` tokens: X (XᵀY) takes two products of Y's size."""
    wukong, dim = model.interaction, model.dim
    outputs = wukong.fm_tokens + wukong.lc_tokens
    found = [
        Weight(module, "fm_columns", (tokens, wukong.rank), COLUMNS, times=2),
        *_mlp(module, tokens * wukong.rank, wukong.hidden, wukong.fm_tokens * dim, "fm_mlp."),
        Weight(module, "compression.weight", (wukong.lc_tokens, tokens), COLUMNS),
    ]
    if tokens != outputs:
        found.append(Weight(module, "residual.weight", (outputs, tokens), COLUMNS))
    return found


def _linear(module: str, name: str, inputs: int, outputs: int, over: str) -> list[Weight]:
    return [
        Weight(module, f"{name}.weight", (outputs, inputs), over),
        Weight(module, f"{name}.bias", (outputs,)),
    ]


def _mlp(module: str, inputs: int, hidden: list[int], outputs: int, prefix: str = "") -> list[Weight]:
    widths = [inputs, *hidden, outputs]
    layers = enumerate(pairwise(widths))
    return [weight for i, (a, b) in layers for weight in _linear(module, f"{prefix}{2 * i}", a, b, ROWS)]


def _events(sequence: str) -> str:
    return f"[{sequence}]"
