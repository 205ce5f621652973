"""Softmax attention of jagged sequences, written out per sequence: the specification of the op.

For query i and key j of one sequence and head, S_ij = scale · q_i·k_j + bias_ij over the keys that the query sees
(gemctl/kernels/visibility.py); O_i = Σ_j softmax_j(S_ij) v_j, and 0 where the query sees no key, or S_ij = −inf of all.
"""

import torch
from torch import Tensor

from gemctl.kernels.jagged import expand_heads
from gemctl.kernels.visibility import visible


def jagged_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Arguments and result as in op.py; any dtype and device, differentiable any number of times."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    outputs = [q[:0]]
    for b in range(len(q_offsets) - 1):
        rows, keys = slice(*q_offsets[b : b + 2].tolist()), slice(*k_offsets[b : b + 2].tolist())
        outputs.append(_one_sequence(q[rows], k[keys], v[keys], scale, causal, window, bias))
    return torch.cat(outputs)


def _one_sequence(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None, bias: Tensor | None
) -> Tensor:
    """q [Lq, H, D], k and v [Lk, H, D] → [Lq, H, D]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if bias is not None:
        scores = scores + bias[:, : q.shape[0], : k.shape[0]]
    hidden = ~visible(q.shape[0], k.shape[0], causal, window, q.device) | (scores == -torch.inf)
    # The lowest finite number instead of −inf: a row that sees nothing stays free of NaN and is zeroed below.
    weights = scores.masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1).masked_fill(hidden, 0)
    return torch.einsum("hqk,khd->qhd", weights, v)
