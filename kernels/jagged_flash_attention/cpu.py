"""Softmax attention of jagged sequences on CPU: PyTorch's fused attention on groups of equal lengths.

Each group is one dense call (gemctl/kernels/buckets.py); windows and causal rectangles are cut into row tiles
(gemctl/kernels/visibility.py), so only visible pairs and a bounded rest are computed. bfloat16 and float16 inputs are
computed in float32. All loops and sums have one fixed order: two runs are equal bit for bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gemctl.kernels import buckets
from gemctl.kernels.jagged import check_offsets, compute_dtype, expand_heads, reduce_heads
from gemctl.kernels.visibility import Tile, tile_mask, tiles

# The fused CPU kernel behind scaled_dot_product_attention, called by its own name because that returns the LSE.
_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

BIAS_SCORES = 1 << 21  # scores at once where the bias' gradient needs them written out


@dataclass(frozen=True)
class _Options:
    scale: float
    causal: bool
    window: int | None
    dtype: torch.dtype  # of the computation
    bias: Tensor | None  # [H, ≥ longest Lq, ≥ longest Lk] in the compute dtype
    bias_grad: Tensor | None = None  # where its gradient is summed


class _Call(NamedTuple):
    """One dense call: rows row0 … row1−1 against keys key0 … key1−1 of a group's sequences."""

    row0: int
    row1: int
    key0: int
    key1: int
    is_causal: bool
    mask: Tensor | None  # added to the scores; [rows, keys] or [H, rows, keys]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(output like q, LSE [ΣLq, H] in float32, for float64 inputs float64; −inf where a query sees no key)."""
    plan, options = _prepare(q, k, q_offsets, k_offsets, scale, causal, window, bias)
    inputs = _sorted_inputs(plan, q, k, v)
    output = torch.zeros_like(inputs[0])
    lse = torch.full(output.shape[:2], -torch.inf, dtype=output.dtype)
    for group, (q_g, output_g, lse_g), (k_g, v_g) in _groups(plan, (inputs[0], output, lse), inputs[1:]):
        for call in _calls(group, options):
            tile_output, tile_lse = _fused(
                _rows(q_g, call),
                _keys(k_g, call),
                _keys(v_g, call),
                0.0,
                call.is_causal,
                attn_mask=call.mask,
                scale=scale,
            )
            _rows(output_g, call).copy_(tile_output)
            _rows(lse_g, call).copy_(tile_lse)
    return plan.q.unsort(output).to(q.dtype), plan.q.unsort(lse)


