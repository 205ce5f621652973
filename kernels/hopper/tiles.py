"""Which tile a program takes when, and which blocks of keys a tile visits.

The schedule (gemctl/kernels/schedule.py) lists the tiles of a batch, longest first; every tile is there once a head.
A program takes its tiles from that list to and fro, like a dealer who turns round after each row: program g of P takes
places g, 2P − 1 − g, 2P + g, … So nothing has to be dealt out in advance, and no counter is shared.
"""

import triton
import triton.language as tl

from gemctl.kernels.schedule import span


@triton.jit
def place(turn: tl.tensor, program: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """The place in the list of a program's turn-th tile."""
    return turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)


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
