"""Softmax attention of jagged sequences on Hopper: the kernels of gemctl/kernels/hopper; with a bias, "triton"."""

from types import ModuleType

import torch
from torch import Tensor

from gemctl.errors import InputError
from gemctl.kernels import dispatch
from gemctl.kernels.hopper import host
from gemctl.kernels.tables import Table
from gemctl.kernels.triton_tilings import attention_tables

OP = "jagged_flash_attention"


def tables(
    dtype: torch.dtype, device: torch.device, size: int, causal: bool, window: int | None, biased: bool
) -> tuple[Table, ...]:
    """Those of the tiles of queries and of keys; with a bias those of the backend "triton"."""
    if biased:
        return attention_tables("softmax", dtype, device, causal, window, biased)
    return host.tables(causal, window)


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
    if bias is not None:
        options = scale, causal, window, bias
        found: tuple[Tensor, Tensor] = _portable(q).forward(q, k, v, q_offsets, k_offsets, schedule, *options)
        return found
    output, lse = host.forward(q, k, v, q_offsets, k_offsets, schedule, "softmax", scale, 1.0, causal, window)
    assert lse is not None
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
    """Gradients of q, k, v and, where asked for, of the bias (else an empty tensor)."""
    tensors = grad_output, output, lse, q, k, v, q_offsets, k_offsets
    if bias is not None:
        options = scale, causal, window, bias, needs_bias_grad
        grads: tuple[Tensor, Tensor, Tensor, Tensor] = _portable(q).backward(*tensors, schedule, *options)
        return grads
    return *host.backward(*tensors, schedule, "softmax", scale, 1.0, causal, window), q.new_empty(0)


def _portable(q: Tensor) -> ModuleType:
    """The backend "triton", for a bias; InputError where `dispatch.use` names "hopper"."""
    if dispatch.named() == "hopper":
        raise InputError(f"the backend hopper can't run this call of {OP}: it has a bias")
    return dispatch.load(OP, q.device, q.dtype, q.shape[2], "triton")
