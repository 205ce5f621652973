"""`jagged_flash_attention`: softmax attention of jagged sequences, as a torch.library op.

For events over their own history (full, causal or windowed) and for other queries over it.

    import torch
    from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
    offsets = torch.tensor([0, 3, 3, 8])  # three sequences of 3, 0 and 5 tokens
    q = torch.randn(8, 2, 16, requires_grad=True)
    jagged_flash_attention(q, q, q, offsets, offsets, 5, 5, causal=True).sum().backward()
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gemctl.kernels import dispatch
from gemctl.kernels.jagged import check, compute_dtype, lengths
from gemctl.kernels.jagged_flash_attention import reference
from gemctl.kernels.library import Differentiable, Op, once
from gemctl.kernels.tables import tile_tables
from gemctl.specs import flops

OP = "jagged_flash_attention"


def jagged_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(scale · QKᵀ + bias) V within each sequence; a query that sees no key gives 0 and zero gradients, as does
    one all of whose keys a bias of −inf hides.

    q [ΣLq, H, D]; k, v [ΣLk, Hkv, D], where Hkv divides H (query head h uses key head h // (H/Hkv)); any strides, one
    floating dtype. q_offsets, k_offsets contiguous int64 [B+1]: row b owns tokens offsets[b] … offsets[b+1]−1. max_q,
    max_k: longest lengths, a hint for launch sizes that never changes the result. scale: default 1/√D. causal, window:
    query i stands at key position i + Lk − Lq (gemctl/kernels/visibility.py). bias [H, ≥ longest Lq, ≥ longest Lk]:
    added to the scaled score of query i and key j, shared by the batch.

    Returns [ΣLq, H, D], dtype of q. Differentiable once in q, k, v and bias; a second derivative and forward-mode
    differentiation raise. ValueError lists every violated condition; candidates that share one row's keys are one
    longer query sequence (offsets by row, not by candidate).
    """
    check(OP, q, k, v, {"q_offsets": q_offsets, "k_offsets": k_offsets}, window, _bias_problems(q, bias))
    if dispatch.named() == dispatch.REFERENCE:
        return reference.jagged_flash_attention(
            q, k, v, q_offsets, k_offsets, max_q, max_k, scale=scale, causal=causal, window=window, bias=bias
        )
    scale = q.shape[2] ** -0.5 if scale is None else scale
    sizes = q.shape[0], k.shape[0], q.dtype, q.shape[2]
    biased = bias is not None
    schedule = tile_tables(OP, q_offsets, k_offsets, *sizes, causal=causal, window=window, biased=biased)
    rest = q_offsets, k_offsets, schedule, scale, causal, window, dispatch.named()
    output: Tensor = _forward(q, k, v, bias, *rest)[0]
    return output


def _bias_problems(q: Tensor, bias: Tensor | None) -> list[str]:
    if bias is None or q.dim() != 3:
        return []
    problems = []
    if bias.dim() != 3 or bias.shape[0] != q.shape[1] or bias.device != q.device:
        want = f"[{q.shape[1]} heads, queries, keys] on {q.device}"
        problems.append(f"bias must be {want}, not {list(bias.shape)} on {bias.device}")
    if not bias.is_floating_point():
        problems.append(f"bias must be floating, as it is added to the scores, not {bias.dtype}")
    return problems


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    q_offsets: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    scale: float,
    causal: bool,
    window: int | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    kernel = dispatch.load(OP, q.device, q.dtype, q.shape[2], backend)
    output, lse = kernel.forward(q, k, v, q_offsets, k_offsets, schedule, scale, causal, window, bias)
    return output, lse


def _fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=compute_dtype(q.dtype))


class _JaggedFlashAttention(Differentiable):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rest: tuple[Any, ...], run: Any
    ) -> tuple[Tensor, Tensor]:
        output, lse = run(q, k, v, bias, *rest)
        q_offsets, k_offsets, schedule, *options = rest
        ctx.save_for_backward(output, lse, q, k, v, bias, q_offsets, k_offsets, *schedule)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # no zeros for the LSE
        return output, lse

    @staticmethod
    @once
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs_bias_grad = ctx.needs_input_grad[3]
        *grads, grad_bias = _backward(grad_output, *saved[:8], saved[8:], needs_bias_grad, *ctx.options)
        return *grads, grad_bias if needs_bias_grad else None, None, None


_forward = Op(OP, _kernel, _fake, _JaggedFlashAttention, differentiable=4)


def _backward_kernel(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    q_offsets: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    needs_bias_grad: bool,
    scale: float,
    causal: bool,
    window: int | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernel = dispatch.load(OP, q.device, q.dtype, q.shape[2], backend)
    saved = grad_output, output, lse, q, k, v, q_offsets, k_offsets, schedule
    grads: tuple[Tensor, Tensor, Tensor, Tensor] = kernel.backward(*saved, scale, causal, window, bias, needs_bias_grad)
    return grads


def _backward_fake(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    q_offsets: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    needs_bias_grad: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:
    grad_bias = q.new_empty(0) if bias is None or not needs_bias_grad else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_bias


_backward = Op(f"{OP}_backward", _backward_kernel, _backward_fake)


def _pairs(q_offsets: Tensor, k_offsets: Tensor, causal: bool, window: int | None) -> int:
    return flops.pairs(lengths(q_offsets), lengths(k_offsets), causal, window)


@register_flop_formula(torch.ops.gemctl.jagged_flash_attention, get_raw=True)
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, out_val: Any = None) -> int:
    q_offsets, k_offsets, _, _, causal, window, _ = rest
    return flops.attention_forward(_pairs(q_offsets, k_offsets, causal, window), q.shape[1], q.shape[2])


@register_flop_formula(torch.ops.gemctl.jagged_flash_attention_backward, get_raw=True)
def _(grad_output: Tensor, output: Tensor, lse: Tensor, q: Tensor, *rest: Any, out_val: Any = None) -> int:
    _, _, _, q_offsets, k_offsets, _, _, _, causal, window, _ = rest
    return flops.attention_backward(_pairs(q_offsets, k_offsets, causal, window), q.shape[1], q.shape[2])
