"""Block attention in Triton, for any GPU: one program a block and head, each tensor read and written once.

A block's queries need one block of keys, so softmax needs no running sums, and the backward computes everything again
and gives all three gradients in one pass: Σ grad · out is also Σ weights · grad_weights, so it reads neither the output
nor the LSE. Rotary embedding is done on the loaded tiles, in float32. Block sizes up to 128. Offsets' values are not
checked; cos and sin too short for a sequence give NaN there.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemctl.kernels.tables import Table, slots
from gemctl.kernels.triton_attention import load_rows, store_rows
from gemctl.kernels.triton_launch import Tiling, block_dim, empty, launch, rows, strides
from gemctl.kernels.triton_scores import LN_2
from gemctl.kernels.triton_tilings import PRECISION

MAX_BLOCK = 128
MOST_HEADS = 4  # of a program
_LOG2_E = 1.4426950408889634


def tables(
    dtype: torch.dtype, device: torch.device, size: int, causal: bool, window: int | None, biased: bool
) -> tuple[Table, ...]:
    """The blocks of `size` rows: one table, forward and backward."""
    if size > MAX_BLOCK:
        raise ValueError(f"block_attention: block_size must be at most {MAX_BLOCK} on a GPU, not {size}")
    return (Table(True, size, size, 0, 0, pairs=False),)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    schedule: list[Tensor],
    block_size: int,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(output like q, LSE [ΣL, H] in float32)."""
    q, k, v, heads = rows(q), rows(k), rows(v), q.shape[1]
    output = empty(q.shape, q.dtype, q.device)
    lse = empty(q.shape[:2], torch.float32, q.device)
    (cos, sin, positions), sizes = _angles(q, cos, sin), _sizes(q, block_size, cos)
    each = _heads_each(heads, sizes.ROTARY)
    programs = slots(q.shape[0], block_size, offsets.shape[0] - 1) * heads // each
    tensors = q, k, v, output, lse, cos, sin, schedule[0], offsets
    factors = positions, heads, heads // k.shape[1], each, scale * _LOG2_E
    launch(_forward, programs, _tiling(sizes), tensors, (*strides(q, k, v), *factors), sizes)
    return output, lse


def backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    q, k, v, grad = rows(q), rows(k), rows(v), rows(grad_output)
    heads, key_heads = q.shape[1], k.shape[1]
    grads = [empty(x.shape, x.dtype, x.device) for x in (q, k, v)]
    (cos, sin, positions), sizes = _angles(q, cos, sin), _sizes(q, block_size, cos)
    programs = slots(q.shape[0], block_size, offsets.shape[0] - 1) * key_heads
    tensors = q, k, v, grad, *grads, cos, sin, schedule[0], offsets
    numbers = *strides(q, k, v, grad), positions, key_heads, scale * _LOG2_E, scale
    launch(_backward, programs, _tiling(sizes), tensors, numbers, (heads // key_heads, *sizes))
    return grads[0], grads[1], grads[2]


class Sizes(NamedTuple):
    """The constexprs of both kernels."""

    SIZE: int
    ROWS: int
    D: int
    BLOCK_D: int
    ROTARY: bool
    PRECISION: str


def _angles(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """The tables (any tensor in their place), contiguous, and how many positions they have."""
    if cos is None or sin is None:
        return q, q, 0
    return cos.contiguous(), sin.contiguous(), min(cos.shape[0], sin.shape[0])


def _sizes(q: Tensor, block_size: int, cos: Tensor | None) -> Sizes:
    dim = q.shape[2]
    return Sizes(block_size, block_dim(block_size), dim, block_dim(dim), cos is not None, PRECISION)


def _heads_each(heads: int, rotary: bool) -> int:
    """Heads of a forward's program: with a rotary embedding several, so that the tables are read less often.

    The backward has no registers left for that, and loses more than half of its speed.
    """
    return math.gcd(heads, MOST_HEADS) if rotary else 1


def _tiling(sizes: Sizes) -> Tiling:
    return Tiling(sizes.ROWS, sizes.ROWS, 8 if sizes.ROWS > 64 else 4, 1)


@triton.jit
def _rotated(x: tl.tensor, cos: tl.tensor, sin: tl.tensor, ROWS: tl.constexpr, BLOCK_D: tl.constexpr) -> tl.tensor:
    """Pairs of columns (x[2i], x[2i+1]) turned by their angles, in float32."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [ROWS, BLOCK_D // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, BLOCK_D])


@triton.jit
def _turned(x, cos, sin, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of q, k or v, rotated; where there are several, all are loaded before the first is."""
    if ROTARY:
        x = _rotated(x, cos, sin, ROWS, BLOCK_D).to(x.dtype)
    return x


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    base, stride, rows, x, cos, sin, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr
):
    """A gradient's block, rotated back."""
    if ROTARY:
        x = _rotated(x, cos, -sin, ROWS, BLOCK_D)
    store_rows(base, stride, rows, x, ROWS, D, BLOCK_D)


@triton.jit
def _angle_rows(  # type: ignore[no-untyped-def]
    table, positions, position0, rows, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr
):
    """cos or sin [ROWS, BLOCK_D / 2] of a block's tokens, NaN where the table is too short for them."""
    if ROTARY:
        row = position0 + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, BLOCK_D // 2)[None, :]
        real = (row < position0 + rows) & (column < D // 2)
        values = tl.load(table + row.to(tl.int64) * (D // 2) + column, mask=real & (row < positions), other=0.0)
        found = tl.where(real & (row >= positions), float("nan"), values.to(tl.float32))
    else:
        found = tl.zeros([1, 1], tl.float32)  # not used
    return found


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    Q, K, V, OUT, LSE, COS, SIN, ORDER, OFFSETS,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, positions, heads, group, each, scale,
    SIZE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output [N, heads, D] and LSE [N, heads] of one block and `each` heads."""
    item = tl.load(ORDER + tl.program_id(0) // (heads // each))
    head0 = tl.program_id(0) % (heads // each) * each
    if item < 0:
        return
    b = item >> 32
    position0 = (item & 0x7FFFFFFF).to(tl.int32) * SIZE
    first = tl.load(OFFSETS + b) + position0
    rows = tl.minimum((tl.load(OFFSETS + b + 1) - first).to(tl.int32), SIZE)
    row = tl.arange(0, ROWS)
    cos = _angle_rows(COS, positions, position0, rows, ROWS, D, BLOCK_D, ROTARY)
    sin = _angle_rows(SIN, positions, position0, rows, ROWS, D, BLOCK_D, ROTARY)
    for member in range(0, each):
        head = (head0 + member).to(tl.int64)
        q = load_rows(Q + head * q_head + first * q_stride, q_stride, rows, ROWS, D, BLOCK_D)
        k = load_rows(K + head // group * k_head + first * k_stride, k_stride, rows, ROWS, D, BLOCK_D)
        v = load_rows(V + head // group * v_head + first * v_stride, v_stride, rows, ROWS, D, BLOCK_D)
        q = _turned(q, cos, sin, ROWS, BLOCK_D, ROTARY)
        k = _turned(k, cos, sin, ROWS, BLOCK_D, ROTARY)
        v = _turned(v, cos, sin, ROWS, BLOCK_D, ROTARY)
        scores = scale * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(row[None, :] < rows, scores, float("-inf"))
        peak = tl.max(scores, 1)
        weights = tl.exp2(scores - peak[:, None])
        total = tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION) / total[:, None]
        tl.store(LSE + (first + row) * heads + head, LN_2 * (peak + tl.log2(total)), mask=row < rows)
        store_rows(OUT + (first * heads + head) * D, heads * D, rows, out, ROWS, D, BLOCK_D)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    Q, K, V, GRAD, GRAD_Q, GRAD_K, GRAD_V, COS, SIN, ORDER, OFFSETS,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head, positions, key_heads,
    scale, grad_scale,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one block: of a key head and of its query heads."""
    item = tl.load(ORDER + tl.program_id(0) // key_heads)
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    if item < 0:
        return
    b = item >> 32
    position0 = (item & 0x7FFFFFFF).to(tl.int32) * SIZE
    first = tl.load(OFFSETS + b) + position0
    rows = tl.minimum((tl.load(OFFSETS + b + 1) - first).to(tl.int32), SIZE)
    row = tl.arange(0, ROWS)
    heads = key_heads * GROUP
    cos = _angle_rows(COS, positions, position0, rows, ROWS, D, BLOCK_D, ROTARY)
    sin = _angle_rows(SIN, positions, position0, rows, ROWS, D, BLOCK_D, ROTARY)
    k = load_rows(K + key_head * k_head + first * k_stride, k_stride, rows, ROWS, D, BLOCK_D)
    v = load_rows(V + key_head * v_head + first * v_stride, v_stride, rows, ROWS, D, BLOCK_D)
    k = _turned(k, cos, sin, ROWS, BLOCK_D, ROTARY)
    v = _turned(v, cos, sin, ROWS, BLOCK_D, ROTARY)
    base = (first * key_heads + key_head) * D
    if GROUP > 1:
        grad_k = tl.zeros([ROWS, BLOCK_D], tl.float32)
        grad_v = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for member in range(0, GROUP):
        head = key_head * GROUP + member
        q = load_rows(Q + head * q_head + first * q_stride, q_stride, rows, ROWS, D, BLOCK_D)
        grad = load_rows(GRAD + head * grad_head + first * grad_stride, grad_stride, rows, ROWS, D, BLOCK_D)
        q = _turned(q, cos, sin, ROWS, BLOCK_D, ROTARY)
        scores = scale * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(row[None, :] < rows, scores, float("-inf"))
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
        # Each product is stored before the next one where it can be, which leaves room for another program.
        part_v = tl.dot(tl.trans(weights.to(grad.dtype)), grad, input_precision=PRECISION)
        if GROUP > 1:
            grad_v += part_v
        else:
            _store(GRAD_V + base, key_heads * D, rows, part_v, cos, sin, ROWS, D, BLOCK_D, ROTARY)
        grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - tl.sum(weights * grad_weights, 1)[:, None])
        grad_scores = grad_scores.to(q.dtype)
        part_k = tl.dot(tl.trans(grad_scores), q, input_precision=PRECISION)
        if GROUP > 1:
            grad_k += part_k
        else:
            _store(GRAD_K + base, key_heads * D, rows, part_k * grad_scale, cos, sin, ROWS, D, BLOCK_D, ROTARY)
        grad_q = tl.dot(grad_scores, k, input_precision=PRECISION) * grad_scale
        place_q = (first * heads + head) * D
        _store(GRAD_Q + place_q, heads * D, rows, grad_q, cos, sin, ROWS, D, BLOCK_D, ROTARY)
    if GROUP > 1:
        _store(GRAD_K + base, key_heads * D, rows, grad_k * grad_scale, cos, sin, ROWS, D, BLOCK_D, ROTARY)
        _store(GRAD_V + base, key_heads * D, rows, grad_v, cos, sin, ROWS, D, BLOCK_D, ROTARY)
