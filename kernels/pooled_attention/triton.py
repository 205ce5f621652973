"""Pooled attention in Triton, for any GPU: keys and values are read once in either direction.

All seeds of a key head's query heads are one small tile of queries, kept in registers, while a program walks through
`CHUNK` keys of one row. Rows of one chunk are done then; longer rows leave a part of the output per chunk, which
`_combine` joins by their LSE. The backward gives the gradients of k and v in the same pass, and each chunk's part of
the seeds' gradient, summed afterwards in one fixed order. More than `MAX_SEEDS` seeds are no longer bound by memory:
they go through jagged attention with queries that every row shares. Offsets' values are not checked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemctl.kernels.jagged_flash_attention.triton import attend, attend_backward
from gemctl.kernels.tables import Table, slots
from gemctl.kernels.triton_attention import load_rows, store_rows
from gemctl.kernels.triton_launch import Tiling, block_dim, empty, launch, rows, strides
from gemctl.kernels.triton_scores import LN_2, LOG2_E
from gemctl.kernels.triton_tilings import PRECISION, attention_tables

CHUNK = 1024  # keys of a program
MAX_SEEDS = 64  # seeds times query heads of one key head
_LOG2_E = 1.4426950408889634


def tables(
    dtype: torch.dtype, device: torch.device, size: int, causal: bool, window: int | None, biased: bool
) -> tuple[Table, ...]:
    """The chunks of keys: one table, forward and backward; for many seeds those of attention."""
    if size > MAX_SEEDS:
        return attention_tables("softmax", dtype, device, causal=False, window=None)
    return (Table(True, CHUNK, CHUNK, 0, 0, pairs=False),)


def forward(
    seeds: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, schedule: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """(output [B, S, H, D], LSE [B, S, H] in float32; −inf for an empty row)."""
    batch, (count, heads, dim), key_heads = k_offsets.shape[0] - 1, seeds.shape, k.shape[1]
    if count * heads // key_heads > MAX_SEEDS:
        output, lse = attend(seeds, k, v, schedule[3], k_offsets, schedule, scale, broadcast=True)
        return output.view(batch, *seeds.shape), lse.view(batch, count, heads)
    seeds, k, v = rows(seeds), rows(k), rows(v)
    chunks = slots(k.shape[0], CHUNK, batch) if count else 0
    output = empty((batch, *seeds.shape), seeds.dtype, k.device)
    lse = empty((batch, count, heads), torch.float32, k.device)
    part = empty((chunks, count, heads, dim), torch.float32, k.device)
    part_lse = empty((chunks, count, heads), torch.float32, k.device)
    tile, sizes = _tiling(seeds), _sizes(seeds, key_heads)
    shape = count, key_heads, heads // key_heads
    tensors = seeds, k, v, output, lse, part, part_lse, schedule[0], k_offsets
    numbers = *strides(seeds, k, v), *shape, scale * _LOG2_E
    launch(_forward, chunks * key_heads, tile, tensors, numbers, (*sizes, tile.other, CHUNK, PRECISION))
    combined = part, part_lse, output, lse, k_offsets
    launch(_combine, batch if count else 0, Tiling(1, 1, 4, 1), combined, shape, (*sizes, CHUNK))
    return output, lse


def backward(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    seeds: Tensor,
    k: Tensor,
    v: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of seeds, k, v."""
    (count, heads, dim), key_heads, batch = seeds.shape, k.shape[1], k_offsets.shape[0] - 1
    if count == 0:
        return seeds.new_zeros(seeds.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    if count * heads // key_heads > MAX_SEEDS:
        saved = grad_output.flatten(0, 1), output.flatten(0, 1), lse.flatten(0, 1), seeds, k, v
        parts, grad_k, grad_v, _ = attend_backward(*saved, schedule[3], k_offsets, schedule, scale, broadcast=True)
        return parts.view(batch, *seeds.shape).sum(0).to(seeds.dtype), grad_k, grad_v
    seeds, k, v, grad = rows(seeds), rows(k), rows(v), grad_output.contiguous()
    chunks = slots(k.shape[0], CHUNK, batch)
    grad_k, grad_v = (empty(x.shape, x.dtype, x.device) for x in (k, v))
    parts = empty((chunks, count, heads, dim), torch.float32, k.device)
    tile, sizes = _tiling(seeds), _sizes(seeds, key_heads)
    tensors = seeds, k, v, grad, output.contiguous(), lse, grad_k, grad_v, parts, schedule[0], k_offsets
    numbers = *strides(seeds, k, v), count, key_heads, heads // key_heads, scale * _LOG2_E, scale
    launch(_backward, chunks * key_heads, tile, tensors, numbers, (*sizes, tile.other, CHUNK, PRECISION))
    return parts.sum(0).to(seeds.dtype), grad_k, grad_v


def _sizes(seeds: Tensor, key_heads: int) -> tuple[int, int, int]:
    """D, BLOCK_D and ROWS of all three kernels."""
    dim = seeds.shape[2]
    return dim, block_dim(dim), block_dim(seeds.shape[0] * seeds.shape[1] // key_heads)


def _tiling(seeds: Tensor) -> Tiling:
    return Tiling(CHUNK, 32, 4, 1) if seeds.dtype.itemsize > 2 else Tiling(CHUNK, 16, 2, 4)


@triton.jit
def _row_places(  # type: ignore[no-untyped-def]
    outer, count, heads, group, key_head, ROWS: tl.constexpr
):
    """For each seed of the query heads of a key head: its index into contiguous [·, count, heads], and if it exists."""
    held = tl.arange(0, ROWS)
    place = (outer * count + held % count) * heads + key_head * group + held // count
    return place, held < count * group


@triton.jit
def _load_places(base, place, real, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, BLOCK_D] of contiguous [·, D] at `place`, zero where not real."""
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = real[:, None] & (column < D)
    return tl.load(base + place[:, None] * D + column, mask=mask, other=0.0)


@triton.jit
def _load_seeds(  # type: ignore[no-untyped-def]
    SEEDS, stride, head_stride, count, group, key_head, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    held = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)[None, :]
    pointer = SEEDS + ((held % count) * stride + (key_head * group + held // count) * head_stride)[:, None] + column
    return tl.load(pointer, mask=(held < count * group)[:, None] & (column < D), other=0.0)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    SEEDS, K, V, OUT, LSE, PART, PART_LSE, ORDER, OFFSETS,
    seeds_stride, seeds_head, k_stride, k_head, v_stride, v_head, count, key_heads, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and LSE of one chunk of keys and one key head: final ones where the row has no other chunk."""
    item = tl.load(ORDER + tl.program_id(0) // key_heads)
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    if item < 0:
        return
    b = item >> 32
    chunk = (item & 0x7FFFFFFF).to(tl.int32)
    start = tl.load(OFFSETS + b)
    length = (tl.load(OFFSETS + b + 1) - start).to(tl.int32)
    first = start + chunk * CHUNK
    keys = tl.minimum(length - chunk * CHUNK, CHUNK)
    seeds = _load_seeds(SEEDS, seeds_stride, seeds_head, count, group, key_head, ROWS, D, BLOCK_D)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    k_base = K + key_head * k_head + first * k_stride
    v_base = V + key_head * v_head + first * v_stride
    for offset in range(0, keys, BN):
        k = load_rows(k_base + tl.cast(offset, tl.int64) * k_stride, k_stride, keys - offset, BN, D, BLOCK_D)
        v = load_rows(v_base + tl.cast(offset, tl.int64) * v_stride, v_stride, keys - offset, BN, D, BLOCK_D)
        scores = scale * tl.dot(seeds, tl.trans(k), input_precision=PRECISION)
        scores = tl.where((offset + tl.arange(0, BN))[None, :] < keys, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        peak = new_peak
    acc = acc / total[:, None]
    lse = LN_2 * (peak + tl.log2(total))
    column = tl.arange(0, BLOCK_D)[None, :]
    if length <= CHUNK:
        place, real = _row_places(b, count, key_heads * group, group, key_head, ROWS)
        tl.store(LSE + place, lse, mask=real)
        mask = real[:, None] & (column < D)
        tl.store(OUT + place[:, None] * D + column, acc.to(OUT.dtype.element_ty), mask=mask)
    else:
        place, real = _row_places(start // CHUNK + b + chunk, count, key_heads * group, group, key_head, ROWS)
        tl.store(PART_LSE + place, lse, mask=real)
        tl.store(PART + place[:, None] * D + column, acc, mask=real[:, None] & (column < D))


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    PART, PART_LSE, OUT, LSE, OFFSETS, count, key_heads, group,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Outputs and LSE of one row that has no key, or several chunks of keys."""
    b = tl.program_id(0).to(tl.int64)
    start = tl.load(OFFSETS + b)
    length = (tl.load(OFFSETS + b + 1) - start).to(tl.int32)
    if (length > 0) & (length <= CHUNK):
        return
    heads = key_heads * group
    column = tl.arange(0, BLOCK_D)[None, :]
    for key_head in range(0, key_heads):
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        for chunk in range(0, tl.cdiv(length, CHUNK)):
            place, real = _row_places(start // CHUNK + b + chunk, count, heads, group, key_head, ROWS)
            lse = tl.load(PART_LSE + place, mask=real, other=0.0)
            new_peak = tl.maximum(peak, lse)
            rescale = tl.exp2(LOG2_E * (peak - new_peak))
            weight = tl.exp2(LOG2_E * (lse - new_peak))
            acc = acc * rescale[:, None] + _load_places(PART, place, real, D, BLOCK_D) * weight[:, None]
            total = total * rescale + weight
            peak = new_peak
        acc = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
        place, real = _row_places(b, count, heads, group, key_head, ROWS)
        tl.store(LSE + place, peak + LN_2 * tl.log2(total), mask=real)
        tl.store(OUT + place[:, None] * D + column, acc.to(OUT.dtype.element_ty), mask=real[:, None] & (column < D))


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    SEEDS, K, V, GRAD, OUT, LSE, GRAD_K, GRAD_V, PARTS, ORDER, OFFSETS,
    seeds_stride, seeds_head, k_stride, k_head, v_stride, v_head, count, key_heads, group, scale, grad_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk of keys and one key head, and its part of the seeds' gradient (zeros for no chunk)."""
    index = tl.program_id(0) // key_heads
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    heads = key_heads * group
    item = tl.load(ORDER + index)
    there = item >= 0
    item = tl.maximum(item, 0)
    b = item >> 32
    chunk = (item & 0x7FFFFFFF).to(tl.int32)
    start = tl.load(OFFSETS + b)
    length = (tl.load(OFFSETS + b + 1) - start).to(tl.int32)
    first = start + chunk * CHUNK
    keys = tl.where(there, tl.minimum(length - chunk * CHUNK, CHUNK), 0)
    seeds = _load_seeds(SEEDS, seeds_stride, seeds_head, count, group, key_head, ROWS, D, BLOCK_D)
    place, real = _row_places(b, count, heads, group, key_head, ROWS)
    grad = _load_places(GRAD, place, real, D, BLOCK_D)
    out = _load_places(OUT, place, real, D, BLOCK_D)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    lse = LOG2_E * tl.load(LSE + place, mask=real, other=float("inf"))
    grad_seeds = tl.zeros([ROWS, BLOCK_D], tl.float32)
    k_base = K + key_head * k_head + first * k_stride
    v_base = V + key_head * v_head + first * v_stride
    grad_base = (first * key_heads + key_head) * D
    for offset in range(0, keys, BN):
        k = load_rows(k_base + tl.cast(offset, tl.int64) * k_stride, k_stride, keys - offset, BN, D, BLOCK_D)
        v = load_rows(v_base + tl.cast(offset, tl.int64) * v_stride, v_stride, keys - offset, BN, D, BLOCK_D)
        # Transposed, [keys, seeds]. A padded key's weight may exceed 1: bounded, it multiplies zeros or is not stored.
        scores = scale * tl.dot(k, tl.trans(seeds), input_precision=PRECISION)
        weights = tl.exp2(tl.minimum(scores - lse[None, :], 0.0))
        grad_weights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        grad_scores = (weights * (grad_weights - delta[None, :])).to(k.dtype)
        grad_v = tl.dot(weights.to(grad.dtype), grad, input_precision=PRECISION)
        grad_k = tl.dot(grad_scores, seeds, input_precision=PRECISION) * grad_scale
        grad_seeds = tl.dot(tl.trans(grad_scores), k, grad_seeds, input_precision=PRECISION)
        place_k = grad_base + tl.cast(offset, tl.int64) * key_heads * D
        store_rows(GRAD_K + place_k, key_heads * D, keys - offset, grad_k, BN, D, BLOCK_D)
        store_rows(GRAD_V + place_k, key_heads * D, keys - offset, grad_v, BN, D, BLOCK_D)
    column = tl.arange(0, BLOCK_D)[None, :]
    part, real = _row_places(index.to(tl.int64), count, heads, group, key_head, ROWS)
    tl.store(PARTS + part[:, None] * D + column, grad_seeds * grad_scale, mask=real[:, None] & (column < D))
