"""Softmax attention of jagged sequences in Triton, for any GPU: the kernels of gemctl/kernels/triton_attention.py.

Offsets' values are not checked (the host would have to wait for them); a bias too short for a sequence gives NaN there.
"""

from typing import Any

import torch
from torch import Tensor

from gemctl.kernels.tables import Table, slots
from gemctl.kernels.triton_attention import forward_kernel, grad_bias_kernel, grad_kv_kernel, grad_q_kernel
from gemctl.kernels.triton_launch import FAR_ROWS, block_dim, empty, launch, reach, rows, strides
from gemctl.kernels.triton_tilings import PRECISION, Part, Sizes, attention_tables, tiling

LOG2_E = 1.4426950408889634


def tables(
    dtype: torch.dtype, device: torch.device, size: int, causal: bool, window: int | None, biased: bool
) -> tuple[Table, ...]:
    """Those of the forward and of the gradients of q and of k and v."""
    return attention_tables("softmax", dtype, device, causal, window, biased)


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
    """(output [ΣLq, H, D], LSE [ΣLq, H] in float32; −inf for a query that sees no key)."""
    return attend(q, k, v, q_offsets, k_offsets, schedule, scale, causal, window, bias)


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
    """Gradients of q, k, v and, where asked for, of the bias (else an empty tensor)."""
    return attend_backward(
        grad_output, output, lse, q, k, v, q_offsets, k_offsets, schedule, scale, causal, window, bias, needs_bias_grad
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    scale: float,
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
    broadcast: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `forward`; with `broadcast` q [S, H, D] is every sequence's (q_offsets: multiples of S)."""
    q, scale = _positive(q, scale)
    q, k, v = rows(q), rows(k), rows(v)
    (heads, dim), batch = q.shape[1:], q_offsets.shape[0] - 1
    tokens = q.shape[0] * (batch if broadcast else 1)
    output = empty((tokens, heads, dim), q.dtype, q.device)
    lse = empty((tokens, heads), torch.float32, q.device)
    tile = tiling(Part.FORWARD, "softmax", output, batch, bias is not None)
    added, *bias_numbers = _bias(q, bias)
    tensors = q, k, v, output, lse, added, schedule[0], q_offsets, k_offsets
    factors = heads, heads // k.shape[1], scale * LOG2_E, 1.0, *reach(causal, window)
    constants = *_sizes(q, causal, window, bias, broadcast), tile.own, tile.other, PRECISION
    programs = slots(tokens, tile.own, batch) * heads
    launch(forward_kernel, programs, tile, tensors, (*strides(q, k, v), *bias_numbers, *factors), constants)
    return output, lse


def attend_backward(
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
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
    needs_bias_grad: bool = False,
    broadcast: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `backward`; with `broadcast` the first is each sequence's part in float32, [B·S, H, D]."""
    sign = _sign(scale)
    q, scale = _positive(q, scale)
    q, k, v, grad = rows(q), rows(k), rows(v), rows(grad_output)
    heads, key_heads, batch = q.shape[1], k.shape[1], q_offsets.shape[0] - 1
    delta = empty(lse.shape, torch.float32, q.device)
    grad_q = empty(output.shape, torch.float32 if broadcast else q.dtype, q.device)
    grad_k, grad_v = (empty(x.shape, x.dtype, x.device) for x in (k, v))
    added, *bias_numbers = _bias(q, bias)
    lines, reaches = (*strides(q, k, v, grad), *bias_numbers), reach(causal, window)
    sizes = _sizes(q, causal, window, bias, broadcast)

    tile = tiling(Part.GRAD_Q, "softmax", output, batch, bias is not None)
    tensors = q, k, v, grad, output.contiguous(), lse, delta, grad_q, added, schedule[1], q_offsets, k_offsets
    numbers = *lines, heads, heads // key_heads, scale * LOG2_E, scale, *reaches
    programs = slots(output.shape[0], tile.own, batch) * heads
    launch(grad_q_kernel, programs, tile, tensors, numbers, (*sizes, tile.own, tile.other, PRECISION))

    tile = tiling(Part.GRAD_KV, "softmax", k, batch, bias is not None)
    tensors = q, k, v, grad, lse, delta, grad_k, grad_v, added, schedule[2], q_offsets, k_offsets
    numbers = *lines, key_heads, heads // key_heads, scale * LOG2_E, scale, 1.0, *reaches
    programs = slots(k.shape[0], tile.own, batch) * key_heads
    launch(grad_kv_kernel, programs, tile, tensors, numbers, (*sizes, tile.other, tile.own, PRECISION))

    if sign != 1:
        grad_q *= sign
    if bias is None or not needs_bias_grad:
        return grad_q, grad_k, grad_v, q.new_empty(0)
    saved = q, k, v, grad, lse, delta
    return grad_q, grad_k, grad_v, _grad_bias(saved, q_offsets, k_offsets, lines, bias, scale, reaches)


def _grad_bias(
    tensors: tuple[Tensor, ...],
    q_offsets: Tensor,
    k_offsets: Tensor,
    lines: tuple[int, ...],
    bias: Tensor,
    scale: float,
    reaches: tuple[int, int],
) -> Tensor:
    q, k = tensors[:2]
    tile = tiling(Part.GRAD_BIAS, "softmax", q, 1, biased=True)
    grad_bias = empty(bias.shape, bias.dtype, bias.device)
    programs = bias.shape[0] * -(-bias.shape[1] // tile.own) * -(-bias.shape[2] // tile.other)
    tensors = *tensors, grad_bias, _bias(q, bias)[0], q_offsets, k_offsets
    numbers = *lines, q.shape[1], q.shape[1] // k.shape[1], scale * LOG2_E, *reaches
    constants = q.shape[2], block_dim(q.shape[2]), tile.own, tile.other, PRECISION
    launch(grad_bias_kernel, programs, tile, tensors, numbers, constants, (q_offsets.shape[0] - 1,))
    return grad_bias


def _sign(scale: float) -> int:
    return (scale > 0) - (scale < 0)


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a scale above 0: the kernels scale the −inf of hidden keys and the peak of a row."""
    return (q, scale) if scale > 0 else (q * _sign(scale), abs(scale) or 1.0)


def _bias(q: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """The bias (any tensor in its place), its strides, its rows and keys."""
    if bias is None:
        return q, 0, 0, 0, 0, 0
    bias = bias if max(bias.stride()[1:]) < FAR_ROWS else bias.contiguous()
    return bias, *bias.stride(), *bias.shape[1:]


def _sizes(q: Tensor, causal: bool, window: int | None, bias: Tensor | None, broadcast: bool) -> Sizes:
    dim, positional = q.shape[2], causal or window is not None
    return Sizes("softmax", False, positional, broadcast, bias is not None, dim, block_dim(dim))
