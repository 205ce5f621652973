"""Generalised dot-product attention of jagged sequences, written out per sequence: the specification of the op.

For query i and key j of one sequence and head that the query sees, P_ij = post_scale · act(pre_scale · q_i·k_j), and
O_i = Σ_j P_ij v_j: no row maximum, no denominator.
"""

import torch
from torch import Tensor

from gemctl.kernels.gdpa.activation import ACTIVATIONS, Activation
from gemctl.kernels.jagged import expand_heads
from gemctl.kernels.visibility import visible


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    activation: str,
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    broadcast_q: bool = False,
) -> Tensor:
    """Arguments and result as in op.py; any dtype and device, differentiable any number of times."""
    act = ACTIVATIONS[Activation(activation)]
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    outputs = [q[:0]]
    for b in range(len(k_offsets) - 1):
        queries = q if q_offsets is None else q[slice(*q_offsets[b : b + 2].tolist())]
        keys = slice(*k_offsets[b : b + 2].tolist())
        seen = visible(len(queries), len(k[keys]), causal, window, q.device)
        scores = torch.einsum("qhd,khd->hqk", queries, k[keys]) * pre_scale
        outputs.append(torch.einsum("hqk,khd->qhd", act(scores).masked_fill(~seen, 0) * post_scale, v[keys]))
    return torch.cat(outputs)
