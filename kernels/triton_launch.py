"""What every Triton backend shares on the host: whether it runs here, buffers, tile sizes, and the one way to launch.

Outputs come from `empty` and kernels start through `launch` alone, so that tests can put guard zones round every buffer
and compile every variant for a GPU that is not there.

    python -c "import torch; from gemctl.kernels.triton_launch import refusal; print(refusal(torch.zeros(1)))"
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gemctl import env

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 128
FAR = 1 << 30  # no limit on how far a query sees; more than any sequence's length
# Bytes of a multiprocessor's shared memory from which the large tiles fit (Hopper has 228 KiB, A100 164, others 100).
LARGE_SHARED_MEMORY = 160 << 10


@dataclass(frozen=True)
class Tiling:
    """Rows of a program's own tile, rows of a block of the other side, warps and pipeline stages."""

    own: int
    other: int
    warps: int
    stages: int


def refusal(q: Tensor) -> str | None:
    """Why the Triton kernels can't run on tensors like q, or None. In Triton's interpreter they run on the CPU."""
    interpreted = env.triton_interpret()
    if q.device.type != "cuda" and not (interpreted and q.device.type == "cpu"):
        return f"needs tensors on a GPU, not on {q.device}"
    if q.dtype not in DTYPES:
        return f"needs bfloat16, float16 or float32, not {str(q.dtype).removeprefix('torch.')}"
    if interpreted and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices wrongly"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"needs a head_dim of at most {MAX_HEAD_DIM}, not {q.shape[-1]}"
    return None if find_spec("triton") else "triton is not installed"


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer that a kernel writes in full."""
    return torch.empty(*shape, dtype=dtype, device=device)


def rows(x: Tensor) -> Tensor:
    """x itself, or a copy where the head dimension is not the fastest one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of tokens and heads, tensor by tensor."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def reach(causal: bool, window: int | None) -> tuple[int, int]:
    """How many positions back and forward a query sees."""
    behind = FAR if window is None else min(window, FAR)
    return behind, 0 if causal else behind


def block_dim(head_dim: int) -> int:
    """The power of two, at least 16, that holds a head."""
    return max(16, 1 << (head_dim - 1).bit_length())


def has_hardware_tanh() -> bool:
    """Whether kernels may use the tanh instruction of NVIDIA's GPUs; the interpreter and others do not have it."""
    return torch.version.hip is None and not env.triton_interpret()


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether the large tiles fit on this GPU; True where there is none (they are compiled for Hopper)."""
    return device.type != "cuda" or _shared_memory(device.index or 0) >= LARGE_SHARED_MEMORY


@cache
def _shared_memory(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).shared_memory_per_multiprocessor)


def launch(kernel: Any, programs: int, tiling: Tiling, *args: Any, **constants: Any) -> None:
    """Starts `programs` programs of a kernel on the current stream of the first argument's device."""
    if programs == 0:
        return
    device = args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](*args, **constants, num_warps=tiling.warps, num_stages=tiling.stages)
