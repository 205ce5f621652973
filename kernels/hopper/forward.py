# ruff: noqa: PLR0912, PLR0915  a role of a kernel is one function: its registers go through no other
"""The forward of jagged attention on Hopper, softmax or an activation; kernels/README.md explains it step by step.

A tile is 128 rows of queries of one sequence and head. The producer warp copies its queries, then its blocks of keys
and values, into rings; each consumer warpgroup owns 64 of the rows. A consumer goes through the blocks of all of its
tiles in one flat loop: in each round it issues the scores of the coming block (which may be the next tile's first) and
the product of the last weights with their values, and turns the coming scores into weights while that product runs.
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
    either,
    look_ahead,
    next_tile,
    partly_seen,
    put,
    ring,
    seen,
)
from gemctl.kernels.hopper.scores import inverse_of, log2, soft_weights, weights
from gemctl.kernels.triton_scores import LN_2


@gluon.jit
def _produce(batch, q_source, k_source, v_source, queries, keys, values, group,  # type: ignore[no-untyped-def]
             POSITIONAL: gl.constexpr, BROADCAST: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr):  # fmt: skip
    turn = 0
    block = 0
    tile, ahead = next_tile(batch, look_ahead(batch, POSITIONAL), BLOCK, POSITIONAL)
    while tile.blocks > 0:
        before = tile.row_first if BROADCAST else 0  # shared queries are numbered from 0
        column = tile.head * D
        queries.wait_empty(turn)
        full = queries.expect(turn, HEIGHT * D * 2)
        for part in gl.static_range(CONSUMERS):
            at = queries.blocks.index(turn % queries.slots * CONSUMERS + part)
            ragged.load(q_source, tile.row + part * ROWS - before, tile.row_end - before, column, full, at)
        column = tile.head // group * D
        for index in range(tile.blocks):
            start = tile.other_first + tile.low + index * BLOCK
            keys.wait_empty(block)
            full = keys.expect(block, BLOCK * D * 2)
            ragged.load(k_source, start, tile.other_end, column, full, keys.blocks.index(block % keys.slots))
            values.wait_empty(block)
            full = values.expect(block, BLOCK * D * 2)
            ragged.load(v_source, start, tile.other_end, column, full, values.blocks.index(block % values.slots))
            block += 1
        tile, ahead = next_tile(batch, ahead, BLOCK, POSITIONAL)
        turn += 1


@gluon.jit
def _weighed(s, peak, tile, index, batch, a, b,  # type: ignore[no-untyped-def]
             part: gl.constexpr, KIND: gl.constexpr, POSITIONAL: gl.constexpr, BLOCK: gl.constexpr):  # fmt: skip
    """The weights of a block's scores in bfloat16; for softmax also their sums, the rows' peaks and `rest`.

    Keys behind the sequence's end are zeros, and so is an activation's weight of them: only softmax masks those.
    """
    if (KIND == "softmax" or POSITIONAL) and partly_seen(tile, index, batch, part, BLOCK, POSITIONAL):
        there = seen(tile, index, batch, part, BLOCK, s, POSITIONAL)
        s = gl.where(there, s, float("-inf") if KIND == "softmax" else 0.0)
    if KIND == "softmax":
        y, more, higher, rest = soft_weights(s, peak, a)
    else:
        y, more, higher, rest = weights(s, a, b, KIND), peak, peak, peak
    return y, more, higher, rest


@gluon.jit
def _finish(o, total, peak, tile, out_target, stage, LSE, heads, out_scale,  # type: ignore[no-untyped-def]
            part: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Writes a tile's output, and for softmax its LSE (natural, −inf where nothing is seen)."""
    row = tile.row + part * ROWS
    if KIND == "softmax":
        inverse = gl.where(total != 0, inverse_of(total), 0.0)
        o = o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout)), 1)
        rows = row + gl.arange(0, ROWS, total.type.layout)
        lse = LN_2 * (peak + log2(total))
        gl.store(LSE + rows.to(gl.int64) * heads + tile.head, lse, mask=rows < tile.row_end)
    else:
        o = o * out_scale
    put(o.to(gl.bfloat16), stage, out_target, row, tile.row_end, tile.head * D)


@gluon.jit
def _mine(tile, part: gl.constexpr):  # type: ignore[no-untyped-def]
    """Whether there is a tile and consumer `part` has rows in it: the last tile of a sequence may be short."""
    return (tile.blocks > 0) & (tile.row + part * ROWS < tile.row_end)


@gluon.jit
def _queries(queries, turn, zeros, part: gl.constexpr, LOADED: gl.constexpr):  # type: ignore[no-untyped-def]
    """A tile's queries as an operand: in registers (`LOADED`; their slot is free at once) or where they are."""
    matrix = queries.matrix(turn, part, CONSUMERS)
    if LOADED:
        matrix = matrix.load(gl.DotOperandLayout(0, zeros.type.layout, 2))
        queries.free(turn)
    return matrix


