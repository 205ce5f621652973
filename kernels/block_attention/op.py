"""`block_attention`: softmax attention within blocks of jagged sequences, as a torch.library op.

Memory-bound on GPUs; a block's queries need one block of keys, so nothing is kept between blocks.

    import torch
    from gemctl.kernels.block_attention.op import block_attention
    offsets = torch.tensor([0, 100, 100, 130])
    q = torch.randn(130, 2, 16, requires_grad=True)
    block_attention(q, q, q, offsets, 100).sum().backward()  # blocks of 64 and 36, and of 30 tokens
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gemctl.kernels import dispatch
from gemctl.kernels.block_attention import reference
from gemctl.kernels.jagged import check, compute_dtype, lengths
from gemctl.kernels.library import Differentiable, Op, once
from gemctl.kernels.tables import tile_tables
from gemctl.specs import flops

OP = "block_attention"


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    block_size: int = 64,
    scale: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """softmax(scale · QKᵀ) V within blocks of `block_size` tokens, counted from each sequence's start.

    q [ΣL, H, D]; k, v [ΣL, Hkv, D], where Hkv divides H (query head h uses key head h // (H/Hkv)); any strides, one
    floating dtype. offsets contiguous int64 [B+1]: row b owns tokens offsets[b] … offsets[b+1]−1. max_length: longest
    length, a hint for launch sizes that never changes the result. scale: default 1/√D. cos, sin [≥ longest, D/2], both
    or neither, constants: rotary embedding of interleaved pairs, applied to q, k and also v (as GEM's kernel does) by
    position in the sequence.

    Returns [ΣL, H, D], dtype of q. Differentiable once in q, k and v; a second derivative and forward-mode
    differentiation raise. ValueError lists every violated condition.
    """
    check(OP, q, k, v, {"offsets": offsets}, more=_problems(q, k, block_size, cos, sin))
    if dispatch.named() == dispatch.REFERENCE:
        return reference.block_attention(
            q, k, v, offsets, max_length, block_size=block_size, scale=scale, cos=cos, sin=sin
        )
    scale = q.shape[2] ** -0.5 if scale is None else scale
    schedule = tile_tables(OP, None, offsets, q.shape[0], k.shape[0], q.dtype, q.shape[2], size=block_size)
    output: Tensor = _forward(q, k, v, offsets, schedule, block_size, scale, cos, sin, dispatch.named())[0]
    return output


def _problems(q: Tensor, k: Tensor, block_size: int, cos: Tensor | None, sin: Tensor | None) -> list[str]:
    problems = []
    if q.dim() != 3 or k.dim() != 3:
        return []  # what `check` says by itself
    if q.shape[0] != k.shape[0]:
        problems.append(f"q has {q.shape[0]} tokens, k {k.shape[0]}")
    if block_size < 1:
        problems.append(f"block_size must be ≥ 1, not {block_size}")
    if (cos is None) != (sin is None):
        problems.append("cos and sin come together or not at all")
    for name, table in {"cos": cos, "sin": sin}.items():
        if table is None:
            continue
        if table.dim() != 2 or 2 * table.shape[1] != q.shape[-1] or table.device != q.device:
            want = f"[≥ longest, {q.shape[-1]} / 2] on {q.device}"
            problems.append(f"{name} must be {want}, not {list(table.shape)} on {table.device}")
        if table.requires_grad:
            problems.append(f"{name} requires a gradient, which the op does not give")
    return problems


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    schedule: list[Tensor],
    block_size: int,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    kernel = dispatch.load(OP, q.device, q.dtype, q.shape[2], backend)
    output, lse = kernel.forward(q, k, v, offsets, schedule, block_size, scale, cos, sin)
    return output, lse


def _fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=compute_dtype(q.dtype))


class _BlockAttention(Differentiable):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], run: Any) -> tuple[Tensor, Tensor]:
        output, lse = run(q, k, v, *rest)
        offsets, schedule, *options, cos, sin, backend = rest
        ctx.save_for_backward(output, lse, q, k, v, offsets, cos, sin, *schedule)
        ctx.options, ctx.backend = options, backend
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # no zeros for the LSE
        return output, lse

    @staticmethod
    @once
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, cos, sin = saved[:8]
        return *_backward(grad_output, *tensors, saved[8:], *ctx.options, cos, sin, ctx.backend), None, None


_forward = Op(OP, _kernel, _fake, _BlockAttention, differentiable=3)


def _backward_kernel(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    schedule: list[Tensor],
    block_size: int,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = dispatch.load(OP, q.device, q.dtype, q.shape[2], backend)
    saved = grad_output, output, lse, q, k, v, offsets, schedule
    grads: tuple[Tensor, Tensor, Tensor] = kernel.backward(*saved, block_size, scale, cos, sin)
    return grads


def _backward_fake(
    grad_output: Tensor, output: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_backward = Op(f"{OP}_backward", _backward_kernel, _backward_fake)


@register_flop_formula(torch.ops.gemctl.block_attention, get_raw=True)
def _(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *rest: Any, out_val: Any = None) -> int:
    pairs = flops.block_pairs(lengths(offsets), rest[1])
    return flops.attention_forward(pairs, q.shape[1], q.shape[2])


@register_flop_formula(torch.ops.gemctl.block_attention_backward, get_raw=True)
def _(grad: Tensor, output: Tensor, lse: Tensor, q: Tensor, *rest: Any, out_val: Any = None) -> int:
    _, _, offsets, _, block_size, *_ = rest
    pairs = flops.block_pairs(lengths(offsets), block_size)
    return flops.attention_backward(pairs, q.shape[1], q.shape[2])
