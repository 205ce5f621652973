"""`gdpa`: generalised dot-product attention of jagged sequences, as a torch.library op.

With queries = events, keys and values = weights made from the row's other features, it is a personalised two-layer
feed-forward; with SiLU, causal and post_scale 1/max_length it is HSTU's attention.

    import torch
    from gemctl.kernels.gdpa.op import gdpa
    events, hidden = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 4, 8, 12])  # 4 keys a row
    q, k, v = torch.randn(8, 2, 16, requires_grad=True), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    gdpa(q, k, v, events, hidden, 5, 4, activation="gelu_approx", pre_scale=0.25).sum().backward()
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gemctl.kernels import dispatch
from gemctl.kernels.gdpa import reference
from gemctl.kernels.gdpa.activation import Activation
from gemctl.kernels.jagged import check, lengths
from gemctl.kernels.library import Differentiable, Op, once
from gemctl.kernels.tables import tile_tables
from gemctl.specs import flops

OP = "gdpa"
ACTIVATION_NAMES = tuple(Activation)  # torch.compile cannot trace through the enumeration itself


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    activation: str,
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    broadcast_q: bool = False,
) -> Tensor:
    """post_scale · act(pre_scale · QKᵀ) V within each sequence; a query that sees no key gives 0 and zero gradients.

    q [ΣLq, H, D]; k, v [ΣLk, Hkv, D], where Hkv divides H (query head h uses key head h // (H/Hkv)); any strides, one
    floating dtype. q_offsets, k_offsets contiguous int64 [B+1]: row b owns tokens offsets[b] … offsets[b+1]−1. max_q,
    max_k: longest lengths, a hint for launch sizes that never changes the result. activation: an `Activation` or its
    name; all have act(0) = 0. causal, window: query i stands at key position i + Lk − Lq, see
    gemctl/kernels/visibility.py. broadcast_q: q is one sequence [S, H, D] that every row uses (q_offsets must be None);
    the result is [B·S, H, D].

    Returns [ΣLq, H, D], dtype of q. Differentiable once in q, k and v; a second derivative and forward-mode
    differentiation raise. ValueError lists every violated condition; candidates that share one row's keys are one
    longer query sequence (offsets by row, not by candidate).
    """
    check(OP, q, k, v, _offsets(q_offsets, k_offsets), window, _problems(activation, q_offsets, broadcast_q))
    if dispatch.named() == dispatch.REFERENCE:
        return reference.gdpa(
            q,
            k,
            v,
            q_offsets,
            k_offsets,
            max_q,
            max_k,
            activation=activation,
            pre_scale=pre_scale,
            post_scale=post_scale,
            causal=causal,
            window=window,
            broadcast_q=broadcast_q,
        )
    q_tokens = q.shape[0] * (k_offsets.shape[0] - 1) if broadcast_q else q.shape[0]
    sizes = q_tokens, k.shape[0], q.dtype, q.shape[2]
    schedule = tile_tables(OP, q_offsets, k_offsets, *sizes, causal=causal, window=window)
    options = str(activation), pre_scale, post_scale, causal, window, dispatch.named()
    output: Tensor = _forward(q, k, v, q_offsets, k_offsets, schedule, *options)
    return output


def _offsets(q_offsets: Tensor | None, k_offsets: Tensor) -> dict[str, Tensor]:
    return {"k_offsets": k_offsets} if q_offsets is None else {"q_offsets": q_offsets, "k_offsets": k_offsets}


def _problems(activation: str, q_offsets: Tensor | None, broadcast_q: bool) -> list[str]:
    problems = []
    if activation not in ACTIVATION_NAMES:
        problems.append(f"activation must be one of {', '.join(Activation)}, not {activation!r}")
    if broadcast_q != (q_offsets is None):
        problems.append("q_offsets must be None with broadcast_q, and only then")
    return problems


def _kernel(
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
    backend: str | None,
) -> Tensor:
    kernel = dispatch.load(OP, q.device, q.dtype, q.shape[2], backend)
    options = activation, pre_scale, post_scale, causal, window
    output: Tensor = kernel.forward(q, k, v, q_offsets, k_offsets, schedule, *options)
    return output


def _fake(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, *rest: Any) -> Tensor:
    batch = 1 if q_offsets is not None else k_offsets.shape[0] - 1
    return q.new_empty(q.shape[0] * batch, *q.shape[1:])


class _Gdpa(Differentiable):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], run: Any) -> Tensor:
        output: Tensor = run(q, k, v, *rest)
        q_offsets, k_offsets, schedule, *options = rest
        ctx.save_for_backward(q, k, v, q_offsets, k_offsets, *schedule)
        ctx.options = options
        return output

    @staticmethod
    @once
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(grad_output, *saved[:5], saved[5:], *ctx.options), None, None


_forward = Op(OP, _kernel, _fake, _Gdpa, differentiable=3)


def _backward_kernel(
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
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = dispatch.load(OP, q.device, q.dtype, q.shape[2], backend)
    options = activation, pre_scale, post_scale, causal, window
    grads: tuple[Tensor, Tensor, Tensor] = kernel.backward(
        grad_output, q, k, v, q_offsets, k_offsets, schedule, *options
    )
    return grads


def _backward_fake(grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_backward = Op(f"{OP}_backward", _backward_kernel, _backward_fake)


def _pairs(q: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, causal: bool, window: int | None) -> int:
    len_k = lengths(k_offsets)
    len_q = [q.shape[0]] * len(len_k) if q_offsets is None else lengths(q_offsets)
    return flops.pairs(len_q, len_k, causal, window)


@register_flop_formula(torch.ops.gemctl.gdpa, get_raw=True)
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None) -> int:
    q_offsets, k_offsets, _, _, _, _, causal, window, _ = rest
    return flops.attention_forward(_pairs(q, q_offsets, k_offsets, causal, window), q.shape[1], q.shape[2])


@register_flop_formula(torch.ops.gemctl.gdpa_backward, get_raw=True)
def _(grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None) -> int:
    q_offsets, k_offsets, _, _, _, _, causal, window, _ = rest
    return flops.attention_backward(_pairs(q, q_offsets, k_offsets, causal, window), q.shape[1], q.shape[2])