@gluon.jit
def _consume(batch, out_target, LSE, queries, keys, values, stages, a, b, out_scale,  # type: ignore[no-untyped-def]
             part: gl.constexpr, KIND: gl.constexpr, POSITIONAL: gl.constexpr,
             D: gl.constexpr, BLOCK: gl.constexpr, LOADED: gl.constexpr):  # fmt: skip
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_output, 2)
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, of_scores)
    o = gl.zeros([ROWS, D], gl.float32, of_output)
    nothing = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, of_scores))
    stage = stages.index(part)
    turn = 0  # the tile's number, which is that of its queries in their ring
    block = 0  # the number of the block in the rings of keys and values
    tile, ahead = next_tile(batch, look_ahead(batch, POSITIONAL), BLOCK, POSITIONAL)
    following, ahead = next_tile(batch, ahead, BLOCK, POSITIONAL)
    while tile.blocks > 0:
        queries.wait_full(turn)
        if _mine(tile, part):
            index = 0  # of the block in the tile
            q = _queries(queries, turn, zeros, part, LOADED)
            keys.wait_full(block)
            s = warpgroup_mma(q, keys.matrix(block, 0, 1).permute([1, 0]), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            keys.free(block)
            if not LOADED and tile.blocks == 1:
                queries.free(turn)
            y, total, peak, rest = _weighed(s, nothing, tile, index, batch, a, b, part, KIND, POSITIONAL, BLOCK)
            p = gl.convert_layout(y, of_weights)
            while (index < tile.blocks - 1) | _mine(following, part):
                last = index == tile.blocks - 1
                coming = either(last, following, tile)
                index_coming = gl.where(last, 0, index + 1)
                if last:
                    turn += 1
                    queries.wait_full(turn)
                    if LOADED:
                        q = _queries(queries, turn, zeros, part, LOADED)
                if not LOADED:
                    q = _queries(queries, turn, zeros, part, LOADED)
                keys.wait_full(block + 1)
                k = keys.matrix(block + 1, 0, 1).permute([1, 0])
                s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
                values.wait_full(block)
                o = warpgroup_mma(p, values.matrix(block, 0, 1), o, use_acc=index > 0, is_async=True)
                if last:
                    following, ahead = next_tile(batch, ahead, BLOCK, POSITIONAL)  # while products run
                s = warpgroup_mma_wait(1, [s])
                keys.free(block + 1)
                if not LOADED and index_coming == coming.blocks - 1:
                    queries.free(turn)
                before = gl.where(last, float("-inf"), peak)
                y, more, higher, rest = _weighed(
                    s, before, coming, index_coming, batch, a, b, part, KIND, POSITIONAL, BLOCK
                )
                o, p = warpgroup_mma_wait(0, [o, p])
                values.free(block)
                if last:
                    _finish(o, total, peak, tile, out_target, stage, LSE, batch.heads, out_scale, part, KIND, D)
                elif KIND == "softmax":
                    o = o * gl.expand_dims(gl.convert_layout(rest, gl.SliceLayout(1, of_output)), 1)
                if KIND == "softmax":
                    total = total * rest + more  # rest is 0 in a tile's first block
                    peak = higher
                p = gl.convert_layout(y, of_weights)
                tile = coming
                index = index_coming
                block += 1
            values.wait_full(block)
            o = warpgroup_mma(p, values.matrix(block, 0, 1), o, use_acc=index > 0, is_async=True)
            o, p = warpgroup_mma_wait(0, [o, p])
            values.free(block)
            block += 1
            _finish(o, total, peak, tile, out_target, stage, LSE, batch.heads, out_scale, part, KIND, D)
        else:
            queries.free(turn)
            for _ in range(tile.blocks):
                keys.wait_full(block)
                keys.free(block)
                values.wait_full(block)
                values.free(block)
                block += 1
        tile = following
        following, ahead = next_tile(batch, ahead, BLOCK, POSITIONAL)
        turn += 1
    tma.store_wait(0)


# The sizes of a batch must not be compiled in: every batch would have a kernel of its own.
_SIZES = ["places", "heads", "group", "behind", "ahead"]


@gluon.jit(do_not_specialize=_SIZES)
def forward_kernel(ORDER, Q_OFFSETS, K_OFFSETS, LSE, q_source, k_source, v_source, out_target,  # type: ignore[no-untyped-def]
                   places, heads, group, a, b, out_scale, behind, ahead,
                   KIND: gl.constexpr, POSITIONAL: gl.constexpr, BROADCAST: gl.constexpr,
                   D: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr, LOADED: gl.constexpr):  # fmt: skip
    """Output [N, heads, D] and for softmax LSE [N, heads] of a schedule's tiles of HEIGHT queries.

    ORDER as `schedule.tiles` gives it, offsets int64 [B+1]; the descriptors (gemctl/kernels/hopper/ragged.py) have
    blocks of ROWS rows, those of keys and values BLOCK. a, b: `scores.folded`; for softmax a = scale · log2 e > 0.
    SLOTS of keys and of values.
    """
    batch = Batch(ORDER, Q_OFFSETS, K_OFFSETS, places, heads, behind, ahead)
    queries = ring(2, CONSUMERS, ROWS, D, q_source)
    keys = ring(SLOTS, 1, BLOCK, D, k_source)
    values = ring(SLOTS, 1, BLOCK, D, v_source)
    stages = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, 1, 1, ROWS, D], out_target.layout)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (batch, out_target, LSE, queries, keys, values, stages, a, b, out_scale, 0, KIND, POSITIONAL, D, BLOCK, LOADED)),  # noqa: E501
            (_consume, (batch, out_target, LSE, queries, keys, values, stages, a, b, out_scale, 1, KIND, POSITIONAL, D, BLOCK, LOADED)),  # noqa: E501
            (_produce, (batch, q_source, k_source, v_source, queries, keys, values, group, POSITIONAL, BROADCAST, D, BLOCK)),  # noqa: E501
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
