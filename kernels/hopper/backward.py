# ruff: noqa: PLR0912, PLR0915  a role of a kernel is one function: its registers go through no other
"""The backward of jagged attention on Hopper: one kernel, run for the gradient of q and then for those of k and v.

A tile is 128 rows of one side, its own: queries, or keys (`OF_KEYS`). It keeps two matrices of its rows, (Q, dO) or
(K, V), and goes through blocks of 64 rows of the other side's two, (K, V) or (Q, dO). So in both cases the scores S
are first · firstᵀ and the gradients of the weights dP second · secondᵀ, with the own rows as rows; their product with
the slopes, dS, times the other side's first matrix adds to dQ or dK. Keys also add P · dO to dV: seven products for the
five that count, but every output has one owner, nothing is added atomically, and P and dS go from registers straight
into the next product. Consumers are independent of each other: each has 64 of the own rows.

The loop is rotated: a round issues the coming block's S together with the last block's products, so that the weights
and slopes are computed beside them. dP of keys comes after those products, as registers do not hold all at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from gemctl.kernels.hopper import ragged
from gemctl.kernels.hopper.pipeline import (
    CONSUMERS,
    HEIGHT,
    ROWS,
    Batch,
    look_ahead,
    next_tile,
    partly_seen,
    put,
    ring,
    seen,
)
from gemctl.kernels.hopper.scores import exp2, weights_and_slopes
from gemctl.kernels.triton_attention import load_lse

BLOCK = gl.constexpr(64)  # rows of the other side
PAIR = gl.constexpr(2)  # matrices of each side
FAR_BELOW = gl.constexpr(-1e9)


@gluon.jit
def _produce(batch, own_first, own_second, other_first, other_second, owns, others, group,  # type: ignore[no-untyped-def]
             POSITIONAL: gl.constexpr, D: gl.constexpr, OF_KEYS: gl.constexpr, BROADCAST: gl.constexpr):  # fmt: skip
    turn = 0
    block = 0
    tile, ahead = next_tile(batch, look_ahead(batch, POSITIONAL), BLOCK, POSITIONAL)
    while tile.blocks > 0:
        # Shared queries are numbered from 0, the gradients of their outputs as ever.
        own_before = tile.row_first if BROADCAST and not OF_KEYS else 0
        other_before = tile.other_first if BROADCAST and OF_KEYS else 0
        owns.wait_empty(turn)
        full = owns.expect(turn, PAIR * HEIGHT * D * 2)
        for part in gl.static_range(CONSUMERS):
            at = turn % owns.slots * (PAIR * CONSUMERS) + part
            start = tile.row + part * ROWS
            column = tile.head * D
            ragged.load(own_first, start - own_before, tile.row_end - own_before, column, full, owns.blocks.index(at))
            ragged.load(own_second, start, tile.row_end, column, full, owns.blocks.index(at + CONSUMERS))
        members = group if OF_KEYS else 1  # the query heads of a key head
        first_head = tile.head * group if OF_KEYS else tile.head // group
        end = tile.other_end
        for index in range(tile.blocks * members):
            start = tile.other_first + tile.low + index % tile.blocks * BLOCK
            column = (first_head + index // tile.blocks) * D
            others.wait_empty(block)
            full = others.expect(block, PAIR * BLOCK * D * 2)
            into = others.blocks.index(block % others.slots * PAIR)
            ragged.load(other_first, start - other_before, end - other_before, column, full, into)
            into = others.blocks.index(block % others.slots * PAIR + 1)
            ragged.load(other_second, start, end, column, full, into)
            block += 1
        tile, ahead = next_tile(batch, ahead, BLOCK, POSITIONAL)
        turn += 1


@gluon.jit
def _hidden(number):  # type: ignore[no-untyped-def]
    """The number itself, unknown to the compiler: it would keep sixteen descriptors of shared memory in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _weighed(s, lse, tile, index, batch, a, b,  # type: ignore[no-untyped-def]
             part: gl.constexpr, KIND: gl.constexpr, POSITIONAL: gl.constexpr):  # fmt: skip
    """The weights of a block's scores and what dP is multiplied with; 0 where a row does not see the other side's.

    Hidden scores become one far below zero, of which both are 0. Rows behind the end on either side are zeros, and so
    is their dP, or nothing is written to them.
    """
    linear: gl.constexpr = KIND == "identity" or KIND == "leaky_relu"  # noqa: PLR1714 (Triton knows no membership)
    if POSITIONAL and not linear and partly_seen(tile, index, batch, part, BLOCK, POSITIONAL):
        s = gl.where(seen(tile, index, batch, part, BLOCK, s, POSITIONAL), s, FAR_BELOW)
    if KIND == "softmax":
        # A score above its LSE is rounding, or of a padded key.
        y = exp2(gl.minimum(gl.fma(s, gl.zeros_like(s) + a, gl.zeros_like(s) - lse), 0.0))
        g = y
    else:
        y, g = weights_and_slopes(s, a, b, KIND)
    if POSITIONAL and linear:
        there = seen(tile, index, batch, part, BLOCK, s, POSITIONAL)
        y = gl.where(there, y, 0.0)
        g = gl.where(there, g, 0.0)
    return y.to(gl.bfloat16), g


