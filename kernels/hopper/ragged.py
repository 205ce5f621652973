"""TMA descriptors of packed sequences: a copy that stops at the end of a sequence, wherever that is.

The copy engine (TMA) zero-fills what it loads from beyond a tensor's shape and does not store there, but a packed
tensor [N, H, D] has one shape for all of its sequences. So the descriptor has two more dimensions, whose strides cancel
modulo 2⁶⁴ (r is the stride of a row):

    shape    [2³¹ − 2¹⁶,   2³¹ − 2¹⁶,   2³⁰,                       H·D   ]
    strides  [2³⁴ − r,     r,           r,                         1     ]   in elements of two bytes
    at       [2³⁰,         end,         2³⁰ − (end − start) + i,   column]

The address of that place is base + 2³⁵·2³⁰ + (end + start − end + i)·r + column, in bytes modulo 2⁶⁴: row start + i.
And the third coordinate leaves its shape where start + i = end. So one descriptor serves all sequences of a batch, and
their lengths stay on the GPU. (The idea is that of triton/tools/ragged_tma.py.)

`start` and `end` are rows of the packed tensor, so there may be nearly 2³¹ of them; a sequence may have 2³⁰.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ALIGNMENT = 8  # elements of two bytes in the 16 bytes that TMA asks for
LONGEST = gl.constexpr(1 << 30)
_MANY = 0x7FFF0000


def packed(x: Tensor) -> Tensor:
    """x [N, H, D] of two-byte elements itself, or a copy where a descriptor cannot describe its strides or address."""
    head = x.shape[2]
    heads_adjoin = x.stride(2) == 1 and (x.stride(1) == head or x.shape[1] == 1)
    rows_aligned = x.stride(0) % ALIGNMENT == 0 and x.stride(0) >= head * x.shape[1]
    if heads_adjoin and rows_aligned and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class TensorMap(NamedTuple):
    """What a compiled kernel asks of a descriptor; its blocks and their layout are compiled in."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"


def tensor_map(x: Tensor) -> TensorMap:
    """The ragged view of x [N, H, D], as `packed` gives it."""
    row, (heads, head) = x.stride(0), x.shape[1:]
    return TensorMap(x, (_MANY, _MANY, 1 << 30, heads * head), ((1 << 34) - row, row, row, 1))


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """The same for a kernel that is to be compiled: with blocks of `rows` rows and one head.

    They are swizzled over 128 bytes, as wgmma reads them.
    """
    _, shape, strides, _ = tensor_map(x)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(shape), list(strides), [1, 1, rows, x.shape[2]], layout)


@gluon.jit
def load(source, start, end, column, full, block):  # type: ignore[no-untyped-def]
    """Starts to copy rows start … of the sequence that ends at `end` into `block`, zeros behind the end."""
    tma.async_copy_global_to_shared(source, [LONGEST, end, LONGEST - (end - start), column], full, block)


@gluon.jit
def store(target, start, end, column, block):  # type: ignore[no-untyped-def]
    """Starts to copy `block` to rows start … of the sequence that ends at `end`, but none behind the end."""
    tma.async_copy_shared_to_global(target, [LONGEST, end, LONGEST - (end - start), column], block)
