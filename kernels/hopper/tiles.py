"""Which tile a program takes when, and which blocks of keys a tile visits.

The schedule (gemctl/kernels/schedule.py) lists the tiles of a batch, those of the longest sequences first; every tile
is there once for each head. A program takes its tiles from that list to and fro, like a dealer who turns round after
each row: program g of P takes places g, 2P − 1 − g, 2P + g, … So nothing is dealt out in advance, and no counter is
shared.

The tiles of one sequence stand side by side, so programs that run at the same time read the same keys from L2. With
causal they are of different lengths, so the list then has pairs (two tiles' rows an item): of a sequence with n tiles
the j-th from the end and the j-th from the start, all pairs of a sequence visit equally many blocks.
"""

import triton
import triton.language as tl

from gemctl.kernels.schedule import span


@triton.jit
def place(turn: tl.tensor, program: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """The place in the list of a program's turn-th tile."""
    return turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)


@triton.jit
def first_row(item, second, length, HEIGHT: tl.constexpr, PAIRED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where in its sequence of `length` rows the tile of an item begins; `length` where a pair has no second one.

    item: the number of the tile, or with `PAIRED` of the pair. second: 1 for a pair's second tile, else 0.
    """
    first = item * HEIGHT
    if PAIRED:
        last = tl.cdiv(length, HEIGHT) - 1
        first = tl.where(second == 0, last - item, item) * HEIGHT
        first = tl.where((second == 1) & (last - item <= item), length, first)
    return first


@triton.jit
def visits(first, last, shift, behind, ahead, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first position, number) of the blocks of the other side that rows first … last−1 visit.

    At least one, so that every tile goes through the pipeline: where rows see nothing, it is masked or empty.
    """
    low, high = span(first, last, shift, behind, ahead, length)
    start = low // BLOCK * BLOCK
    return start, tl.maximum(tl.cdiv(high - start, BLOCK), 1)


@triton.jit
def partly(start, first, last, shift, behind, ahead, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a position of the block at `start` is hidden from one of the rows first … last−1."""
    return (start + (BLOCK - 1) > first + shift + ahead) | (start < last - 1 + shift - behind)