@gluon.jit
def _of_others(LSE, DELTA, tile, index, head, heads, layout: gl.constexpr, KIND: gl.constexpr):  # type: ignore[no-untyped-def]
    """LSE in units of log 2 and DELTA of a block of queries, [1, BLOCK]; inf and 0 behind the end."""
    lse = gl.zeros([1, BLOCK], gl.float32, layout)
    delta = gl.zeros([1, BLOCK], gl.float32, layout)
    if KIND == "softmax":
        row = tile.other_first + tile.low + index * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        at = row.to(gl.int64) * heads + head
        lse = gl.expand_dims(load_lse(LSE + at, row < tile.other_end), 0)
        delta = gl.expand_dims(gl.load(DELTA + at, mask=row < tile.other_end, other=0.0), 0)
    return lse, delta


@gluon.jit
def _of_own(LSE, DELTA, OUT, grad, tile, heads,  # type: ignore[no-untyped-def]
            part: gl.constexpr, layout: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """LSE in units of log 2 and DELTA = Σ out · grad of the own queries, [ROWS, 1]. The keys' kernel reads DELTA."""
    lse = gl.zeros([ROWS, 1], gl.float32, layout)
    delta = gl.zeros([ROWS, 1], gl.float32, layout)
    if KIND == "softmax":
        by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        row = tile.row + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, by_rows))
        column = gl.arange(0, D, gl.SliceLayout(0, by_rows))
        at = gl.expand_dims(row.to(gl.int64) * heads + tile.head, 1) * D + gl.expand_dims(column, 0)
        out = gl.load(OUT + at, mask=gl.expand_dims(row < tile.row_end, 1), other=0.0)
        products = out.to(gl.float32) * grad.load(by_rows).to(gl.float32)
        delta = gl.convert_layout(gl.sum(products, 1), gl.SliceLayout(1, layout))
        row = tile.row + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        at = row.to(gl.int64) * heads + tile.head
        gl.store(DELTA + at, delta, mask=row < tile.row_end)
        lse = gl.expand_dims(load_lse(LSE + at, row < tile.row_end), 1)
        delta = gl.expand_dims(delta, 1)
    return lse, delta


