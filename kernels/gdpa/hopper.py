"""GDPA of jagged sequences on Hopper: the kernels of gemctl/kernels/hopper."""

import torch
from torch import Tensor

from gemctl.kernels.hopper import host
from gemctl.kernels.tables import Table


def tables(
    dtype: torch.dtype, device: torch.device, size: int, causal: bool, window: int | None, biased: bool
) -> tuple[Table, ...]:
    """Those of the tiles of queries and of keys."""
    return host.tables(causal, window)


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
    offsets, options = _offsets(q_offsets, schedule), (activation, pre_scale, post_scale, causal, window)
    return host.forward(q, k, v, offsets, k_offsets, schedule, *options, q_offsets is None)[0]


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
    offsets, options = _offsets(q_offsets, schedule), (activation, pre_scale, post_scale, causal, window)
    return host.backward(grad_output, None, None, q, k, v, offsets, k_offsets, schedule, *options, q_offsets is None)


def _offsets(q_offsets: Tensor | None, schedule: list[Tensor]) -> Tensor:
    """Those of the queries; of shared ones they come with the schedule."""
    return schedule[-1] if q_offsets is None else q_offsets
