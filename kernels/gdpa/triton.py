"""GDPA of jagged sequences in Triton, for any GPU: the kernels of gemctl/kernels/triton_attention.py."""

import torch
from torch import Tensor

from gemctl.kernels.gdpa.activation import Activation
from gemctl.kernels.tables import Table, slots
from gemctl.kernels.triton_attention import forward_kernel, grad_kv_kernel, grad_q_kernel
from gemctl.kernels.triton_launch import block_dim, empty, has_hardware_tanh, launch, reach, rows, strides
from gemctl.kernels.triton_tilings import PRECISION, Part, Sizes, attention_tables, tiling

_NO_BIAS = (0, 0, 0, 0, 0)  # its strides, rows and keys; some tensor stands in for it, for the LSE and for DELTA


def tables(
    dtype: torch.dtype, device: torch.device, size: int, causal: bool, window: int | None, biased: bool
) -> tuple[Table, ...]:
    """Those of the forward and of the gradients of q and of k and v."""
    return attention_tables("activation", dtype, device, causal, window)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    schedule: list[Tensor],
    activation: str,
    pre_scale: float,
    post_scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Output [ΣLq, H, D], or [B·S, H, D] where q_offsets is None and q [S, H, D] belongs to every row."""
    q, k, v = rows(q), rows(k), rows(v)
    (heads, dim), batch = q.shape[1:], k_offsets.shape[0] - 1
    tokens = q.shape[0] * (batch if q_offsets is None else 1)
    output = empty((tokens, heads, dim), q.dtype, q.device)
    tile = tiling(Part.FORWARD, activation, output, batch)
    offsets = schedule[3] if q_offsets is None else q_offsets
    tensors = q, k, v, output, q, q, schedule[0], offsets, k_offsets
    factors = heads, heads // k.shape[1], pre_scale, post_scale, *reach(causal, window)
    constants = *_sizes(q, activation, causal, window, q_offsets is None), tile.own, tile.other, PRECISION
    programs = slots(tokens, tile.own, batch) * heads
    launch(forward_kernel, programs, tile, tensors, (*strides(q, k, v), *_NO_BIAS, *factors), constants)
    return output


def backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    schedule: list[Tensor],
    activation: str,
    pre_scale: float,
    post_scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    q, k, v, grad = rows(q), rows(k), rows(v), rows(grad_output)
    heads, key_heads, batch = q.shape[1], k.shape[1], k_offsets.shape[0] - 1
    offsets = schedule[3] if q_offsets is None else q_offsets
    # Shared queries get a part from every row; the parts are summed in float32.
    grad_q = empty(grad.shape, torch.float32 if q_offsets is None else q.dtype, q.device)
    grad_k, grad_v = (empty(x.shape, x.dtype, x.device) for x in (k, v))
    sizes, reaches = _sizes(q, activation, causal, window, q_offsets is None), reach(causal, window)
    lines, both = (*strides(q, k, v, grad), *_NO_BIAS), pre_scale * post_scale

    tile = tiling(Part.GRAD_Q, activation, grad, batch)
    tensors = q, k, v, grad, q, q, q, grad_q, q, schedule[1], offsets, k_offsets
    numbers = *lines, heads, heads // key_heads, pre_scale, both, *reaches
    programs = slots(grad.shape[0], tile.own, batch) * heads
    launch(grad_q_kernel, programs, tile, tensors, numbers, (*sizes, tile.own, tile.other, PRECISION))

    tile = tiling(Part.GRAD_KV, activation, k, batch)
    tensors = q, k, v, grad, q, q, grad_k, grad_v, q, schedule[2], offsets, k_offsets
    numbers = *lines, key_heads, heads // key_heads, pre_scale, both, post_scale, *reaches
    programs = slots(k.shape[0], tile.own, batch) * key_heads
    launch(grad_kv_kernel, programs, tile, tensors, numbers, (*sizes, tile.other, tile.own, PRECISION))
    if q_offsets is None:
        grad_q = grad_q.view(batch, *q.shape).sum(0).to(q.dtype)
    return grad_q, grad_k, grad_v


def _sizes(q: Tensor, activation: str, causal: bool, window: int | None, broadcast: bool) -> Sizes:
    fast = activation == Activation.FAST_GELU and q.dtype.itemsize == 2 and has_hardware_tanh()
    dim, positional = q.shape[2], causal or window is not None
    return Sizes(str(activation), fast, positional, broadcast, False, dim, block_dim(dim))
