"""The tile schedule: which tiles a jagged batch has, longest first, made on its device without a host sync.

A tile is `height` rows of one sequence. Only tiles that exist are listed, sorted by how many blocks of the other side
they visit, so a GPU's block queue, which hands the next program to whichever multiprocessor is free, deals them as
longest-first greedy does. (Dealt in advance, zigzag, the heaviest multiprocessor has up to 2% more on ordinary batches,
and a sixth more where one row is very long: tests/kernels/test_schedule.py.) All heads of a tile run side by side.

Two launches make all tables of a batch (gemctl/kernels/tables.py), a counting sort: `_count` finds each slot's tile
and its class of length, `_place` its position. Slot offsets[b] // height + b + m is tile m of sequence b, so no prefix
sum is needed to find a tile; the slots in between are those that do not exist. The tables' slots follow each other in
whole chunks, one program each.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemctl.kernels.tables import Table, slots
from gemctl.kernels.triton_launch import FAR, Tiling, empty, launch

BLOCK = 64  # rows of the other side that count as one unit of length
CHUNK = 512  # slots of a program, placed by PIECE
PIECE = 128
CLASSES = 256  # of length: exact up to 32 blocks, then 16 for each doubling, up to 60,000 blocks
MOST_TABLES = 3
_TILING = Tiling(CHUNK, PIECE, 8, 1)


def tiles(
    offsets: Tensor, tokens: int, height: int, other: Tensor | None = None, behind: int = FAR, ahead: int = FAR
) -> Tensor:
    """One table: the tiles of the sequences in `offsets` (int64 [B+1], `tokens` in all), longest first.

    Returns int64 [tokens // height + B]: sequence << 32 | tile, then −1 for what does not exist. `other`: offsets of
    the side that a tile loops over; rows see `behind` positions back and `ahead` forward there, aligned at the last
    row (gemctl/kernels/visibility.py). Without `other` a tile's length is its number of rows.
    """
    table = Table(False, height, height, behind, ahead, other is not None)
    order = build([table], offsets, offsets if other is None else other, tokens, 0)[0]
    return order[: slots(tokens, height, offsets.shape[0] - 1)]


def build(tables: Sequence[Table], q_offsets: Tensor, k_offsets: Tensor, q_tokens: int, k_tokens: int) -> list[Tensor]:
    """At most three tables of a batch, all with `pairs` or none."""
    batch, device = k_offsets.shape[0] - 1, k_offsets.device
    tokens = [k_tokens if table.of_keys else q_tokens for table in tables]
    if batch == 0 and any(tokens):
        raise ValueError(f"offsets of no sequence, but {max(tokens)} tokens")
    orders = [empty((table.length(q_tokens, k_tokens, batch),), torch.int64, device) for table in tables]
    heights = [table.height(count, batch) for table, count in zip(tables, tokens, strict=True)]
    used = [slots(count, height, batch) for count, height in zip(tokens, heights, strict=True)]
    missing = MOST_TABLES - len(tables)
    ends = list(accumulate([-(-count // CHUNK) for count in used] + [0] * missing))
    found = empty((ends[-1] * CHUNK,), torch.int64, device)
    classes, counts = (empty((ends[-1] * n,), torch.int32, device) for n in (CHUNK, CLASSES))
    outputs = orders + orders[:1] * missing
    used += [0] * missing
    sides = [int(table.of_keys) for table in tables] + [0] * missing
    reaches = [reach for table in tables for reach in (table.behind, table.ahead)] + [0] * (2 * missing)
    numbers = (batch, batch.bit_length(), *ends[:2], *used, *heights, *[1] * missing, *sides, *reaches)
    launch(
        _count,
        ends[-1],
        _TILING,
        (q_offsets, k_offsets, found, classes, counts),
        (),
        (BLOCK, CHUNK, CLASSES, tables[0].pairs),
        numbers,
    )
    launch(_place, ends[-1], _TILING, (found, classes, counts, *outputs), (), (CHUNK, PIECE, CLASSES), (*ends, *used))
    return orders


@triton.jit
def span(first: tl.tensor, last: tl.tensor, shift: tl.tensor, behind: tl.tensor, ahead: tl.tensor, length: tl.tensor):  # type: ignore[no-untyped-def]
    """Positions low … high−1 of the other side, `length` long, that rows first … last−1 see."""
    low = tl.minimum(tl.maximum(first + shift - behind, 0), length)
    return low, tl.maximum(tl.minimum(last + shift + ahead, length), low)


@triton.jit
def _of(table, first, second, third):  # type: ignore[no-untyped-def]
    """A table's own of three values."""
    return tl.where(table == 0, first, tl.where(table == 1, second, third))


_COUNTED = [
    "batch", "steps", "end0", "end1", "slots0", "slots1", "slots2", "height0", "height1", "height2",
    "keys0", "keys1", "keys2", "behind0", "ahead0", "behind1", "ahead1", "behind2", "ahead2",
]  # fmt: skip


@triton.jit(do_not_specialize=_COUNTED)
def _count(  # type: ignore[no-untyped-def]
    q_offsets, k_offsets, found, classes, counts,
    batch, steps, end0, end1, slots0, slots1, slots2, height0, height1, height2,
    keys0, keys1, keys2, behind0, ahead0, behind1, ahead1, behind2, ahead2,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CLASSES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The tile of each slot and its class of length, 0 where there is none; how often each class occurs in a chunk."""
    chunk = tl.program_id(0)
    table = (chunk >= end0).to(tl.int32) + (chunk >= end1).to(tl.int32)
    slots = _of(table, slots0, slots1, slots2)
    height = _of(table, height0, height1, height2)
    behind = _of(table, behind0, behind1, behind2)
    ahead = _of(table, ahead0, ahead1, ahead2)
    own = q_offsets
    other = k_offsets
    if _of(table, keys0, keys1, keys2) != 0:
        own = k_offsets
        other = q_offsets
    slot0 = (chunk - _of(table, 0, end0, end1)) * CHUNK
    slot = slot0 + tl.arange(0, CHUNK)
    low = tl.zeros([CHUNK], tl.int32)
    high = low + (batch - 1)
    for _ in range(steps):  # the last sequence whose first slot is not behind this one
        middle = (low + high + 1) // 2
        after = tl.load(own + middle) // height + middle <= slot
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle - 1)
    start = tl.load(own + low)
    length = (tl.load(own + low + 1) - start).to(tl.int32)
    tile = slot - (start // height).to(tl.int32) - low
    first = tile * height
    rows = tl.minimum(height, length - first)
    size = tl.cdiv(rows, 16)
    if PAIRS:
        others = (tl.load(other + low + 1) - tl.load(other + low)).to(tl.int32)
        seen_low, seen_high = span(first, first + rows, others - length, behind, ahead, others)
        size = tl.where(seen_high > seen_low, tl.cdiv(seen_high, BLOCK) - seen_low // BLOCK, 0)
    # The exponent and four bits of the mantissa: classes 2, 18, 34 … for sizes 1, 2, 4 …
    exact = (size.to(tl.float32).to(tl.int32, bitcast=True) >> 19) - (127 << 4) + 2
    kind = tl.where(size > 0, tl.minimum(exact, CLASSES - 1), 1)
    kind = tl.where((rows > 0) & (slot < slots), kind, 0)
    packed = (low.to(tl.int64) << 32) | tile.to(tl.int64)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    tl.store(found + place, tl.where(kind > 0, packed, -1))
    tl.store(classes + place, kind)
    held = tl.histogram(kind, CLASSES)
    outside = tl.maximum(slot0 + CHUNK - slots, 0)  # slots of the last chunk beyond the end count as class 0
    held = tl.where(tl.arange(0, CLASSES) == 0, held - outside, held)
    tl.store(counts + chunk * CLASSES + tl.arange(0, CLASSES), held)


@triton.jit(do_not_specialize=["end0", "end1", "end2", "slots0", "slots1", "slots2"])
def _place(  # type: ignore[no-untyped-def]
    found, classes, counts, order0, order1, order2, end0, end1, end2, slots0, slots1, slots2,
    CHUNK: tl.constexpr, PIECE: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Writes each tile behind all longer ones, and among those of its class in the order of their slots."""
    chunk = tl.program_id(0)
    table = (chunk >= end0).to(tl.int32) + (chunk >= end1).to(tl.int32)
    slots = _of(table, slots0, slots1, slots2)
    begin = _of(table, 0, end0, end1)
    order = order0
    if table == 1:
        order = order1
    if table == 2:
        order = order2
    kinds = tl.arange(0, CLASSES)
    total = tl.zeros([CLASSES], tl.int32)
    before = tl.zeros([CLASSES], tl.int32)
    end = _of(table, end0, end1, end2)
    for first in range(begin, end, 32):
        index = first + tl.arange(0, 32)[:, None]
        held = tl.load(counts + index * CLASSES + kinds[None, :], mask=index < end, other=0)
        total += tl.sum(held, 0)
        before += tl.sum(tl.where(index < chunk, held, 0), 0)
    start = slots - tl.cumsum(total, 0) + before
    earlier = tl.arange(0, PIECE)[None, :] < tl.arange(0, PIECE)[:, None]
    for piece in range(0, CHUNK, PIECE):
        slot = (chunk - begin) * CHUNK + piece + tl.arange(0, PIECE)
        stored = chunk * CHUNK + piece + tl.arange(0, PIECE)
        kind = tl.load(classes + stored)
        rank = tl.sum(((kind[:, None] == kind[None, :]) & earlier).to(tl.int32), 1)
        place = tl.gather(start, kind, 0) + rank
        tl.store(order + place, tl.load(found + stored), mask=slot < slots)
        start += tl.histogram(kind, CLASSES)
