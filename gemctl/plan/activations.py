"""Values that the dense part keeps for its backward, per event and per row, counted layer by layer.

An estimate from the model's formulas: every input of a matrix product, a norm, an activation or an attention is kept
once; kernels recompute their scores. A test compares it with what autograd saves.
"""

from typing import Literal

from gemctl.plan.interaction_activations import NORM, block_values
from gemctl.specs.count import event_features
from gemctl.specs.data import FeatureSpec
from gemctl.specs.layout import History, HistoryLayer, Layer, Layout, layout, summary_tokens
from gemctl.specs.model import ModelConfig
from gemctl.specs.sequence import (
    Attention,
    BlockAttentionSpec,
    GatedSpec,
    HspSpec,
    HstuSpec,
    InterFormerSpec,
    KunlunSpec,
    PmaSpec,
    Summary,
    parts,
)

INDEX = 2  # an int64 beside each moved event, in float32 values


def activation_floats(
    model: ModelConfig, spec: FeatureSpec, recompute: Literal["none", "layers"] = "none"
) -> tuple[dict[str, int], int]:
    """(values kept per event, by sequence; values kept per row).

    With `recompute` = "layers" each layer keeps its inputs alone, and the largest one has its values once more while
    backward runs. Merged histories count as if no two events met: an upper bound, as their lengths together are not
    known.
    """
    plan = layout(model, spec)
    events = {s.name: event_features(model, s) for s in spec.sequences}
    row = len(spec.dense) + 2 * model.dim * bool(spec.dense) + plan.tokens * (model.dim + NORM)
    for history in plan.histories:
        rows = [r for layer in plan.layers for r in layer.histories if r.history == history]
        kept = [_event(row) for row in rows]
        stack = _first(model, plan, history)
        stack += sum(kept) if recompute == "none" else max(kept) + (len(rows) - 1) * history.dim
        row += stack * plan.cls
        merge = _merge(model, len(history.sources))
        for name in history.sources:
            events[name] += stack + merge
    values = [_row(model, layer, plan.cls) for layer in plan.layers]
    row += (
        sum(values) if recompute == "none" else max(values) + sum(_inputs(layer) for layer in plan.layers) * model.dim
    )
    return events, row + plan.outputs * model.dim + len(spec.labels) * 2 * sum(model.head_hidden)


def _merge(model: ModelConfig, sources: int) -> int:
    """MaskNet: its input, mask and product, and the hidden layers of both MLPs."""
    if model.merge is None:
        return 0
    return 3 * sources * model.dim + 4 * model.merge.hidden + sources * INDEX


def _first(model: ModelConfig, plan: Layout, history: History) -> int:
    """Per event: its first value, and what moves it."""
    return history.dim + (model.dim if history.dim != model.dim else 0) + (3 * INDEX if plan.cls else 0)


def _inputs(layer: Layer) -> int:
    """Tokens of a row that a layer begins with: X and the summaries that are there."""
    return layer.inputs + sum(row.tokens for row in layer.histories)


def _event(row: HistoryLayer) -> int:
    """Per event and layer: what the block's parts make, and the summary's keys."""
    width, heads, block = row.history.dim, row.history.heads, row.block
    kept = 0
    if isinstance(block, HstuSpec):  # a norm, U V Q K before and after SiLU, the norm of the result, its product with U
        rotated = 0 if block.position == "none" else 2 * width + width // heads
        kept = (width + NORM) + 8 * width + rotated + (2 * width + NORM) + width + width
    elif block is not None:
        kept = width + NORM + width  # q of GDPA, and the new S
        kept += _attention(block.attention, width, heads) + width if row.attends else 0
    pooled = [part for part in parts(row.summary) if isinstance(part, (PmaSpec, HspSpec))] if row.summary else []
    return kept + len(pooled) * (2 * width + NORM)


def _attention(spec: Attention, width: int, heads: int) -> int:
    """A norm's output, q k v, the result and its log-sum-exp; normed and rotated q and k are new ones."""
    kept = width + NORM + 3 * width + width + heads
    kept += 2 * width + 2 * heads if spec.qk_norm else 0
    rotates = not isinstance(spec, BlockAttentionSpec) and spec.position != "none"
    return kept + (2 * width + width // heads if rotates else 0)


def _row(model: ModelConfig, layer: Layer, cls: int) -> int:
    """Per row and layer: X_sum, personalised keys and values, summaries, the interaction block."""
    kept = model.dim * (layer.inputs + layer.x_sum) if layer.x_sum else 0
    if layer.x_sum and layer.spec.x_sum_gate != "none":
        kept += 4 * layer.x_sum * model.dim
    for row in layer.histories:
        if row.block is not None and not isinstance(row.block, HstuSpec):
            hidden = row.block.ffn_rank if isinstance(row.block, InterFormerSpec) else row.block.ffn_hidden
            rank = row.block.generator_rank if isinstance(row.block, KunlunSpec) else None
            kept += 2 * hidden * row.history.dim + (rank or 0)
        if row.summary is not None:
            kept += _summary(row.summary, row, model.dim, cls)
    return kept + block_values(layer.spec.interaction, layer.reads, model.dim)


def _summary(summary: Summary, row: HistoryLayer, dim: int, cls: int) -> int:
    """The pooled tokens, and the norm's input; a summary of one width needs no adapter."""
    width, heads, tokens = row.history.dim, row.history.heads, summary_tokens(summary, cls)
    kept = tokens * (dim + NORM) + (tokens * width if width != dim else 0)
    for part in parts(summary):
        if isinstance(part, PmaSpec):
            kept += part.tokens * (width + heads)
        if isinstance(part, HspSpec):
            kept += part.seeds * (2 * width + heads) + 2 * part.rank * part.tokens * width
    return kept + (4 * tokens * dim if isinstance(summary, GatedSpec) and summary.gate != "none" else 0)
