"""Summaries of a history: a few tokens that the interaction blocks read beside the non-sequence ones."""

import torch
from torch import Tensor, nn

from gemctl.kernels.pooled_attention.op import pooled_attention
from gemctl.model.init import InitRule
from gemctl.model.layers import layer_norm
from gemctl.specs.model import SummarySpec


class PooledAttention(nn.Module):
    """PMA (InterFormer): learned seeds attend over a row's events, [ΣL, dim] → [B, seeds, dim]; zero if it has none."""

    def __init__(self, spec: SummarySpec, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.seeds = nn.Parameter(torch.empty(spec.seeds, dim))
        self.keys_values = nn.Linear(dim, 2 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, s: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        rows, (seeds, dim) = len(offsets) - 1, self.seeds.shape
        k, v = self.keys_values(layer_norm(s)).unflatten(1, (2, self.heads, -1)).unbind(1)
        pooled = pooled_attention(self.seeds.view(seeds, self.heads, -1), k, v, offsets, max_length)
        return self.output(pooled.view(rows, seeds, dim))

    def init_rules(self) -> dict[str, InitRule]:
        return {"seeds": InitRule("uniform", 1.0)}