def backward(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
    needs_bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and bias (the last is empty unless `needs_bias_grad`)."""
    plan, options = _prepare(q, k, q_offsets, k_offsets, scale, causal, window, bias, needs_bias_grad)
    inputs = _sorted_inputs(plan, q, k, v)
    saved = tuple(plan.q.sort(x).to(inputs[0].dtype) for x in (grad_output, output, lse))
    grads = tuple(torch.zeros_like(x) for x in inputs)
    q_side, k_side = (inputs[0], grads[0], *saved), (*inputs[1:], *grads[1:])
    for group, (q_g, grad_q_g, *saved_g), (k_g, v_g, grad_k_g, grad_v_g) in _groups(plan, q_side, k_side):
        for call in _calls(group, options):
            saved_rows = [_rows(x, call) for x in saved_g]
            tile_grads = _call_backward(
                call, options, _rows(q_g, call), _keys(k_g, call), _keys(v_g, call), *saved_rows
            )
            _rows(grad_q_g, call).copy_(tile_grads[0])
            _keys(grad_k_g, call).add_(tile_grads[1])
            _keys(grad_v_g, call).add_(tile_grads[2])
    grad_q = plan.q.unsort(grads[0]).to(q.dtype)
    grad_k, grad_v = (reduce_heads(plan.k.unsort(grad), k.shape[1]).to(q.dtype) for grad in grads[1:])
    grad_bias = q.new_zeros(0) if options.bias_grad is None else options.bias_grad
    return grad_q, grad_k, grad_v, grad_bias if bias is None else grad_bias.to(bias.dtype)


def _prepare(
    q: Tensor,
    k: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
    needs_bias_grad: bool = False,
) -> tuple[buckets.Plan, _Options]:
    check_offsets("jagged_flash_attention", q_offsets=(q_offsets, q.shape[0]), k_offsets=(k_offsets, k.shape[0]))
    join_pairs = buckets.JOIN_SCORES // q.shape[1] if bias is None else 0  # a padded bias would need a mask per row
    plan = buckets.plan(q_offsets, k_offsets, join_pairs, causal or window is not None)
    dtype = compute_dtype(q.dtype)
    if bias is None:
        return plan, _Options(scale, causal, window, dtype, None)
    longest = [int(side.lengths.max(initial=0)) for side in (plan.q, plan.k)]
    if bias.shape[1] < longest[0] or bias.shape[2] < longest[1]:
        raise ValueError(f"jagged_flash_attention: bias {list(bias.shape)} is short of the longest sequence {longest}")
    bias = bias.to(dtype)
    return plan, _Options(scale, causal, window, dtype, bias, torch.zeros_like(bias) if needs_bias_grad else None)


def _sorted_inputs(plan: buckets.Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [N, H, D] in sorted order and the compute dtype, k and v with q's heads."""
    dtype = compute_dtype(q.dtype)
    sorted_k, sorted_v = (expand_heads(plan.k.sort(x).to(dtype), q.shape[1]) for x in (k, v))
    return plan.q.sort(q).to(dtype), sorted_k, sorted_v


def _groups(
    plan: buckets.Plan, q_side: Sequence[Tensor], k_side: Sequence[Tensor]
) -> Iterator[tuple[buckets.Group, list[Tensor], list[Tensor]]]:
    """Each group with its views [batch, H, length, …] of sorted [N, H, …] tensors."""
    q_views = [[view.transpose(1, 2) for view in plan.q.split(x)] for x in q_side]
    k_views = [[view.transpose(1, 2) for view in plan.k.split(x)] for x in k_side]
    for i, group in enumerate(plan.groups):
        yield group, [views[i] for views in q_views], [views[i] for views in k_views]


def _calls(group: buckets.Group, options: _Options) -> Iterator[_Call]:
    """The dense calls that cover a group's visible pairs; none for rows that see no key."""
    len_q, len_k, causal, window = group.len_q, group.len_k, options.causal, options.window
    if len_q == 0 or len_k == 0:
        return
    if causal and window is None and options.bias is None and len_q >= len_k:
        # The kernel's own causal rule (top left) is ours for squares, and it skips the hidden blocks itself. No real
        # query sees a padded key: those come later than all of its own.
        yield _Call(len_q - len_k, len_q, 0, len_k, True, None)
        return
    scores_a_row = group.batch * len_k * (0 if options.bias is None else options.bias.shape[0])
    max_rows = max(1, BIAS_SCORES // scores_a_row) if options.bias_grad is not None else None
    for tile in tiles(len_q, len_k, causal, window, max_rows):
        hidden = _hidden(group, tile, causal, window)
        yield _Call(tile.row0, tile.row1, tile.key0, tile.key1, False, _added_mask(hidden, options, tile))


def _hidden(group: buckets.Group, tile: Tile, causal: bool, window: int | None) -> Tensor | None:
    """Where a tile's rows do not see its keys, by position or because a key is padding: bool, 2-D or 4-D, or None."""
    seen = tile_mask(tile, group.len_q, group.len_k, causal, window)
    padding = None if group.padding is None or causal else group.padding[..., tile.key0 : tile.key1]
    if seen is None or padding is None:
        return padding if seen is None else ~seen
    return padding | ~seen


def _added_mask(hidden: Tensor | None, options: _Options, tile: Tile) -> Tensor | None:
    """What is added to a tile's scores, 2-D or 4-D: the bias, and −inf where a key is hidden."""
    added = None
    if options.bias is not None:
        added = options.bias[None, :, tile.row0 : tile.row1, tile.key0 : tile.key1]
    if hidden is None:
        return added
    if added is None:
        return torch.zeros(hidden.shape, dtype=options.dtype).masked_fill_(hidden, -torch.inf)
    return added.masked_fill(hidden, -torch.inf)


def _call_backward(
    call: _Call, options: _Options, q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one call's q [n, H, rows, D] and k, v [n, H, keys, D]; adds its part of the bias' gradient."""
    if options.bias_grad is None:
        return _fused_backward(
            grad_output, q, k, v, output, lse, 0.0, call.is_causal, attn_mask=call.mask, scale=options.scale
        )
    scores = q @ k.mT * options.scale
    if call.mask is not None:
        scores += call.mask
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    delta = (grad_output * output).sum(-1, keepdim=True)
    grad_scores = (grad_output @ v.mT - delta).mul_(weights)
    options.bias_grad[:, call.row0 : call.row1, call.key0 : call.key1] += grad_scores.sum(0)
    scaled = grad_scores * options.scale
    return scaled @ k, scaled.mT @ q, weights.mT @ grad_output


def _rows(x: Tensor, call: _Call) -> Tensor:
    return x if x.shape[2] == call.row1 - call.row0 else x[:, :, call.row0 : call.row1]


def _keys(x: Tensor, call: _Call) -> Tensor:
    return x if x.shape[2] == call.key1 - call.key0 else x[:, :, call.key0 : call.key1]
