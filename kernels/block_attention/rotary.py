"""Rotary position embedding of interleaved pairs, fused into block attention (on q, k and v alike).

(x[2i], x[2i+1]) at position p → (x[2i] c − x[2i+1] s, x[2i] s + x[2i+1] c),  c, s = cos[p, i], sin[p, i]
"""

import torch
from torch import Tensor


def positions(offsets: Tensor, tokens: int) -> Tensor:
    """Position of each of `tokens` tokens within its sequence, int64 [tokens]."""
    lengths = offsets.diff()
    return torch.arange(tokens, device=offsets.device) - offsets[:-1].repeat_interleave(lengths, output_size=tokens)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, H, D] rotated by its tokens' angles cos, sin [N, D/2]; with −sin it is rotated back."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
