"""What sequence blocks and summaries have and cost: the formulas are in gemctl/model/sequence.py and summary.py.

Every function gives, by module, what multiplies each row, what multiplies each event, and which pairs attention sees.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gemctl.specs import flops
from gemctl.specs.layout import History, HistoryLayer, summary_tokens
from gemctl.specs.sequence import (
    BLOCK_SIZE,
    Attention,
    BlockAttentionSpec,
    ClsSpec,
    GatedSpec,
    HspSpec,
    HstuSpec,
    InterFormerSpec,
    KunlunSpec,
    LastSpec,
    Part,
    PmaSpec,
    Summary,
    parts,
)
from gemctl.specs.weights import Weight, gate, linear, token_linear


@dataclass(frozen=True)
class Pairs:
    """Which (query, key) pairs an attention op sees; `shared`: keys or seeds that every event meets (0: the events)."""

    width: int
    shared: int = 0
    blocks: bool = False
    causal: bool = False
    window: int | None = None

    def forward_flops(self, lengths: NDArray[np.int64]) -> int:
        """Forward FLOPs over histories of these lengths."""
        if self.shared:
            count = flops.pooled_pairs(self.shared, lengths)
        elif self.blocks:
            count = flops.block_pairs(lengths, BLOCK_SIZE)
        else:
            count = flops.pairs(lengths, lengths, self.causal, self.window)
        return flops.attention_forward(count, 1, self.width)


@dataclass(frozen=True)
class SequencePart:
    """A module's weights over rows and over events, and its attention."""

    by_row: list[Weight] = field(default_factory=list)
    by_event: list[Weight] = field(default_factory=list)
    pairs: list[Pairs] = field(default_factory=list)


def block_parts(layer: HistoryLayer, x_sum: int, dim: int) -> dict[str, SequencePart]:
    """Modules of a layer's sequence block over one history, by name in it; X_sum has `x_sum` tokens of width `dim`."""
    block, own = layer.block, layer.history.dim
    if block is None:
        return {}
    if isinstance(block, HstuSpec):
        weights = linear("gate_values_queries_keys", own, 4 * own, bias=False) + linear("output", own, own, bias=False)
        return {"attention": SequencePart([], weights, [Pairs(own, causal=True, window=block.window)])}
    hidden = block.ffn_rank if isinstance(block, InterFormerSpec) else block.ffn_hidden
    rank = block.generator_rank if isinstance(block, KunlunSpec) else None
    made = linear("code", x_sum * dim, rank, bias=False) if rank else []
    inputs = rank or x_sum * dim
    made += linear("keys", inputs, hidden * own) + linear("values", inputs, hidden * own, bias=False)
    found = {"ffn": SequencePart(made, [], [Pairs(own, shared=hidden)])}
    if layer.attends:
        found["attention"] = _attention(block.attention, own)
    return found


def _attention(spec: Attention, own: int) -> SequencePart:
    weights = linear("queries_keys_values", own, 3 * own, bias=False) + linear("output", own, own, bias=False)
    if isinstance(spec, BlockAttentionSpec):
        return SequencePart([], weights, [Pairs(own, blocks=True)])
    return SequencePart([], weights, [Pairs(own, causal=spec.causal, window=spec.window)])


def summary_part(summary: Summary, history: History, cls: int, dim: int) -> SequencePart:
    """The summary of one history."""
    by_row: list[Weight] = []
    by_event: list[Weight] = []
    pairs: list[Pairs] = []
    for number, part in enumerate(parts(summary)):
        own = _part(part, history.dim)
        by_row += [weight._replace(name=f"parts.{number}.{weight.name}") for weight in own.by_row]
        by_event += [weight._replace(name=f"parts.{number}.{weight.name}") for weight in own.by_event]
        pairs += own.pairs
    tokens = summary_tokens(summary, cls)
    if history.dim != dim:
        by_row += linear("adapter", history.dim, dim, bias=False, times=tokens)
    if isinstance(summary, GatedSpec) and summary.gate != "none":
        by_row += gate("gate", dim, tokens)
    return SequencePart(by_row, by_event, pairs)


def _part(part: Part, own: int) -> SequencePart:
    if isinstance(part, (LastSpec, ClsSpec)):
        return SequencePart()
    keys = linear("keys", own, own, bias=False)
    if isinstance(part, PmaSpec):
        return SequencePart([Weight("seeds", (part.tokens, own))], keys, [Pairs(own, shared=part.tokens)])
    assert isinstance(part, HspSpec)
    kron = token_linear("tokens", part.seeds, part.rank * part.tokens, own)
    kron += linear("widths", part.rank * own, own, bias=False, times=part.tokens)
    return SequencePart([Weight("seeds", (part.seeds, own)), *kron], keys, [Pairs(own, shared=part.seeds)])
