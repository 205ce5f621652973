"""Attention among a row's events, [N, width] → [N, width], one spec per layer.

    softmax     q, k, v = heads of LN(S) W;  O_i = Σ_j softmax_j(q_i·k_j / √d_h) v_j over what i sees;  O W_o
    SiLU (HSTU) U, V, Q, K = silu(LN(S) W);  O_i = Σ_{j ≤ i} silu(q_i·k_j / √d_h) v_j / length_scale;  (LN(O) ⊙ U) W_o

An event attends to its whole history, to ±window events, to no later event (causal), or to its block of 64 events
counted from the start of the history. Options, in this order, head by head:

    qk_norm     q ← q / √(mean(q²) + ε), k alike: scores are at most √d_h
    rope        pair (2i, 2i+1) of q and k is rotated by θ_i · place,  θ_i = 10000^(−2i/d_h)
    rote        … by θ_i · (place + log(1 + age/scale))                         (Kunlun, arXiv 2602.10016)

Places count from the newest event, 0, so they grow with age; scores depend on differences only. CLS tokens come before
the oldest event, with age 0. In block attention `rope` rotates q, k and v by θ_i · position from the
oldest event on, inside the kernel, as GEM's does. W_o starts at zero where the result is added to S.
rope and rote replace HSTU's relative attention bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemctl.kernels.block_attention.op import block_attention
from gemctl.kernels.block_attention.rotary import rotate
from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
from gemctl.model.events import Events
from gemctl.model.layers import EPSILON, ZeroLinear, layer_norm
from gemctl.specs.sequence import BLOCK_SIZE, AttentionSpec, BlockAttentionSpec, HstuSpec, JaggedAttentionSpec

ROTARY_BASE = 10_000.0


class SelfAttention(nn.Module):
    """Multi-head softmax attention; `residual`: the caller adds its input to the result."""

    def __init__(self, spec: AttentionSpec, width: int, heads: int, residual: bool) -> None:
        super().__init__()
        self.spec, self.heads = spec, heads
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.output = ZeroLinear(width, width) if residual else nn.Linear(width, width, bias=False)

    def forward(self, events: Events) -> Tensor:
        return self.output(self.attend(*self.project(events), events).flatten(1))

    def project(self, events: Events) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [N, H, d_h]."""
        width = events.values.shape[1] // self.heads
        q, k, v = self.queries_keys_values(layer_norm(events.values)).view(-1, 3, self.heads, width).unbind(1)
        if self.spec.qk_norm:
            q, k = (F.rms_norm(x, (width,), eps=EPSILON) for x in (q, k))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, events: Events) -> Tensor:
        """Attention of queries, keys and values [N, H, d_h] → [N, H, d_h]."""
        raise NotImplementedError


class JaggedAttention(SelfAttention):
    """Over a row's whole history, a window of it, or no later events."""

    spec: JaggedAttentionSpec

    def attend(self, q: Tensor, k: Tensor, v: Tensor, events: Events) -> Tensor:
        spec, offsets, longest = self.spec, events.offsets, events.max_length
        q, k = rotated(q, k, events, spec.position, spec.rote_scale)
        return jagged_flash_attention(
            q, k, v, offsets, offsets, longest, longest, causal=spec.causal, window=spec.window
        )


class BlockAttention(SelfAttention):
    """Within blocks of 64 events."""

    spec: BlockAttentionSpec

    def attend(self, q: Tensor, k: Tensor, v: Tensor, events: Events) -> Tensor:
        cos, sin = rotation_tables(events, q.shape[2]) if self.spec.rope else (None, None)
        return block_attention(q, k, v, events.offsets, events.max_length, block_size=BLOCK_SIZE, cos=cos, sin=sin)


class SiluAttention(nn.Module):
    """HSTU's pointwise attention; the caller adds its input to the result."""

    def __init__(self, spec: HstuSpec, dim: int, heads: int) -> None:
        super().__init__()
        self.spec, self.heads = spec, heads
        self.gate_values_queries_keys = nn.Linear(dim, 4 * dim, bias=False)
        self.output = ZeroLinear(dim, dim)

    def forward(self, events: Events) -> Tensor:
        spec, offsets, longest = self.spec, events.offsets, events.max_length
        width = events.values.shape[1] // self.heads
        made = F.silu(self.gate_values_queries_keys(layer_norm(events.values)))
        u, v, q, k = made.view(-1, 4, self.heads, width).unbind(1)
        q, k = rotated(q, k, events, spec.position, spec.rote_scale)
        scales = {"pre_scale": width**-0.5, "post_scale": 1 / spec.length_scale}
        seen = gdpa(
            q, k, v, offsets, offsets, longest, longest, activation="silu", causal=True, window=spec.window, **scales
        )
        return self.output(layer_norm(seen.flatten(1)) * u.flatten(1))


def rotated(q: Tensor, k: Tensor, events: Events, position: str, rote_scale: float) -> tuple[Tensor, Tensor]:
    """q and k [N, H, d_h] rotated by place, or by place and age; unchanged for "none"."""
    if position == "none":
        return q, k
    time = events.place.to(_exact(q))
    if position == "rote":
        time = time + torch.log1p(events.ages.to(time.dtype) / rote_scale)
    angles = time[:, None] * _frequencies(q.shape[2], time)
    cos, sin = angles.cos(), angles.sin()
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotation_tables(events: Events, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin [longest, width/2] by position."""
    position = torch.arange(events.max_length, device=events.offsets.device, dtype=_exact(events.values))
    angles = position[:, None] * _frequencies(width, position)
    return angles.cos(), angles.sin()


def _frequencies(width: int, like: Tensor) -> Tensor:
    return ROTARY_BASE ** (-torch.arange(0, width, 2, device=like.device, dtype=like.dtype) / width)


def _exact(values: Tensor) -> torch.dtype:
    """The dtype of angles: float32 represents every place up to 2²⁴, bfloat16 does not."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32
