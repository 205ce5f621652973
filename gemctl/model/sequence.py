"""The sequence block over events (Kunlun, arXiv 2602.10016): personalised feed-forward, then self-attention.

    S ← S + GDPA(Q = LN(S), K = W₁(x), V = W₂(x)),   S ← S + MHA(LN(S))

x are the row's non-sequence tokens, the candidate among them: this is where the candidate meets each event. GDPA with
such keys and values is the two-layer network act(S W₁(x)) W₂(x) whose weights belong to the row (InterFormer's PFFN).
"""

import torch
from torch import Tensor, nn

from gemctl.kernels.block_attention.op import block_attention
from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
from gemctl.model.layers import TokenLinear, ZeroLinear, layer_norm
from gemctl.specs.model import BLOCK_SIZE, SequenceBlockSpec


class PersonalisedFFN(nn.Module):
    """GDPA of events [ΣL, dim] with `hidden` keys and values a row, made from its tokens [B, tokens, dim]."""

    def __init__(self, spec: SequenceBlockSpec, tokens: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.hidden = heads, spec.ffn_hidden
        self.compression = TokenLinear(tokens, spec.weight_tokens)
        self.keys = nn.Linear(spec.weight_tokens * dim, spec.ffn_hidden * dim)
        self.values = ZeroLinear(spec.weight_tokens * dim, spec.ffn_hidden * dim)

    def forward(self, s: Tensor, x_BND: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        rows, width = len(x_BND), s.shape[1] // self.heads
        x_sum = self.compression(x_BND).flatten(1)
        k, v = (make(x_sum).view(rows * self.hidden, self.heads, width) for make in (self.keys, self.values))
        k_offsets = torch.arange(rows + 1, device=offsets.device) * self.hidden
        q = layer_norm(s).view(-1, self.heads, width)
        return gdpa(
            q,
            k,
            v,
            offsets,
            k_offsets,
            max_length,
            self.hidden,
            activation="gelu_approx",
            pre_scale=width**-0.5,
            post_scale=self.hidden**-0.5,
        ).flatten(1)


class SelfAttention(nn.Module):
    """Multi-head softmax attention of a row's events, [ΣL, dim] → [ΣL, dim]: all, within ±window, or in blocks."""

    def __init__(self, spec: SequenceBlockSpec, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.window = heads, spec.window
        self.blocks = spec.attention == "block_attention"
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.output = ZeroLinear(dim, dim)

    def forward(self, s: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        q, k, v = self.queries_keys_values(layer_norm(s)).unflatten(1, (3, self.heads, -1)).unbind(1)
        if self.blocks:
            seen = block_attention(q, k, v, offsets, max_length, block_size=BLOCK_SIZE)
        else:
            seen = jagged_flash_attention(q, k, v, offsets, offsets, max_length, max_length, window=self.window)
        return self.output(seen.flatten(1))


class SequenceBlock(nn.Module):
    """One personalised feed-forward and one self-attention, both residual."""

    def __init__(self, spec: SequenceBlockSpec, tokens: int, dim: int, heads: int) -> None:
        super().__init__()
        self.ffn = PersonalisedFFN(spec, tokens, dim, heads)
        self.attention = SelfAttention(spec, dim, heads)

    def forward(self, s: Tensor, x_BND: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        s = s + self.ffn(s, x_BND, offsets, max_length)
        return s + self.attention(s, offsets, max_length)
