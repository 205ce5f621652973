"""Tile sizes of the Triton kernels: a fixed table, so that a result never depends on timing.

Chosen on an H200 (docs/benchmarks.md); GPUs with less shared memory than A100 and float32 take small tiles.
"""

from enum import StrEnum

from torch import Tensor

from gemctl.kernels.triton_launch import Tiling, has_large_shared_memory

PRECISION = "ieee"  # of float32 products; for shorter dtypes it means nothing


class Part(StrEnum):
    """The kernels that have tile sizes."""

    FORWARD = "forward"
    GRAD_Q = "grad_q"
    GRAD_KV = "grad_kv"
    GRAD_BIAS = "grad_bias"


LARGE = {
    Part.FORWARD: Tiling(128, 64, 8, 3),
    Part.GRAD_Q: Tiling(128, 64, 8, 2),
    Part.GRAD_KV: Tiling(128, 64, 8, 2),
    Part.GRAD_BIAS: Tiling(64, 64, 4, 1),
}
SMALL = {
    Part.FORWARD: Tiling(64, 32, 4, 2),
    Part.GRAD_Q: Tiling(64, 32, 4, 2),
    Part.GRAD_KV: Tiling(64, 32, 4, 2),
    Part.GRAD_BIAS: Tiling(32, 32, 4, 1),
}
FLOAT32 = dict.fromkeys(Part, Tiling(32, 32, 4, 1))


def tiling(part: Part, q: Tensor, biased: bool = False) -> Tiling:
    """The tile sizes of one kernel for tensors like q; a bias takes registers and shared memory, too."""
    if q.dtype.itemsize > 2:
        return FLOAT32[part]
    return (LARGE if has_large_shared_memory(q.device) and not biased else SMALL)[part]
