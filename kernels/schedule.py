"""The tile schedule: which tiles a jagged batch has, longest first, made on its device without a host sync.

A tile is `height` rows of one sequence. Only tiles that exist are listed, sorted by how many blocks of the other side
they visit, so a GPU's block queue, which hands the next program to whichever multiprocessor is free, deals them as
longest-first greedy does. (Dealt in advance, zigzag, the heaviest multiprocessor has up to 2% more on ordinary batches,
and a sixth more where one row is very long: tests/kernels/test_schedule.py.) All heads of a tile run side by side.

A schedule depends on the offsets alone and is kept for the other layers and the backward of the same batch. It is found
again by the offsets' memory and version counter, so offsets may be changed in place by PyTorch operations, but not
behind PyTorch's back.

Two launches, a counting sort: `_count` finds each slot's tile and its class of length, `_place` its position. Slot
offsets[b] // height + b + m is tile m of sequence b, so no prefix sum is needed to find a tile; the slots in between
are those that do not exist.
"""

from collections import OrderedDict
from threading import Lock

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemctl.kernels.triton_launch import FAR, Tiling, empty, launch

BLOCK = 64  # rows of the other side that count as one unit of length
CHUNK = 512  # slots of a program, placed by PIECE
PIECE = 128
CLASSES = 256  # of length: exact up to 32 blocks, then 16 for each doubling, up to 60,000 blocks
KEPT = 64  # schedules: some ten of one batch, for its kinds of layers and kernels
_TILING = Tiling(CHUNK, PIECE, 8, 1)

_cache: OrderedDict[tuple[object, ...], tuple[Tensor, tuple[Tensor, ...]]] = OrderedDict()
_lock = Lock()


def tiles(
    offsets: Tensor, tokens: int, height: int, other: Tensor | None = None, behind: int = FAR, ahead: int = FAR
) -> Tensor:
    """Tiles of the sequences in `offsets` (int64 [B+1], `tokens` in all), longest first.

    Returns int64 [tokens // height + B]: sequence << 32 | tile, then −1 for what does not exist. `other`: offsets of
    the side that a tile loops over; rows see `behind` positions back and `ahead` forward there, aligned at the last
    row (gemctl/kernels/visibility.py). Without `other` a tile's length is its number of rows.
    """
    stream = torch.cuda.current_stream(offsets.device).cuda_stream if offsets.is_cuda else 0
    sources = (offsets,) if other is None else (offsets, other)
    # A capture must hold the launches itself; tensors of inference mode have no version counter.
    if any(x.is_inference() for x in sources) or (offsets.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _build(offsets, tokens, height, other, behind, ahead)
    marks = tuple((x.data_ptr(), x.shape[0], x.stride(0), x._version, x.device) for x in sources)
    key = (*marks, tokens, height, behind, ahead, stream)
    with _lock:
        if key not in _cache:
            # Holding the offsets keeps their memory from being given to other offsets.
            _cache[key] = _build(offsets, tokens, height, other, behind, ahead), sources
            while len(_cache) > KEPT:
                _cache.popitem(last=False)
        _cache.move_to_end(key)
        return _cache[key][0]


def _build(offsets: Tensor, tokens: int, height: int, other: Tensor | None, behind: int, ahead: int) -> Tensor:
    batch, device = offsets.shape[0] - 1, offsets.device
    slots = tokens // height + batch if batch else 0
    chunks = triton.cdiv(slots, CHUNK)
    order, found = (empty((slots,), torch.int64, device) for _ in range(2))
    classes, counts = (empty((n,), torch.int32, device) for n in (slots, chunks * CLASSES))
    offsets = offsets.contiguous()
    second = offsets if other is None else other.contiguous()
    sizes = {"HEIGHT": height, "BLOCK": BLOCK, "CHUNK": CHUNK, "CLASSES": CLASSES, "PAIRS": other is not None}
    steps = batch.bit_length()
    launch(
        _count, chunks, _TILING, offsets, second, found, classes, counts, batch, slots, steps, behind, ahead, **sizes
    )
    sizes = {"CHUNK": CHUNK, "PIECE": PIECE, "CLASSES": CLASSES}
    launch(_place, chunks, _TILING, found, classes, counts, order, slots, chunks, **sizes)
    return order


@triton.jit
def span(first: tl.tensor, last: tl.tensor, shift: tl.tensor, behind: tl.tensor, ahead: tl.tensor, length: tl.tensor):  # type: ignore[no-untyped-def]
    """Positions low … high−1 of the other side, `length` long, that rows first … last−1 see."""
    low = tl.minimum(tl.maximum(first + shift - behind, 0), length)
    return low, tl.maximum(tl.minimum(last + shift + ahead, length), low)


@triton.jit
def _count(
    offsets: tl.tensor,
    other: tl.tensor,
    found: tl.tensor,
    classes: tl.tensor,
    counts: tl.tensor,
    batch: tl.tensor,
    slots: tl.tensor,
    steps: tl.tensor,
    behind: tl.tensor,
    ahead: tl.tensor,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CLASSES: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """The tile of each slot and its class of length, 0 where there is none; how often each class occurs in a chunk."""
    chunk = tl.program_id(0)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    low = tl.zeros([CHUNK], tl.int32)
    high = low + (batch - 1)
    for _ in range(steps):  # the last sequence whose first slot is not behind this one
        middle = (low + high + 1) // 2
        after = tl.load(offsets + middle) // HEIGHT + middle <= slot
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle - 1)
    start = tl.load(offsets + low)
    length = (tl.load(offsets + low + 1) - start).to(tl.int32)
    tile = slot - (start // HEIGHT).to(tl.int32) - low
    first = tile * HEIGHT
    rows = tl.minimum(HEIGHT, length - first)
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
    tl.store(found + slot, tl.where(kind > 0, packed, -1), mask=slot < slots)
    tl.store(classes + slot, kind, mask=slot < slots)
    held = tl.histogram(kind, CLASSES)
    outside = tl.maximum((chunk + 1) * CHUNK - slots, 0)  # slots of the last chunk beyond the end count as class 0
    held = tl.where(tl.arange(0, CLASSES) == 0, held - outside, held)
    tl.store(counts + chunk * CLASSES + tl.arange(0, CLASSES), held)


@triton.jit
def _place(
    found: tl.tensor,
    classes: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    slots: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    CLASSES: tl.constexpr,
) -> None:
    """Writes each tile behind all longer ones, and among those of its class in the order of their slots."""
    chunk = tl.program_id(0)
    kinds = tl.arange(0, CLASSES)
    total = tl.zeros([CLASSES], tl.int32)
    before = tl.zeros([CLASSES], tl.int32)
    for first in range(0, chunks, 32):
        index = first + tl.arange(0, 32)[:, None]
        held = tl.load(counts + index * CLASSES + kinds[None, :], mask=index < chunks, other=0)
        total += tl.sum(held, 0)
        before += tl.sum(tl.where(index < chunk, held, 0), 0)
    start = slots - tl.cumsum(total, 0) + before
    earlier = tl.arange(0, PIECE)[None, :] < tl.arange(0, PIECE)[:, None]
    for piece in range(0, CHUNK, PIECE):
        slot = chunk * CHUNK + piece + tl.arange(0, PIECE)
        kind = tl.load(classes + slot, mask=slot < slots, other=0)
        rank = tl.sum(((kind[:, None] == kind[None, :]) & earlier).to(tl.int32), 1)
        place = tl.gather(start, kind, 0) + rank
        tl.store(order + place, tl.load(found + slot, mask=slot < slots, other=0), mask=slot < slots)
        start += tl.histogram(kind, CLASSES)
