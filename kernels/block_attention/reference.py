"""Block attention of jagged sequences, written out per block: the specification of the op.

Each sequence is cut into blocks of `block_size` tokens from its start (the last may be shorter); every token attends
to all tokens of its own block: O = softmax(scale · QKᵀ) V. With cos and sin, q, k and v are rotated first by their
position in the sequence.
"""

import torch
from torch import Tensor

from gemctl.kernels.block_attention.rotary import positions, rotate
from gemctl.kernels.jagged import expand_heads


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    block_size: int = 64,
    scale: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """Arguments and result as in op.py; any dtype and device, differentiable any number of times."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cos is not None and sin is not None:
        position = positions(offsets, q.shape[0])
        q, k, v = (rotate(x, cos[position], sin[position]) for x in (q, k, v))
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    outputs = [q[:0]]
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for first in range(start, stop, block_size):
            block = slice(first, min(first + block_size, stop))
            weights = (torch.einsum("qhd,khd->hqk", q[block], k[block]) * scale).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v[block]))
    return torch.cat(outputs)
