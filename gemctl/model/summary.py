"""Summaries of a history S [N, width]: a few tokens [B, t, dim] that the interaction blocks read.

    pma      P = softmax(E K(LN(S))ᵀ/√d_h) S, head by head       one seed per token (InterFormer, arXiv 2411.09852)
    hsp      Y = Σ_r Z_r P W_r,  P as in pma with seeds LN(E)     Kunlun's SumKronLinear, arXiv 2602.10016:
                                                                 Z_r [tokens, seeds], W_r [width, width]
    last_k   the newest k events, newest first; zero where a history is shorter
    cls      the CLS tokens before the oldest event (InterFormer)
    all      H = LN( [part_1 ‖ part_2 ‖ …] A ),  A [width, dim] only if the history has its own width
    gated    H ← σ(H ⊙ MLP(H)) (literal) or H ⊙ σ(MLP(H)) (scaled)

Values are the events themselves: a summary is a mean of events in the candidate's space. For a row without events it
is zero, except for gates and CLS tokens.
"""

import torch
from torch import Tensor, nn

from gemctl.kernels.pooled_attention.op import pooled_attention
from gemctl.model.build import build
from gemctl.model.events import Events
from gemctl.model.init import InitRule
from gemctl.model.layers import TokenLinear, layer_norm, make_gate
from gemctl.specs.sequence import ClsSpec, HspSpec, LastSpec, PmaSpec, Summary


class SeedAttention(nn.Module):
    """Learned seeds attend over a row's events: [N, width] → [B, seeds, width]."""

    def __init__(self, seeds: int, width: int, heads: int, norm_seeds: bool) -> None:
        super().__init__()
        self.heads, self.norm_seeds = heads, norm_seeds
        self.seeds = nn.Parameter(torch.empty(seeds, width))
        self.keys = nn.Linear(width, width, bias=False)

    def forward(self, events: Events) -> Tensor:
        seeds = layer_norm(self.seeds) if self.norm_seeds else self.seeds
        tensors = (seeds, self.keys(layer_norm(events.values)), events.values)
        q, k, v = (x.view(len(x), self.heads, x.shape[1] // self.heads) for x in tensors)
        return pooled_attention(q, k, v, events.offsets, events.max_length).flatten(2)

    def init_rules(self) -> dict[str, InitRule]:
        return {"seeds": InitRule("uniform", 1.0)}


class PooledAttention(SeedAttention):
    """One seed per token: [N, width] → [B, tokens, width]."""

    def __init__(self, spec: PmaSpec, width: int, heads: int) -> None:
        super().__init__(spec.tokens, width, heads, norm_seeds=False)


class HierarchicalPooling(SeedAttention):
    """Seeds, then the SumKronLinear: [N, width] → [B, tokens, width]."""

    def __init__(self, spec: HspSpec, width: int, heads: int) -> None:
        super().__init__(spec.seeds, width, heads, norm_seeds=True)
        self.rank = spec.rank
        self.tokens = TokenLinear(spec.seeds, spec.rank * spec.tokens)
        self.widths = nn.Linear(spec.rank * width, width, bias=False)

    def forward(self, events: Events) -> Tensor:
        z_BRTD = self.tokens(super().forward(events)).unflatten(1, (self.rank, -1))
        return self.widths(z_BRTD.transpose(1, 2).flatten(2))


class LastEvents(nn.Module):
    """The newest `tokens` events of each row, newest first: [N, width] → [B, tokens, width]."""

    def __init__(self, spec: LastSpec, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = spec.tokens

    def forward(self, events: Events) -> Tensor:
        back = torch.arange(self.tokens, device=events.offsets.device)
        exists = back < (events.offsets.diff() - events.cls)[:, None]
        index = torch.where(exists, events.offsets[1:, None] - 1 - back, len(events.values))
        padded = torch.cat([events.values, events.values.new_zeros(1, events.values.shape[1])])
        return padded[index]


class ClsTokens(nn.Module):
    """The updated CLS tokens: [N, width] → [B, cls, width]."""

    def __init__(self, spec: ClsSpec, width: int, heads: int) -> None:
        super().__init__()

    def forward(self, events: Events) -> Tensor:
        return events.values[events.offsets[:-1, None] + torch.arange(events.cls, device=events.offsets.device)]


class HistorySummary(nn.Module):
    """All parts of one history's summary, normed and gated."""

    def __init__(self, summary: Summary, width: int, heads: int, dim: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(build(part, width, heads) for part in summary.flat())
        self.adapter = nn.Linear(width, dim, bias=False) if width != dim else None
        self.gate = make_gate(summary.gate, dim)

    def forward(self, events: Events) -> Tensor:
        tokens = torch.cat([part(events) for part in self.parts], dim=1)
        tokens = layer_norm(tokens if self.adapter is None else self.adapter(tokens))
        return tokens if self.gate is None else self.gate(tokens)
