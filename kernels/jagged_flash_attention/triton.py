"""Softmax attention of jagged sequences in Triton, for any GPU: the kernels of gemctl/kernels/triton_attention.py.

Offsets' values are not checked (the host would have to wait for them); a bias too short for a sequence gives NaN there.
"""

from typing import Any

import torch
from torch import Tensor

from gemctl.kernels import schedule
from gemctl.kernels.triton_attention import (
    forward_kernel,
    grad_bias_kernel,
    grad_kv_kernel,
    grad_q_kernel,
)
from gemctl.kernels.triton_launch import block_dim, empty, launch, reach, rows, strides
from gemctl.kernels.triton_tilings import PRECISION, Part, tiling

LOG2_E = 1.4426950408889634


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
    """(output [ΣLq, H, D], LSE [ΣLq, H] in float32; −inf for a query that sees no key)."""
    return attend(q, k, v, q_offsets, k_offsets, scale, causal, window, bias)


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
    """Gradients of q, k, v and, where asked for, of the bias (else an empty tensor)."""
    return attend_backward(
        grad_output, output, lse, q, k, v, q_offsets, k_offsets, scale, causal, window, bias, needs_bias_grad
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
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
    behind, ahead = reach(causal, window)
    order = schedule.tiles(q_offsets, tokens, tile.own, k_offsets, behind, ahead)
    args = q, k, v, output, lse, *_bias(q, bias)[:1], order, q_offsets, k_offsets
    numbers = *strides(q, k, v), *_bias(q, bias)[1:], heads, heads // k.shape[1], scale * LOG2_E, 1.0, behind, ahead
    sizes = _sizes(q, causal, window, bias, broadcast) | {"BM": tile.own, "BN": tile.other}
    launch(forward_kernel, order.shape[0] * heads, tile, *args, *numbers, **sizes)
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
    behind, ahead = reach(causal, window)
    delta = empty(lse.shape, torch.float32, q.device)
    grad_q = empty(output.shape, torch.float32 if broadcast else q.dtype, q.device)
    grad_k, grad_v = (empty(x.shape, x.dtype, x.device) for x in (k, v))
    lines = strides(q, k, v, grad)
    saved, bias_numbers = (lse, delta), _bias(q, bias)
    common = _sizes(q, causal, window, bias, broadcast)

    tile = tiling(Part.GRAD_Q, "softmax", output, batch, bias is not None)
    order = schedule.tiles(q_offsets, output.shape[0], tile.own, k_offsets, behind, ahead)
    args = q, k, v, grad, output.contiguous(), *saved, grad_q, bias_numbers[0], order, q_offsets, k_offsets
    numbers = *lines, *bias_numbers[1:], heads, heads // key_heads, scale * LOG2_E, scale, behind, ahead
    sizes = common | {"BM": tile.own, "BN": tile.other}
    launch(grad_q_kernel, order.shape[0] * heads, tile, *args, *numbers, **sizes)

    tile = tiling(Part.GRAD_KV, "softmax", k, batch, bias is not None)
    order = schedule.tiles(k_offsets, k.shape[0], tile.own, q_offsets, ahead, behind)
    args = q, k, v, grad, *saved, grad_k, grad_v, bias_numbers[0], order, q_offsets, k_offsets
    numbers = *lines, *bias_numbers[1:], key_heads, heads // key_heads, scale * LOG2_E, scale, 1.0, behind, ahead
    sizes = common | {"BN": tile.own, "BM": tile.other}
    launch(grad_kv_kernel, order.shape[0] * key_heads, tile, *args, *numbers, **sizes)

    if sign != 1:
        grad_q *= sign
    if bias is None or not needs_bias_grad:
        return grad_q, grad_k, grad_v, q.new_empty(0)
    offsets = q_offsets, k_offsets
    return grad_q, grad_k, grad_v, _grad_bias((q, k, v, grad, *saved), offsets, lines, bias, scale, behind, ahead)


def _grad_bias(
    tensors: tuple[Tensor, ...],
    offsets: tuple[Tensor, Tensor],
    lines: tuple[int, ...],
    bias: Tensor,
    scale: float,
    behind: int,
    ahead: int,
) -> Tensor:
    q, k = tensors[:2]
    tile = tiling(Part.GRAD_BIAS, "softmax", q, 1, biased=True)
    grad_bias = empty(bias.shape, bias.dtype, bias.device)
    programs = bias.shape[0] * -(-bias.shape[1] // tile.own) * -(-bias.shape[2] // tile.other)
    batch, heads = offsets[0].shape[0] - 1, q.shape[1]
    args = *tensors, grad_bias, bias, *offsets, *lines, *_bias(q, bias)[1:], heads, heads // k.shape[1], batch
    sizes = _dims(q) | {"BM": tile.own, "BN": tile.other}
    launch(grad_bias_kernel, programs, tile, *args, scale * LOG2_E, behind, ahead, **sizes)
    return grad_bias


def _sign(scale: float) -> int:
    return (scale > 0) - (scale < 0)


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a scale above 0: the kernels scale the −inf of hidden keys and the peak of a row."""
    return (q, scale) if scale > 0 else (q * _sign(scale), abs(scale) or 1.0)


def _bias(q: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """The bias (any tensor in its place), its strides, its rows and keys."""
    return (q, 0, 0, 0, 0, 0) if bias is None else (bias, *bias.stride(), *bias.shape[1:])


def _dims(q: Tensor) -> dict[str, Any]:
    return {"D": q.shape[2], "BLOCK_D": block_dim(q.shape[2]), "PRECISION": PRECISION}


def _sizes(q: Tensor, causal: bool, window: int | None, bias: Tensor | None, broadcast: bool) -> dict[str, Any]:
    kind = {"KIND": "softmax", "FAST": False, "BIASED": bias is not None, "BROADCAST": broadcast}
    return kind | {"POSITIONAL": causal or window is not None} | _dims(q)
