"""The parts that all Hopper kernels are made of: rings of blocks between the warps, turns, tiles. See
kernels/README.md.

A ring is `full.shape[0]` blocks of shared memory with two barriers each: the producer waits until a block is empty and
starts a copy that will mark it full; a consumer waits until it is full and marks it empty. Block n of a stream lies in
slot n % slots, and its barriers are in phase n // slots % 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from gemctl.kernels.hopper import ragged
from gemctl.kernels.hopper.tiles import first_row, partly, place, visits

CONSUMERS = gl.constexpr(2)  # warpgroups
ROWS = gl.constexpr(64)  # of a consumer: the height of wgmma
HEIGHT = gl.constexpr(128)  # rows of a tile: CONSUMERS · ROWS


@aggregate
class Ring:
    """Blocks [slots, 1, 1, rows, D] and the barriers of each; `slots` at once in flight."""

    blocks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, blocks, full, empty, slots):  # type: ignore[no-untyped-def]
        self.blocks = blocks
        self.full = full
        self.empty = empty
        self.slots = gl.constexpr(slots)

    @gluon.jit
    def wait_empty(self, number):  # type: ignore[no-untyped-def]
        """The producer's: until the slot of block `number` may be filled."""
        mbarrier.wait(self.empty.index(number % self.slots), (number // self.slots & 1) ^ 1)

    @gluon.jit
    def expect(self, number, size: gl.constexpr):  # type: ignore[no-untyped-def]
        """Block `number` is full once `size` bytes have come; returns the barrier to give to the copies."""
        full = self.full.index(number % self.slots)
        mbarrier.expect(full, size)
        return full

    @gluon.jit
    def wait_full(self, number):  # type: ignore[no-untyped-def]
        """A consumer's: until block `number` is there."""
        mbarrier.wait(self.full.index(number % self.slots), number // self.slots & 1)

    @gluon.jit
    def free(self, number):  # type: ignore[no-untyped-def]
        """A consumer has done with block `number`."""
        mbarrier.arrive(self.empty.index(number % self.slots), count=1)

    @gluon.jit
    def matrix(self, number, part: gl.constexpr, parts: gl.constexpr):  # type: ignore[no-untyped-def]
        """[rows, D], part `part` of the `parts` that block `number` is made of."""
        block = self.blocks.index(number % self.slots * parts + part)
        return block.reshape([self.blocks.shape[3], self.blocks.shape[4]])


@gluon.jit
def ring(slots: gl.constexpr, parts: gl.constexpr, rows: gl.constexpr, D: gl.constexpr, source):  # type: ignore[no-untyped-def]
    """A ring of `slots` blocks, each of `parts` matrices [rows, D], that both consumers read."""
    blocks = gl.allocate_shared_memory(gl.bfloat16, [slots * parts, 1, 1, rows, D], source.layout)
    full = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(slots):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return Ring(blocks, full, empty, slots)


@aggregate
class Batch:
    """The schedule and the offsets of a batch, as every warp reads them; all heads of it."""

    order: gl.tensor
    row_offsets: gl.tensor
    other_offsets: gl.tensor
    places: gl.tensor  # tiles of the schedule, times heads
    heads: gl.tensor
    behind: gl.tensor
    ahead: gl.tensor

    @gluon.constexpr_function
    def __init__(self, order, row_offsets, other_offsets, places, heads, behind, ahead):  # type: ignore[no-untyped-def]
        self.order = order
        self.row_offsets = row_offsets
        self.other_offsets = other_offsets
        self.places = places
        self.heads = heads
        self.behind = behind
        self.ahead = ahead


@aggregate
class Tile:
    """Rows of one sequence and head, and the blocks of the other side that they visit.

    Rows and others are numbered as in the packed tensors: the tile's rows from `row` on, its sequence from `row_first`
    to `row_end`, the other side's from `other_first` to `other_end`. `position` is where row `row` stands on the other
    side, `low` the first position visited there. `blocks` is 0 where there is no tile; one without rows (a
    pair's second) visits a block as all do.
    """

    row: gl.tensor
    row_first: gl.tensor
    row_end: gl.tensor
    other_first: gl.tensor
    other_end: gl.tensor
    position: gl.tensor
    low: gl.tensor
    blocks: gl.tensor
    head: gl.tensor

    @gluon.constexpr_function
    def __init__(self, row, row_first, row_end, other_first, other_end, position, low, blocks, head):  # type: ignore[no-untyped-def]
        self.row = row
        self.row_first = row_first
        self.row_end = row_end
        self.other_first = other_first
        self.other_end = other_end
        self.position = position
        self.low = low
        self.blocks = blocks
        self.head = head


@aggregate
class Ahead:
    """What has been read of the schedule for a program's coming tiles, as loads that nothing has waited for yet."""

    turn: gl.tensor  # of the tile that `item` is
    item: gl.tensor
    row_first: gl.tensor
    row_end: gl.tensor
    other_first: gl.tensor
    other_end: gl.tensor
    item_after: gl.tensor

    @gluon.constexpr_function
    def __init__(self, turn, item, row_first, row_end, other_first, other_end, item_after):  # type: ignore[no-untyped-def]
        self.turn = turn
        self.item = item
        self.row_first = row_first
        self.row_end = row_end
        self.other_first = other_first
        self.other_end = other_end
        self.item_after = item_after


@gluon.jit
def _place(turn, PAIRED: gl.constexpr):  # type: ignore[no-untyped-def]
    """The place in the schedule, heads counted, of this program's turn-th tile."""
    return place(turn // 2 if PAIRED else turn, gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _item(batch, turn, PAIRED: gl.constexpr):  # type: ignore[no-untyped-def]
    """The item of this program's turn-th tile, −1 where there is none."""
    at = _place(turn, PAIRED)
    return gl.load(batch.order + at // batch.heads, mask=at < batch.places, other=-1)


@gluon.jit
def _ahead(batch, turn, item, item_after):  # type: ignore[no-untyped-def]
    sequence = gl.maximum(item, 0) >> 32
    row_first = gl.load(batch.row_offsets + sequence)
    row_end = gl.load(batch.row_offsets + sequence + 1)
    other_first = gl.load(batch.other_offsets + sequence)
    other_end = gl.load(batch.other_offsets + sequence + 1)
    return Ahead(turn, item, row_first, row_end, other_first, other_end, item_after)


@gluon.jit
def look_ahead(batch, PAIRED: gl.constexpr):  # type: ignore[no-untyped-def]
    """The first tile of this program, to be given to `next_tile`."""
    zero = gl.program_id(0) * 0
    return _ahead(batch, zero, _item(batch, zero, PAIRED), _item(batch, zero + 1, PAIRED))


@gluon.jit
def next_tile(batch, ahead, BLOCK: gl.constexpr, PAIRED: gl.constexpr):  # type: ignore[no-untyped-def]
    """(the tile that has been read, which visits blocks of BLOCK; what is being read of the next)."""
    there = ahead.item >= 0
    row_first = ahead.row_first.to(gl.int32)
    row_end = ahead.row_end.to(gl.int32)
    other_first = ahead.other_first.to(gl.int32)
    other_end = ahead.other_end.to(gl.int32)
    number = gl.where(there, (ahead.item & 0x7FFFFFFF).to(gl.int32), 0)
    first = first_row(number, ahead.turn % 2, row_end - row_first, HEIGHT, PAIRED)
    last = gl.minimum(first + HEIGHT, row_end - row_first)
    shift = (other_end - other_first) - (row_end - row_first)
    low, blocks = visits(first, last, shift, batch.behind, batch.ahead, other_end - other_first, BLOCK)
    head = _place(ahead.turn, PAIRED) % batch.heads
    blocks = gl.where(there, blocks, 0)
    tile = Tile(row_first + first, row_first, row_end, other_first, other_end, first + shift, low, blocks, head)
    return tile, _ahead(batch, ahead.turn + 1, ahead.item_after, _item(batch, ahead.turn + 2, PAIRED))


@gluon.jit
def partly_seen(tile, index, batch, part: gl.constexpr, BLOCK: gl.constexpr, POSITIONAL: gl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the rows of consumer `part` do not see all of their tile's index-th block, or it is not all there."""
    start = tile.low + index * BLOCK
    some = start + BLOCK > tile.other_end - tile.other_first
    if POSITIONAL:
        first = tile.position + part * ROWS
        some = some | partly(start, first, first + ROWS, 0, batch.behind, batch.ahead, BLOCK)
    return some


@gluon.jit
def seen(tile, index, batch, part: gl.constexpr, BLOCK: gl.constexpr, scores, POSITIONAL: gl.constexpr):  # type: ignore[no-untyped-def]
    """Which of a tile's index-th block the rows of consumer `part` see: as `scores` [ROWS, BLOCK], or [1, BLOCK]."""
    layout: gl.constexpr = scores.type.layout
    start = tile.low + index * BLOCK
    last = tile.other_end - tile.other_first - start - 1
    other = gl.expand_dims(gl.arange(0, BLOCK, gl.SliceLayout(0, layout)), 0)
    if POSITIONAL:
        row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
        position = row + (tile.position + part * ROWS - start)
        there = (other <= gl.minimum(position + batch.ahead, last)) & (other >= position - batch.behind)
    else:
        there = other <= last
    return there


@gluon.jit
def put(values, stage, target, row, row_end, column):  # type: ignore[no-untyped-def]
    """Writes [ROWS, D] in bfloat16 by way of `stage` to the rows from `row` on, those before `row_end`."""
    tma.store_wait(0)  # the stage's last copy has been read
    gl.thread_barrier()
    stage.reshape([stage.shape[2], stage.shape[3]]).store(values)
    fence_async_shared()
    gl.thread_barrier()
    ragged.store(target, row, row_end, column, stage)


@gluon.jit
def either(condition, one, other):  # type: ignore[no-untyped-def]
    """The tile `one` where the condition holds, else `other`."""
    return Tile(
        gl.where(condition, one.row, other.row),
        gl.where(condition, one.row_first, other.row_first),
        gl.where(condition, one.row_end, other.row_end),
        gl.where(condition, one.other_first, other.other_first),
        gl.where(condition, one.other_end, other.other_end),
        gl.where(condition, one.position, other.position),
        gl.where(condition, one.low, other.low),
        gl.where(condition, one.blocks, other.blocks),
        gl.where(condition, one.head, other.head),
    )
