"""Parameters of the dense part (name, shape), from the specs; a test compares them with the meta-device model."""

from itertools import pairwise

from gemctl.plan.activations import RECENCY
from gemctl.plan.dense import Shape
from gemctl.specs.data import FeatureSpec
from gemctl.specs.model import ModelConfig

Parameter = tuple[str, Shape]


def dense_parameters(model: ModelConfig, spec: FeatureSpec) -> list[Parameter]:
    """Every parameter of the dense part, by its name in the dense model."""
    dim = model.dim
    found: list[Parameter] = []
    if spec.dense:
        found += _mlp("tokens.dense", len(spec.dense), [dim], dim)
    if spec.domain:
        found.append(("tokens.domain.weight", (spec.domain.count, dim)))
    for sequence in spec.sequences:
        width = len(sequence.ids) * dim + len(sequence.floats) + RECENCY
        found += _linear(f"events.{sequence.name}.linear", width, dim)
    tokens = len(spec.categorical) + bool(spec.dense) + bool(spec.domain)
    for layer in range(model.layers):
        found += _layer(model, spec, f"layers.{layer}", tokens)
        tokens = model.interaction.fm_tokens + model.interaction.lc_tokens
    domains = spec.domain.count if spec.domain else 1
    for task in range(len(spec.labels)):
        found += _mlp(f"heads.tasks.{task}", tokens * dim, model.head_hidden, domains)
    return found


def _layer(model: ModelConfig, spec: FeatureSpec, name: str, tokens: int) -> list[Parameter]:
    dim, seeds, wukong = model.dim, model.summary.seeds, model.interaction
    found: list[Parameter] = []
    for sequence in spec.sequences:
        block, summary = f"{name}.sequence.{sequence.name}", f"{name}.summary.{sequence.name}"
        weights = model.sequence.weight_tokens
        found.append((f"{block}.ffn.compression.weight", (weights, tokens)))
        found += _linear(f"{block}.ffn.keys_values", weights * dim, 2 * model.sequence.ffn_hidden * dim)
        found += _linear(f"{block}.attention.queries_keys_values", dim, 3 * dim, bias=False)
        found += _linear(f"{block}.attention.output", dim, dim, bias=False)
        found.append((f"{summary}.seeds", (seeds, dim)))
        found += _linear(f"{summary}.keys_values", dim, 2 * dim, bias=False)
        found += _linear(f"{summary}.output", dim, dim, bias=False)
    merged, outputs = tokens + len(spec.sequences) * seeds, wukong.fm_tokens + wukong.lc_tokens
    found.append((f"{name}.interaction.fm_columns", (merged, wukong.rank)))
    found += _mlp(f"{name}.interaction.fm_mlp", merged * wukong.rank, wukong.hidden, wukong.fm_tokens * dim)
    found.append((f"{name}.interaction.compression.weight", (wukong.lc_tokens, merged)))
    if merged != outputs:
        found.append((f"{name}.interaction.residual.weight", (outputs, merged)))
    return found


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> list[Parameter]:
    return [(f"{name}.weight", (outputs, inputs)), *([(f"{name}.bias", (outputs,))] if bias else [])]


def _mlp(name: str, inputs: int, hidden: list[int], outputs: int) -> list[Parameter]:
    widths = [inputs, *hidden, outputs]
    return [item for number, (a, b) in enumerate(pairwise(widths)) for item in _linear(f"{name}.{2 * number}", a, b)]
