"""Softmax attention of jagged sequences on CPU: PyTorch's fused attention on groups of equal lengths.

Each group is one dense call (gemctl/kernels/buckets.py); windows and causal rectangles are cut into row tiles
(gemctl/kernels/visibility.py), so only visible pairs and a bounded rest are computed. bfloat16 and float16 inputs are
computed in float32. All loops and sums have one fixed order: two runs are equal bit for bit.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gemctl.kernels import buckets
from gemctl.kernels.fused import fused, fused_backward, gather, scatter
from gemctl.kernels.jagged import check_offsets, compute_dtype
from gemctl.kernels.visibility import Tile, tile_hidden, tiles

_Three = tuple[Tensor, Tensor, Tensor]

BIAS_SCORES = 1 << 21  # scores at once where the bias' gradient needs them written out


@dataclass(frozen=True)
class _Options:
    scale: float
    causal: bool
    window: int | None
    dtype: torch.dtype  # of the computation
    heads: int
    bias: Tensor | None  # [H, ≥ longest Lq, ≥ longest Lk] in the compute dtype
    bias_grad: Tensor | None = None  # where its gradient is summed


class _Call(NamedTuple):
    """One dense call: rows row0 … row1−1 against keys key0 … key1−1 of a group's sequences."""

    row0: int
    row1: int
    key0: int
    key1: int
    is_causal: bool
    mask: Tensor | None  # added to the scores, 2-D or 4-D

    def covers(self, group: buckets.Group) -> bool:
        """True where this one call is all there is."""
        return (self.row0, self.row1, self.key0, self.key1) == (0, group.len_q, 0, group.len_k)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(output like q, LSE [ΣLq, H] in float32, for float64 inputs float64; −inf where a query sees no key)."""
    plan, options = _prepare(q, k, q_offsets, k_offsets, scale, causal, window, bias)
    output, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=options.dtype)
    for group, q_part, k_part in zip(plan.groups, plan.q.parts(), plan.k.parts(), strict=True):
        inputs = (gather(x, part, options.heads, options.dtype) for x, part in ((q, q_part), (k, k_part), (v, k_part)))
        group_output, group_lse = _group_forward(group, options, *inputs)
        scatter(output, q_part, group_output)
        scatter(lse, q_part, group_lse)
    return output, lse


def backward(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
    needs_bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and bias (the last is empty unless `needs_bias_grad`)."""
    plan, options = _prepare(q, k, q_offsets, k_offsets, scale, causal, window, bias, needs_bias_grad)
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    for group, q_part, k_part in zip(plan.groups, plan.q.parts(), plan.k.parts(), strict=True):
        inputs = [gather(x, part, options.heads, options.dtype) for x, part in ((q, q_part), (k, k_part), (v, k_part))]
        # A padded query adds nothing to any gradient: its own is zero, and so is exp(score − inf), its weight. With the
        # LSE of another row, which may see fewer keys or none, the weight could be infinite.
        saved = tuple(
            gather(x, q_part, options.heads, options.dtype, fill)
            for x, fill in ((grad_output, 0), (output, None), (lse, torch.inf))
        )
        grads = _group_backward(group, options, (inputs[0], inputs[1], inputs[2]), (saved[0], saved[1], saved[2]))
        for x, part, group_grad in zip((grad_q, grad_k, grad_v), (q_part, k_part, k_part), grads, strict=True):
            scatter(x, part, group_grad)
    if bias is None or options.bias_grad is None:
        return grad_q, grad_k, grad_v, q.new_empty(0)
    return grad_q, grad_k, grad_v, options.bias_grad.to(bias.dtype)


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
        return plan, _Options(scale, causal, window, dtype, q.shape[1], None)
    longest = [plan.q.longest(), plan.k.longest()]
    if bias.shape[1] < longest[0] or bias.shape[2] < longest[1]:
        raise ValueError(f"jagged_flash_attention: bias {list(bias.shape)} is short of the longest sequence, {longest}")
    bias = bias.to(dtype)
    return plan, _Options(
        scale, causal, window, dtype, q.shape[1], bias, bias.new_zeros(bias.shape) if needs_bias_grad else None
    )


def _group_forward(group: buckets.Group, options: _Options, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [batch, H, len_q, D] and LSE [batch, H, len_q] of dense q, k, v."""
    calls = _calls(group, options)
    if len(calls) == 1 and calls[0].covers(group):
        return _call_forward(calls[0], options, q, k, v)
    output, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    for call in calls:
        found = _call_forward(call, options, _rows(q, call), _keys(k, call), _keys(v, call))
        _rows(output, call).copy_(found[0])
        _rows(lse, call).copy_(found[1])
    return output, lse


def _group_backward(group: buckets.Group, options: _Options, inputs: _Three, saved: _Three) -> _Three:
    """Gradients of dense inputs q, k, v; saved: gradient of the output, output, LSE."""
    (q, k, v), (grad_output, output, lse) = inputs, saved
    calls = _calls(group, options)
    if len(calls) == 1 and calls[0].covers(group):
        return _call_backward(calls[0], options, *inputs, *saved)
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for call in calls:
        found = _call_backward(
            call,
            options,
            *(_rows(q, call), _keys(k, call), _keys(v, call)),
            *(_rows(grad_output, call), _rows(output, call), _rows(lse, call)),
        )
        _rows(grads[0], call).copy_(found[0])
        _keys(grads[1], call).add_(found[1])
        _keys(grads[2], call).add_(found[2])
    return grads


def _calls(group: buckets.Group, options: _Options) -> list[_Call]:
    """The dense calls that cover a group's visible pairs; none for rows that see no key."""
    len_q, len_k, causal, window = group.len_q, group.len_k, options.causal, options.window
    if len_q == 0 or len_k == 0:
        return []
    if causal and window is None and options.bias is None and len_q >= len_k and options.scale > 0:
        # The kernel's own causal rule (top left) is ours for squares, and it skips the hidden blocks itself. No real
        # query sees a padded key: those come later than all of its own. (It scales its −inf of hidden keys, too.)
        return [_Call(len_q - len_k, len_q, 0, len_k, True, None)]
    matrices = group.batch * options.heads
    max_rows = None if options.bias_grad is None else max(1, BIAS_SCORES // (matrices * len_k))
    return [
        _Call(tile.row0, tile.row1, tile.key0, tile.key1, False, _mask(group, tile, options))
        for tile in tiles(len_q, len_k, causal, window, matrices, max_rows)
    ]


def _mask(group: buckets.Group, tile: Tile, options: _Options) -> Tensor | None:
    """What is added to a tile's scores, 2-D or 4-D: the bias, −inf where a key is hidden or padding."""
    hidden = tile_hidden(tile, group.len_q, group.len_k, options.causal, options.window, added=True)
    mask = None if hidden is None else hidden.to(options.dtype)
    if group.padding is not None and tile.key1 > group.shortest_k and not options.causal:
        padding = group.padding[..., tile.key0 : tile.key1].to(options.dtype)
        mask = padding if mask is None else mask + padding
    if options.bias is not None:
        bias = options.bias[None, :, tile.row0 : tile.row1, tile.key0 : tile.key1]
        mask = bias if mask is None else mask + bias
    return mask


def _call_forward(call: _Call, options: _Options, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of one call's q [batch, H, rows, D] and k, v [batch, H, keys, D]."""
    return fused(q, k, v, 0.0, call.is_causal, attn_mask=call.mask, scale=options.scale)


def _call_backward(
    call: _Call, options: _Options, q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one call's q, k, v; adds its part of the bias' gradient."""
    if options.bias_grad is None:
        return fused_backward(
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
