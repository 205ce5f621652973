"""Pooled attention, written out per sequence: the specification of the op.

The same seeds attend over every sequence's keys: O_b = softmax(scale · Seeds K_bᵀ) V_b, and 0 for an empty sequence.
"""

import torch
from torch import Tensor

from gemctl.kernels.jagged import expand_heads


def pooled_attention(
    seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, max_k: int, *, scale: float | None = None
) -> Tensor:
    """Arguments and result as in op.py; any dtype and device, differentiable any number of times."""
    scale = seeds.shape[-1] ** -0.5 if scale is None else scale
    k, v = expand_heads(k, seeds.shape[1]), expand_heads(v, seeds.shape[1])
    outputs = [seeds[None][:0]]
    for start, stop in zip(k_offsets[:-1].tolist(), k_offsets[1:].tolist(), strict=True):
        weights = (torch.einsum("shd,khd->hsk", seeds, k[start:stop]) * scale).softmax(-1)
        outputs.append(torch.einsum("hsk,khd->shd", weights, v[start:stop])[None])
    return torch.cat(outputs)
