"""GDPA of jagged sequences in Triton, for any GPU: the kernels of gemctl/kernels/triton_attention.py."""

from typing import Any

import torch
from torch import Tensor

from gemctl.kernels import schedule
from gemctl.kernels.gdpa.activation import Activation
from gemctl.kernels.jagged import every
from gemctl.kernels.triton_attention import forward_kernel, grad_kv_kernel, grad_q_kernel
from gemctl.kernels.triton_launch import block_dim, empty, has_hardware_tanh, launch, reach, rows, strides
from gemctl.kernels.triton_tilings import PRECISION, Part, tiling


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Output [ΣLq, H, D], or [B·S, H, D] where q_offsets is None and q [S, H, D] belongs to every row."""
    q, k, v = rows(q), rows(k), rows(v)
    (heads, dim), batch = q.shape[1:], k_offsets.shape[0] - 1
    offsets = every(q.shape[0], k_offsets) if q_offsets is None else q_offsets
    tokens = q.shape[0] * (batch if q_offsets is None else 1)
    output = empty((tokens, heads, dim), q.dtype, q.device)
    sizes, (behind, ahead) = _sizes(q, activation, causal, window, q_offsets is None), reach(causal, window)
    tile = tiling(Part.FORWARD, activation, output, batch)
    order = schedule.tiles(offsets, tokens, tile.own, k_offsets, behind, ahead)
    args = q, k, v, output, q, q, order, offsets, k_offsets, *strides(q, k, v), *[0] * 5
    numbers = heads, heads // k.shape[1], pre_scale, post_scale, behind, ahead
    launch(forward_kernel, order.shape[0] * heads, tile, *args, *numbers, **sizes, BM=tile.own, BN=tile.other)
    return output


def backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    q, k, v, grad = rows(q), rows(k), rows(v), rows(grad_output)
    heads, key_heads, batch = q.shape[1], k.shape[1], k_offsets.shape[0] - 1
    offsets = every(q.shape[0], k_offsets) if q_offsets is None else q_offsets
    # Shared queries get a part from every row; the parts are summed in float32.
    grad_q = empty(grad.shape, torch.float32 if q_offsets is None else q.dtype, q.device)
    grad_k, grad_v = (empty(x.shape, x.dtype, x.device) for x in (k, v))
    sizes, (behind, ahead) = _sizes(q, activation, causal, window, q_offsets is None), reach(causal, window)
    lines, both = (*strides(q, k, v, grad), *[0] * 5), pre_scale * post_scale

    tile = tiling(Part.GRAD_Q, activation, grad, batch)
    order = schedule.tiles(offsets, grad.shape[0], tile.own, k_offsets, behind, ahead)
    args = q, k, v, grad, q, q, q, grad_q, q, order, offsets, k_offsets, *lines
    numbers = heads, heads // key_heads, pre_scale, both, behind, ahead
    launch(grad_q_kernel, order.shape[0] * heads, tile, *args, *numbers, **sizes, BM=tile.own, BN=tile.other)

    tile = tiling(Part.GRAD_KV, activation, k, batch)
    order = schedule.tiles(k_offsets, k.shape[0], tile.own, offsets, ahead, behind)
    args = q, k, v, grad, q, q, grad_k, grad_v, q, order, offsets, k_offsets, *lines
    of_keys = key_heads, heads // key_heads, pre_scale, both, post_scale, behind, ahead
    launch(grad_kv_kernel, order.shape[0] * key_heads, tile, *args, *of_keys, **sizes, BN=tile.own, BM=tile.other)
    if q_offsets is None:
        grad_q = grad_q.view(batch, *q.shape).sum(0).to(q.dtype)
    return grad_q, grad_k, grad_v


def _sizes(q: Tensor, activation: str, causal: bool, window: int | None, broadcast: bool) -> dict[str, Any]:
    fast = activation == Activation.FAST_GELU and q.dtype.itemsize == 2 and has_hardware_tanh()
    kind = {"KIND": str(activation), "FAST": fast, "POSITIONAL": causal or window is not None, "BIASED": False}
    dims = {"D": q.shape[2], "BLOCK_D": block_dim(q.shape[2]), "PRECISION": PRECISION}
    return kind | {"BROADCAST": broadcast} | dims
