"""Tile sizes of the Triton kernels of jagged attention: a fixed table, so that a result never depends on timing.

Measured on an H200 (docs/benchmarks.md), where a program's own tile should not be much longer than the sequences, and
two or three programs on a multiprocessor hide each other's beginnings and ends. Which column is taken depends on the
mean length, known from shapes alone. float32, a bias and GPUs with little shared memory take small tiles.
"""

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gemctl.kernels.tables import Table, is_long
from gemctl.kernels.triton_launch import Tiling, has_large_shared_memory, reach

# Of float32 products; shorter dtypes do not heed it. Three TF32 products keep float32's precision (error 3e-7, and 5e-7
# without tensor cores) and ran 3.4 times as fast on an H200.
PRECISION = "tf32x3" if torch.version.hip is None else "ieee"


class Part(StrEnum):
    """The kernels that have tile sizes."""

    FORWARD = "forward"
    GRAD_Q = "grad_q"
    GRAD_KV = "grad_kv"
    GRAD_BIAS = "grad_bias"


# (short sequences, long ones)
SOFTMAX = {
    Part.FORWARD: (Tiling(128, 32, 4, 3), Tiling(128, 64, 8, 3)),
    Part.GRAD_Q: (Tiling(64, 32, 4, 3), Tiling(64, 64, 4, 2)),
    Part.GRAD_KV: (Tiling(64, 32, 4, 3), Tiling(128, 32, 8, 3)),
}
ACTIVATION = {
    Part.FORWARD: (Tiling(64, 32, 4, 3), Tiling(128, 64, 8, 3)),
    Part.GRAD_Q: (Tiling(64, 32, 4, 3), Tiling(128, 64, 8, 3)),
    Part.GRAD_KV: (Tiling(64, 32, 4, 3), Tiling(64, 32, 4, 3)),
}
SMALL = Tiling(64, 32, 4, 2)
FLOAT32 = Tiling(32, 32, 4, 1)


@lru_cache(maxsize=256)
def _tilings(part: Part, kind: str, dtype: torch.dtype, device: torch.device, biased: bool) -> tuple[Tiling, Tiling]:
    if dtype.itemsize > 2:
        return FLOAT32, FLOAT32
    if biased or not has_large_shared_memory(device):
        return SMALL, SMALL
    return (SOFTMAX if kind == "softmax" else ACTIVATION)[part]


def tiling(part: Part, kind: str, own: Tensor, batch: int, biased: bool = False) -> Tiling:
    """The tile sizes of one kernel; `own` is the side whose rows it owns, of `batch` sequences."""
    return _tilings(part, kind, own.dtype, own.device, biased)[is_long(own.shape[0], batch)]


def attention_tables(
    kind: str, dtype: torch.dtype, device: torch.device, causal: bool, window: int | None, biased: bool = False
) -> tuple[Table, ...]:
    """The tables of the forward and of the gradients of q and of k and v."""
    behind, ahead = reach(causal, window)
    forward, grad_q, grad_kv = (
        [tiling.own for tiling in _tilings(part, kind, dtype, device, biased)]
        for part in (Part.FORWARD, Part.GRAD_Q, Part.GRAD_KV)
    )
    return (
        Table(False, forward[0], forward[1], behind, ahead),
        Table(False, grad_q[0], grad_q[1], behind, ahead),
        Table(True, grad_kv[0], grad_kv[1], ahead, behind),  # a key sees the queries that see it
    )


class Sizes(NamedTuple):
    """The constexprs of the attention kernels but the last ones, BM, BN and PRECISION."""

    KIND: str
    FAST: bool
    POSITIONAL: bool
    BROADCAST: bool
    BIASED: bool
    D: int
    BLOCK_D: int
