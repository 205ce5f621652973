"""Alternatives to gemctl's kernels, for `gemctl bench kernels --peer NAME=gemctl.bench.peers:FUNCTION`.

    gemctl bench kernels --peer fa2=gemctl.bench.peers:fa2_varlen --peer flex=gemctl.bench.peers:flex

For softmax attention: `fa2_varlen` (PyTorch's FlashAttention 2), `fa4_varlen` (flash-attn-4, if installed;
`fa4_deterministic` with its deterministic backward), `cudnn_padded` (padded batches), `cudnn_ragged` (nested tensors)
and `flex` (FlexAttention with a mask by row). For softmax attention and GDPA: `padded_matmuls` (compiled matmul,
activation, matmul of padded batches). Padding is not timed.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gemctl.bench.cases import Case

Call = Callable[[], Tensor]

functorch_config.donated_buffer = False  # a benchmark runs the same compiled backward many times


def fa2_varlen(case: Case) -> Call | None:
    if case.op != "jagged_flash_attention":
        return None
    rows, keys = case.q_offsets.int(), case.k_offsets.int()
    sizes, flags = (case.max_q, case.max_k), (0.0, case.shape.causal, False)

    def call() -> Tensor:
        found = torch.ops.aten._flash_attention_forward(
            case.q, case.k, case.v, rows, keys, *sizes, *flags, scale=case.scale
        )
        output: Tensor = found[0]
        return output

    return call


def fa4_varlen(case: Case, deterministic: bool = False) -> Call | None:
    if case.op != "jagged_flash_attention":
        return None
    from flash_attn.cute.interface import flash_attn_varlen_func  # type: ignore[import-not-found] # noqa: PLC0415

    offsets = {"cu_seqlens_q": case.q_offsets.int(), "cu_seqlens_k": case.k_offsets.int()}
    sizes = {"max_seqlen_q": case.max_q, "max_seqlen_k": case.max_k}
    options = {"softmax_scale": case.scale, "causal": case.shape.causal, "deterministic": deterministic}

    def call() -> Tensor:
        found = flash_attn_varlen_func(case.q, case.k, case.v, **offsets, **sizes, **options)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output

    return call


def fa4_deterministic(case: Case) -> Call | None:
    return fa4_varlen(case, deterministic=True)


def cudnn_padded(case: Case) -> Call | None:
    if case.op != "jagged_flash_attention" or case.shape.causal:
        return None
    q, k, v = (_padded(x, offsets, longest) for x, offsets, longest in _sides(case))
    mask = None
    if not case.shape.full:
        mask = (torch.arange(case.max_k, device=case.k.device) < case.k_offsets.diff()[:, None])[:, None, None]

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(q(), k(), v(), mask, scale=case.scale)

    return call


def cudnn_ragged(case: Case) -> Call | None:
    if case.op != "jagged_flash_attention":
        return None

    def nested(x: Tensor, offsets: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2)

    def call() -> Tensor:
        q, k, v = nested(case.q, case.q_offsets), nested(case.k, case.k_offsets), nested(case.v, case.k_offsets)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=case.shape.causal, scale=case.scale)
        return found.transpose(1, 2).values()

    return call


def flex(case: Case) -> Call | None:
    if case.op != "jagged_flash_attention" or case.shape.causal:
        return None
    row_of_q, row_of_k = _rows(case.q_offsets), _rows(case.k_offsets)

    def same_row(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return row_of_q[i] == row_of_k[j]

    sizes = None, None, len(row_of_q), len(row_of_k)
    mask = create_block_mask(same_row, *sizes, device=case.q.device.type, _compile=True)
    run = _compiled_flex()

    def call() -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (case.q, case.k, case.v))
        found: Tensor = run(q, k, v, block_mask=mask, scale=case.scale)
        return found

    return call


def padded_matmuls(case: Case) -> Call | None:
    if case.op not in {"jagged_flash_attention", "gdpa"} or case.shape.causal:
        return None
    q, k, v = (_padded(x, offsets, longest) for x, offsets, longest in _sides(case))
    hidden = (torch.arange(case.max_k, device=case.k.device) >= case.k_offsets.diff()[:, None])[:, None, None]
    run = _compiled_matmuls()

    def call() -> Tensor:
        found: Tensor = run(q(), k(), v(), hidden, case.scale, case.op == "gdpa")
        return found

    return call


def _sides(case: Case) -> tuple[tuple[Tensor, Tensor, int], ...]:
    keys = case.k_offsets, case.max_k
    return (case.q, case.q_offsets, case.max_q), (case.k, *keys), (case.v, *keys)


def _rows(offsets: Tensor) -> Tensor:
    """The row of each token."""
    return torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())


def _padded(x: Tensor, offsets: Tensor, longest: int) -> Callable[[], Tensor]:
    """x as [B, H, longest, D], padded once; its gradient with respect to x is zeros, which costs little."""
    lengths = offsets.diff()
    place = torch.arange(len(x), device=x.device) - offsets[:-1].repeat_interleave(lengths)
    dense = x.new_zeros(len(lengths), longest, *x.shape[1:])
    dense[_rows(offsets), place] = x.detach()
    dense = dense.transpose(1, 2)

    def stand() -> Tensor:
        found: Tensor = _Stand.apply(x, dense)
        return found

    return stand


class _Stand(torch.autograd.Function):
    """Returns the padded copy of x, so that the benchmark can take a gradient with respect to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dense: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return dense.view_as(dense)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0].new_zeros(1).expand(ctx.saved_tensors[0].shape), None


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _compiled_matmuls() -> Any:
    def matmuls(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, gdpa: bool) -> Tensor:
        scores = (q @ k.mT) * scale
        if gdpa:  # padded keys are zero, and so are their terms
            return functional.gelu(scores, approximate="tanh") @ v
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    return torch.compile(matmuls, dynamic=True)
