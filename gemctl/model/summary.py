"""Summaries of a history: a few tokens that the interaction blocks read beside the non-sequence ones."""

import torch
from torch import Tensor, nn

from gemctl.kernels.pooled_attention.op import pooled_attention
from gemctl.model.init import InitRule
from gemctl.model.layers import layer_norm
from gemctl.specs.model import SummarySpec


class PooledAttention(nn.Module):
    """PMA (InterFormer): learned seeds attend over a row's events, H = LN(MHA(seeds, LN(S) W, S)).

    [ΣL, dim] → [B, seeds, dim], zero for a row without events. Values are the events as they are: a summary is a mean
    of events in the candidate's space.
    """

    def __init__(self, spec: SummarySpec, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.seeds = nn.Parameter(torch.empty(spec.seeds, dim))
        self.keys = nn.Linear(dim, dim, bias=False)

    def forward(self, s: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        seeds, k, v = (x.unflatten(1, (self.heads, -1)) for x in (self.seeds, self.keys(layer_norm(s)), s))
        return layer_norm(pooled_attention(seeds, k, v, offsets, max_length).flatten(2))

    def init_rules(self) -> dict[str, InitRule]:
        return {"seeds": InitRule("uniform", 1.0)}
