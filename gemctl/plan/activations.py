"""Values that the dense part keeps for its backward, per event and per row, counted layer by layer.

An estimate from the model's formulas: every input of a matrix product, a norm, an activation or an attention is kept
once; kernels recompute their scores. A test compares it with what autograd saves.
"""

from gemctl.specs.count import event_features
from gemctl.specs.data import FeatureSpec
from gemctl.specs.model import ModelConfig

NORM = 2  # mean and deviation of a normalised vector


def activation_floats(model: ModelConfig, spec: FeatureSpec) -> tuple[dict[str, int], int]:
    """(values kept per event, by sequence; values kept per row)."""
    events = {s.name: event_features(model, s) + model.layers * _event(model) for s in spec.sequences}
    tokens = len(spec.categorical) + bool(spec.dense) + bool(spec.domain)
    row = len(spec.dense) + 2 * model.dim * bool(spec.dense) + tokens * (model.dim + NORM)
    for _ in range(model.layers):
        row += _row(model, tokens, len(spec.sequences))
        tokens = model.interaction.fm_tokens + model.interaction.lc_tokens
    return events, row + tokens * model.dim + len(spec.labels) * 2 * sum(model.head_hidden)


def _event(model: ModelConfig) -> int:
    """Per event and layer: three norms, q of GDPA (a norm's output), q k v and output of attention, k of summary."""
    norms = 3 * (2 * model.dim + NORM)
    attention = 3 * model.dim + model.dim + model.heads
    return norms + attention + model.dim


def _row(model: ModelConfig, tokens: int, sequences: int) -> int:
    """Per row and layer: personalised keys and values, summaries, the Wukong block.

    A product over tokens keeps its input twice: as it came, and transposed for the other operand's gradient.
    """
    dim, seeds, wukong, block = model.dim, model.summary.seeds, model.interaction, model.sequence
    merged, outputs = tokens + sequences * seeds, wukong.fm_tokens + wukong.lc_tokens
    personal = sequences * dim * (tokens + block.weight_tokens + 2 * block.ffn_hidden)
    summary = sequences * seeds * (dim + NORM + model.heads)
    token_products = merged * dim * (3 if merged == outputs else 4)
    products = dim * wukong.rank + 2 * merged * wukong.rank + NORM
    return personal + summary + token_products + products + 2 * sum(wukong.hidden) + outputs * (dim + NORM)
