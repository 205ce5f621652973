"""Pooled attention on CPU: jagged flash attention whose queries are a copy of the seeds for every row.

The copies are small beside the keys; their gradients are summed over the rows in row order.
"""

import torch
from torch import Tensor

from gemctl.kernels.jagged import check_offsets
from gemctl.kernels.jagged_flash_attention import cpu as flash


def forward(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, max_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """(output [B, S, H, D], LSE [B, S, H] in float32, for float64 inputs float64; −inf for an empty row)."""
    check_offsets("pooled_attention", k_offsets=(k_offsets, k.shape[0]))
    queries, q_offsets = _queries(seeds, k_offsets)
    sizes = seeds.shape[0], max_k
    output, lse = flash.forward(queries, k, v, q_offsets, k_offsets, *sizes, scale, False, None, None)
    return output.view(-1, *seeds.shape), lse.view(-1, *seeds.shape[:2])


def backward(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    seeds: Tensor,
    k: Tensor,
    v: Tensor,
    k_offsets: Tensor,
    max_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of seeds, k, v."""
    queries, q_offsets = _queries(seeds, k_offsets)
    inputs = queries, k, v, q_offsets, k_offsets, seeds.shape[0], max_k, scale, False, None, None
    grad_queries, grad_k, grad_v, _ = flash.backward(
        grad_output.flatten(0, 1), output.flatten(0, 1), lse.flatten(0, 1), *inputs, False
    )
    return grad_queries.view(-1, *seeds.shape).sum(0), grad_k, grad_v


def _queries(seeds: Tensor, k_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The seeds once a row [B·S, H, D], and the rows' offsets."""
    batch = k_offsets.shape[0] - 1
    return seeds.repeat(batch, 1, 1), torch.arange(batch + 1) * seeds.shape[0]
