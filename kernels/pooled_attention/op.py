"""`pooled_attention`: shared seeds attend over each jagged sequence (PMA, HSP), as a torch.library op.

A summary of fixed size from a history of any length, learned seeds as queries.

    import torch
    from gemctl.kernels.pooled_attention.op import pooled_attention
    offsets = torch.tensor([0, 3, 3, 8])
    seeds, k = torch.randn(4, 2, 16, requires_grad=True), torch.randn(8, 2, 16)
    pooled_attention(seeds, k, k, offsets, 5).shape  # [3, 4, 2, 16]; row 1 is empty, so zeros
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gemctl.kernels import dispatch
from gemctl.kernels.jagged import check, compute_dtype, lengths
from gemctl.kernels.pooled_attention import reference
from gemctl.specs import flops

OP = "pooled_attention"


def pooled_attention(
    seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, max_k: int, *, scale: float | None = None
) -> Tensor:
    """softmax(scale · Seeds Kᵀ) V over each row's keys; a row without keys gives 0 and zero gradients.

    seeds [S, H, D], shared by all rows; k, v [ΣLk, Hkv, D], where Hkv divides H (seed head h uses key head
    h // (H/Hkv)); any strides, one floating dtype. k_offsets contiguous int64 [B+1]: row b owns keys
    k_offsets[b] … k_offsets[b+1]−1. max_k: longest length, a hint for launch sizes that never changes the result.
    scale: default 1/√D.

    Returns [B, S, H, D], dtype of seeds. Differentiable once in seeds, k and v; a second derivative and forward-mode
    differentiation raise. ValueError lists every violated condition.
    """
    check(OP, seeds, k, v, {"k_offsets": k_offsets}, query="seeds")
    if dispatch.named() == dispatch.REFERENCE:
        return reference.pooled_attention(seeds, k, v, k_offsets, max_k, scale=scale)
    scale = seeds.shape[-1] ** -0.5 if scale is None else scale
    return _forward(seeds, k, v, k_offsets, max_k, scale, dispatch.named())[0]


@torch.library.custom_op("gemctl::pooled_attention", mutates_args=())
def _forward(
    seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, max_k: int, scale: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    return dispatch.load(OP, seeds, backend).forward(seeds, k, v, k_offsets, max_k, scale)


@torch.library.custom_op("gemctl::pooled_attention_backward", mutates_args=())
def _backward(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    seeds: Tensor,
    k: Tensor,
    v: Tensor,
    k_offsets: Tensor,
    max_k: int,
    scale: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = dispatch.load(OP, seeds, backend)
    return kernel.backward(grad_output, output, lse, seeds, k, v, k_offsets, max_k, scale)


@_forward.register_fake
def _(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch = k_offsets.shape[0] - 1
    lse = seeds.new_empty(batch, *seeds.shape[:2], dtype=compute_dtype(seeds.dtype))
    return seeds.new_empty(batch, *seeds.shape), lse


@_backward.register_fake
def _(grad_output: Tensor, output: Tensor, lse: Tensor, seeds: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return seeds.new_empty(seeds.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.options = inputs[4:]
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    seeds, k, v, k_offsets, output, lse = ctx.saved_tensors
    return *_backward(grad_output, output, lse, seeds, k, v, k_offsets, *ctx.options), *[None] * 4


_forward.register_autograd(_autograd, setup_context=_setup_context)


@register_flop_formula(torch.ops.gemctl.pooled_attention, get_raw=True)
def _(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *rest: Any, out_val: Any = None) -> int:
    pairs = flops.pooled_pairs(seeds.shape[0], lengths(k_offsets))
    return flops.attention_forward(pairs, seeds.shape[1], seeds.shape[2])


@register_flop_formula(torch.ops.gemctl.pooled_attention_backward, get_raw=True)
def _(grad: Tensor, output: Tensor, lse: Tensor, seeds: Tensor, *rest: Any, out_val: Any = None) -> int:
    _, _, k_offsets, *_ = rest
    pairs = flops.pooled_pairs(seeds.shape[0], lengths(k_offsets))
    return flops.attention_backward(pairs, seeds.shape[1], seeds.shape[2])
