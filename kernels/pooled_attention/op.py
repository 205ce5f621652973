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
from gemctl.kernels.library import Differentiable, Op, once
from gemctl.kernels.pooled_attention import reference
from gemctl.kernels.tables import tile_tables
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
    scale = seeds.shape[2] ** -0.5 if scale is None else scale
    (count, heads, dim), batch = seeds.shape, k_offsets.shape[0] - 1
    held = count * heads // k.shape[1]
    schedule = tile_tables(OP, None, k_offsets, count * batch, k.shape[0], seeds.dtype, dim, size=held)
    output: Tensor = _forward(seeds, k, v, k_offsets, schedule, scale, dispatch.named())[0]
    return output


def _kernel(
    seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, schedule: list[Tensor], scale: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    kernel = dispatch.load(OP, seeds.device, seeds.dtype, seeds.shape[2], backend)
    output, lse = kernel.forward(seeds, k, v, k_offsets, schedule, scale)
    return output, lse


def _fake(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch = k_offsets.shape[0] - 1
    lse = seeds.new_empty(batch, *seeds.shape[:2], dtype=compute_dtype(seeds.dtype))
    return seeds.new_empty(batch, *seeds.shape), lse


class _PooledAttention(Differentiable):
    @staticmethod
    def forward(
        ctx: Any, seeds: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], run: Any
    ) -> tuple[Tensor, Tensor]:
        output, lse = run(seeds, k, v, *rest)
        k_offsets, schedule, *options = rest
        ctx.save_for_backward(output, lse, seeds, k, v, k_offsets, *schedule)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # no zeros for the LSE
        return output, lse

    @staticmethod
    @once
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(grad_output, *saved[:6], saved[6:], *ctx.options), None, None


_forward = Op(OP, _kernel, _fake, _PooledAttention, differentiable=3)


def _backward_kernel(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    seeds: Tensor,
    k: Tensor,
    v: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    scale: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = dispatch.load(OP, seeds.device, seeds.dtype, seeds.shape[2], backend)
    saved = grad_output, output, lse, seeds, k, v, k_offsets, schedule
    grads: tuple[Tensor, Tensor, Tensor] = kernel.backward(*saved, scale)
    return grads


def _backward_fake(
    grad_output: Tensor, output: Tensor, lse: Tensor, seeds: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return seeds.new_empty(seeds.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_backward = Op(f"{OP}_backward", _backward_kernel, _backward_fake)


@register_flop_formula(torch.ops.gemctl.pooled_attention, get_raw=True)
def _(seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, *rest: Any, out_val: Any = None) -> int:
    pairs = flops.pooled_pairs(seeds.shape[0], lengths(k_offsets))
    return flops.attention_forward(pairs, seeds.shape[1], seeds.shape[2])


@register_flop_formula(torch.ops.gemctl.pooled_attention_backward, get_raw=True)
def _(grad: Tensor, output: Tensor, lse: Tensor, seeds: Tensor, *rest: Any, out_val: Any = None) -> int:
    _, _, k_offsets, *_ = rest
    pairs = flops.pooled_pairs(seeds.shape[0], lengths(k_offsets))
    return flops.attention_backward(pairs, seeds.shape[1], seeds.shape[2])