@gluon.jit
def _consume(batch, LSE, DELTA, OUT, grad_first, grad_second, owns, others, group, a, b, first_scale, second_scale,  # type: ignore[no-untyped-def]
             part: gl.constexpr, KIND: gl.constexpr, POSITIONAL: gl.constexpr, OF_KEYS: gl.constexpr, D: gl.constexpr):  # fmt: skip # noqa: E501
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_grads: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_grads, 2)
    parts: gl.constexpr = PAIR * CONSUMERS
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
    turn = 0
    block = 0
    members = group if OF_KEYS else 1
    tile, ahead = next_tile(batch, look_ahead(batch, POSITIONAL), BLOCK, POSITIONAL)
    while tile.blocks > 0:
        if turn > 0:
            tma.store_wait(0)  # the last tile's gradients have left its slot
            owns.free(turn - 1)
        owns.wait_full(turn)
        rounds = tile.blocks * members
        if tile.row + part * ROWS < tile.row_end:
            first = owns.matrix(turn, part, parts)
            second = owns.matrix(turn, CONSUMERS + part, parts)
            if OF_KEYS:
                lse, delta = _of_others(LSE, DELTA, tile, 0, tile.head * group, batch.heads * group, of_scores, KIND)
            else:
                lse, delta = _of_own(LSE, DELTA, OUT, second, tile, batch.heads, part, of_scores, KIND, D)
            acc = gl.zeros([ROWS, D], gl.float32, of_grads)
            acc_second = gl.zeros([ROWS, D], gl.float32, of_grads)
            others.wait_full(block)
            s = warpgroup_mma(first, others.matrix(block, 0, PAIR).permute([1, 0]), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(second, others.matrix(block, 1, PAIR).permute([1, 0]), zeros, use_acc=False, is_async=True)  # fmt: skip # noqa: E501
            following, ahead = next_tile(batch, ahead, BLOCK, POSITIONAL)  # while products run
            s, dp = warpgroup_mma_wait(0, [s, dp])
            y, g = _weighed(s, lse, tile, 0, batch, a, b, part, KIND, POSITIONAL)
            ds = (g * (dp - delta)).to(gl.bfloat16) if KIND == "softmax" else (g * dp).to(gl.bfloat16)
            for number in range(1, rounds):
                p = gl.convert_layout(y, of_weights)
                ds = gl.convert_layout(ds, of_weights)
                slot = _hidden(turn)
                first = owns.matrix(slot, part, parts)
                second = owns.matrix(slot, CONSUMERS + part, parts)
                index = number % tile.blocks
                if OF_KEYS:
                    head = tile.head * group + number // tile.blocks
                    lse, delta = _of_others(LSE, DELTA, tile, index, head, batch.heads * group, of_scores, KIND)
                others.wait_full(block + 1)
                other_first = others.matrix(block + 1, 0, PAIR).permute([1, 0])
                other_second = others.matrix(block + 1, 1, PAIR).permute([1, 0])
                s = warpgroup_mma(first, other_first, zeros, use_acc=False, is_async=True)
                if OF_KEYS:
                    acc_second = warpgroup_mma(p, others.matrix(block, 1, PAIR), acc_second, use_acc=number > 1, is_async=True)  # fmt: skip # noqa: E501
                    acc = warpgroup_mma(ds, others.matrix(block, 0, PAIR), acc, use_acc=number > 1, is_async=True)
                    s = warpgroup_mma_wait(2, [s])
                    y, g = _weighed(s, lse, tile, index, batch, a, b, part, KIND, POSITIONAL)
                    acc_second, acc, p, ds = warpgroup_mma_wait(0, [acc_second, acc, p, ds])
                    dp = warpgroup_mma(second, other_second, zeros, use_acc=False, is_async=True)
                    others.free(block)
                    dp = warpgroup_mma_wait(0, [dp])
                else:
                    dp = warpgroup_mma(second, other_second, zeros, use_acc=False, is_async=True)
                    acc = warpgroup_mma(ds, others.matrix(block, 0, PAIR), acc, use_acc=number > 1, is_async=True)
                    s = warpgroup_mma_wait(2, [s])
                    y, g = _weighed(s, lse, tile, index, batch, a, b, part, KIND, POSITIONAL)
                    dp = warpgroup_mma_wait(1, [dp])
                    acc, ds = warpgroup_mma_wait(0, [acc, ds])
                    others.free(block)
                ds = (g * (dp - delta)).to(gl.bfloat16) if KIND == "softmax" else (g * dp).to(gl.bfloat16)
                block += 1
            if OF_KEYS:
                p = gl.convert_layout(y, of_weights)
                acc_second = warpgroup_mma(p, others.matrix(block, 1, PAIR), acc_second, use_acc=rounds > 1, is_async=True)  # fmt: skip # noqa: E501
            ds = gl.convert_layout(ds, of_weights)
            acc = warpgroup_mma(ds, others.matrix(block, 0, PAIR), acc, use_acc=rounds > 1, is_async=True)
            acc, acc_second, ds = warpgroup_mma_wait(0, [acc, acc_second, ds])
            others.free(block)
            block += 1
            at = turn % owns.slots * parts + part  # the gradients leave by way of the tile's own rows
            row = tile.row + part * ROWS
            put((acc * first_scale).to(gl.bfloat16), owns.blocks.index(at), grad_first, row, tile.row_end, tile.head * D)  # fmt: skip # noqa: E501
            if OF_KEYS:
                put((acc_second * second_scale).to(gl.bfloat16), owns.blocks.index(at + CONSUMERS), grad_second, row, tile.row_end, tile.head * D)  # fmt: skip # noqa: E501
        else:
            following, ahead = next_tile(batch, ahead, BLOCK, POSITIONAL)
            for _ in range(rounds):
                others.wait_full(block)
                others.free(block)
                block += 1
        tile = following
        turn += 1
    tma.store_wait(0)


# The sizes of a batch must not be compiled in: every batch would have a kernel of its own.
_SIZES = ["places", "heads", "group", "behind", "ahead"]


@gluon.jit(do_not_specialize=_SIZES)
def grad_kernel(ORDER, OWN_OFFSETS, OTHER_OFFSETS, LSE, DELTA, OUT,  # type: ignore[no-untyped-def]
                own_first, own_second, other_first, other_second, grad_first, grad_second,
                places, heads, group, a, b, first_scale, second_scale, behind, ahead,
                KIND: gl.constexpr, POSITIONAL: gl.constexpr, BROADCAST: gl.constexpr, OF_KEYS: gl.constexpr,
                D: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """The gradient [N, heads, D] of a schedule's tiles of HEIGHT queries, or those of keys and values.

    First and second: q and the output's gradient of queries, k and v of keys; grad_second is for keys only. `heads` are
    the own side's, behind and ahead from its point of view. LSE (natural) and DELTA [N, query heads] for softmax: with
    queries DELTA is written, OUT [N, heads, D] is the forward's output.
    BROADCAST: q is one sequence for all. All descriptors have blocks of 64 rows.
    """
    batch = Batch(ORDER, OWN_OFFSETS, OTHER_OFFSETS, places, heads, behind, ahead)
    owns = ring(2, PAIR * CONSUMERS, ROWS, D, own_first)
    others = ring(SLOTS, PAIR, BLOCK, D, other_first)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (batch, LSE, DELTA, OUT, grad_first, grad_second, owns, others, group, a, b, first_scale, second_scale, 0, KIND, POSITIONAL, OF_KEYS, D)),  # noqa: E501
            (_consume, (batch, LSE, DELTA, OUT, grad_first, grad_second, owns, others, group, a, b, first_scale, second_scale, 1, KIND, POSITIONAL, OF_KEYS, D)),  # noqa: E501
            (_produce, (batch, own_first, own_second, other_first, other_second, owns, others, group, POSITIONAL, D, OF_KEYS, BROADCAST)),  # noqa: E501
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
