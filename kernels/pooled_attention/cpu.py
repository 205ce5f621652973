"""Pooled attention on CPU: PyTorch's fused attention on groups of rows with (nearly) equal numbers of keys.

The seeds are one broadcast view for every group; their gradient is summed group by group, in one fixed order.
bfloat16 and float16 inputs are computed in float32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gemctl.kernels import buckets
from gemctl.kernels.fused import fused, fused_backward, gather, scatter
from gemctl.kernels.jagged import check_offsets, compute_dtype


def forward(
    seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, schedule: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """(output [B, S, H, D], LSE [B, S, H] in float32, for float64 inputs float64; −inf for an empty row)."""
    batch, heads, dtype = k_offsets.shape[0] - 1, seeds.shape[1], compute_dtype(seeds.dtype)
    output = seeds.new_zeros(batch, *seeds.shape)
    lse = seeds.new_full((batch, *seeds.shape[:2]), -torch.inf, dtype=dtype)
    for mask, rows, q, k_part in _groups(seeds, k, k_offsets):
        dense = gather(k, k_part, heads, dtype), gather(v, k_part, heads, dtype)
        group_output, group_lse = fused(q, *dense, attn_mask=mask, scale=scale)
        rows.scatter(output, group_output.transpose(1, 2).to(seeds.dtype))
        rows.scatter(lse, group_lse.transpose(1, 2))
    return output, lse


def backward(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    seeds: Tensor,
    k: Tensor,
    v: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of seeds, k, v."""
    heads, dtype = seeds.shape[1], compute_dtype(seeds.dtype)
    grad_seeds = seeds.new_zeros(seeds.shape, dtype=dtype)
    # Every key is in a group with keys, so all of it is written, unless there is no seed.
    grad_k, grad_v = (x.new_empty(x.shape) if len(seeds) else x.new_zeros(x.shape) for x in (k, v))
    for mask, rows, q, k_part in _groups(seeds, k, k_offsets):
        dense = gather(k, k_part, heads, dtype), gather(v, k_part, heads, dtype)
        saved = (rows.gather(x).to(dtype).transpose(1, 2) for x in (grad_output, output, lse))
        grads = fused_backward(next(saved), q, *dense, *saved, 0.0, False, attn_mask=mask, scale=scale)
        grad_seeds += grads[0].sum(0).transpose(0, 1)
        scatter(grad_k, k_part, grads[1])
        scatter(grad_v, k_part, grads[2])
    return grad_seeds.to(seeds.dtype), grad_k, grad_v


def _groups(
    seeds: Tensor, k: Tensor, k_offsets: Tensor
) -> Iterator[tuple[Tensor | None, buckets.Part, Tensor, buckets.Part]]:
    """For each group with keys: the mask of its padding, its rows of the batch, its queries, its keys."""
    check_offsets("pooled_attention", k_offsets=(k_offsets, k.shape[0]))
    count, heads, _ = seeds.shape
    join_pairs = buckets.JOIN_SCORES // max(1, count * heads)
    plan = buckets.plan(torch.arange(k_offsets.shape[0]), k_offsets, join_pairs, positional=False)
    dense_seeds = seeds.to(compute_dtype(seeds.dtype)).transpose(0, 1)
    for group, rows, k_part in zip(plan.groups, plan.q.parts(), plan.k.parts(), strict=True):
        if group.len_k > 0 and count > 0:
            mask = None if group.padding is None else group.padding.to(dense_seeds.dtype)
            yield mask, rows, dense_seeds.expand(group.batch, *dense_seeds.shape), k_part
