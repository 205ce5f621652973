"""Temporary: replaced by gemctl.kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _pad(x: Tensor, offsets: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    lengths = offsets.diff()
    mask = torch.arange(longest, device=x.device) < lengths[:, None]
    out = x.new_zeros(len(lengths), longest, *x.shape[1:])
    return out.masked_scatter(mask[:, :, None, None].expand_as(out), x), mask


def attention(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> Tensor:
    if max_q == 0 or max_k == 0:
        return q * 0 + 0 * (k.sum() + v.sum())
    Q, mask = _pad(q, q_offsets, max_q)
    K, kmask = _pad(k, k_offsets, max_k)
    V, _ = _pad(v, k_offsets, max_k)
    bias = torch.zeros(kmask.shape, dtype=q.dtype).masked_fill(~kmask, -1e30)[:, None, None]
    out = F.scaled_dot_product_attention(Q.transpose(1, 2), K.transpose(1, 2), V.transpose(1, 2), attn_mask=bias)
    return out.transpose(1, 2)[mask]


def gdpa(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> Tensor:
    if max_q == 0 or max_k == 0:
        return q * 0 + 0 * (k.sum() + v.sum())
    Q, mask = _pad(q, q_offsets, max_q)
    B = len(q_offsets) - 1
    K, V = (t.view(B, max_k, *t.shape[1:]) for t in (k, v))
    P = F.gelu(torch.einsum("bqhd,bkhd->bhqk", Q, K))
    return torch.einsum("bhqk,bkhd->bqhd", P, V)[mask]
