"""Buffers with guard zones: a kernel that writes outside of its outputs, or leaves part of them unwritten, is seen."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gemctl.kernels import schedule
from gemctl.kernels.block_attention import triton as block
from gemctl.kernels.gdpa import triton as gdpa
from gemctl.kernels.hopper import host as hopper
from gemctl.kernels.jagged_flash_attention import triton as flash
from gemctl.kernels.pooled_attention import triton as pooled

MODULES = (schedule, block, gdpa, flash, pooled, hopper)
ZONE = 64 << 10  # bytes before and behind each buffer
POISON = 0xFF  # as a float of any width NaN, as an integer −1


class Guards:
    """Makes buffers inside of poisoned ones; `check` looks at their surroundings."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Stands in for `triton_launch.empty`: poisoned, with poisoned zones."""
        size = torch.Size(shape).numel() * dtype.itemsize
        padded = -(-size // 16) * 16
        buffer = torch.full((padded + 2 * ZONE,), POISON, dtype=torch.uint8, device=device)
        self.buffers.append(buffer)
        return buffer[ZONE : ZONE + size].view(dtype).view(*shape)

    def copy(self, x: Tensor) -> Tensor:
        """x inside of zones, so that what is read beyond it is NaN."""
        return self.empty(x.shape, x.dtype, x.device).copy_(x)

    def check(self) -> None:
        for buffer in self.buffers:
            assert bool((buffer[:ZONE] == POISON).all()), "written before a buffer"
            assert bool((buffer[-ZONE:] == POISON).all()), "written behind a buffer"


@contextmanager
def guarded() -> Iterator[Guards]:
    """Within it all buffers of the Triton backends are guarded; checked at the end."""
    guards = Guards()
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "empty", guards.empty)
        yield guards
    guards.check()
