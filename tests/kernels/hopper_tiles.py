"""The tile functions of the Hopper kernels, for many rows at once; run in Triton's interpreter by test_hopper.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemctl.kernels.hopper.tiles import first_row, partly, place, visits


@triton.jit
def _visits(  # type: ignore[no-untyped-def]
    FIRST, LAST, SHIFT, LENGTH, START, BLOCKS, PARTLY, behind, ahead,
    N: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, N)
    first, last, shift, length = tl.load(FIRST + at), tl.load(LAST + at), tl.load(SHIFT + at), tl.load(LENGTH + at)
    start, blocks = visits(first, last, shift, behind, ahead, length, BLOCK)
    tl.store(START + at, start)
    tl.store(BLOCKS + at, blocks)
    for index in range(MOST):
        tl.store(PARTLY + at * MOST + index, partly(start + index * BLOCK, first, last, shift, behind, ahead, BLOCK))


@triton.jit
def _places(OUT, programs, TURNS: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.arange(0, N)
    for turn in range(TURNS):
        found = place(tl.full([N], turn, tl.int32), program, programs)
        tl.store(OUT + turn * programs + program, found, mask=program < programs)


@triton.jit
def _first_rows(OUT, N: tl.constexpr, HEIGHT: tl.constexpr, PAIRED: tl.constexpr):  # type: ignore[no-untyped-def]
    length = tl.arange(0, N)
    for item in range(N // HEIGHT + 1):
        for second in range(2):
            found = first_row(item, second, length, HEIGHT, PAIRED)
            tl.store(OUT + (length * (N // HEIGHT + 1) + item) * 2 + second, found)


def first_rows(lengths: int, height: int, paired: bool) -> Tensor:
    """int32 [lengths, items, 2]: the first row of each item's tiles, for sequences of 0, 1, … rows."""
    found = torch.empty(lengths, lengths // height + 1, 2, dtype=torch.int32)
    _first_rows[(1,)](found, N=lengths, HEIGHT=height, PAIRED=paired)
    return found


def visited(
    tiles: list[tuple[int, int, int, int]], behind: int, ahead: int, block: int, most: int
) -> tuple[list[int], list[int], list[list[bool]]]:
    """First position, number of blocks and whether each is seen in part, of tiles (first, last, shift, length)."""
    size = 1 << (len(tiles) - 1).bit_length()
    columns = torch.tensor(tiles + tiles[:1] * (size - len(tiles)), dtype=torch.int32).T.contiguous()
    start, blocks = (torch.empty(size, dtype=torch.int32) for _ in range(2))
    some = torch.empty(size, most, dtype=torch.bool)
    _visits[(1,)](*columns, start, blocks, some, behind, ahead, N=size, MOST=most, BLOCK=block)
    n = len(tiles)
    return start[:n].tolist(), blocks[:n].tolist(), some[:n].tolist()


def places(programs: int, turns: int) -> Tensor:
    """int32 [turns, programs]: which place each program takes in each turn."""
    found = torch.empty(turns, programs, dtype=torch.int32)
    _places[(1,)](found, programs, TURNS=turns, N=1 << (programs - 1).bit_length())
    return found
