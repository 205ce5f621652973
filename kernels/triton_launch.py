"""What every Triton backend shares on the host: whether it runs here, buffers, tile sizes, and the one way to launch.

Outputs come from `empty` and kernels start through `launch` alone, so that tests can put guard zones round every buffer
and compile every variant for a GPU that is not there.

A launch through Triton looks at every argument again, some 40 µs where the launch itself takes 5. So the compiled
kernel is kept by what it was specialised for, and started as Triton itself starts it.
"""

from collections.abc import Sequence
from functools import cache, reduce
from importlib.util import find_spec
from operator import attrgetter, methodcaller, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemctl import env

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 128
FAR = 1 << 30  # no limit on how far a query sees; more than any sequence's length
FAR_ROWS = 1 << 24  # a stride by which 128 rows go beyond what 32 bits count
# Bytes of a multiprocessor's shared memory from which the large tiles fit (Hopper has 228 KiB, A100 164, others 100).
LARGE_SHARED_MEMORY = 160 << 10


class Tiling(NamedTuple):
    """Rows of a program's own tile, rows of a block of the other side, warps and pipeline stages."""

    own: int
    other: int
    warps: int
    stages: int


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the Triton kernels can't run on such tensors, or None. In Triton's interpreter they run on the CPU."""
    interpreted = env.triton_interpret()
    if device.type != "cuda" and not (interpreted and device.type == "cpu"):
        return f"needs tensors on a GPU, not on {device}"
    if dtype not in DTYPES:
        return f"needs bfloat16, float16 or float32, not {str(dtype).removeprefix('torch.')}"
    if interpreted and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices wrongly"
    if head_dim > MAX_HEAD_DIM:
        return f"needs a head_dim of at most {MAX_HEAD_DIM}, not {head_dim}"
    return None if find_spec("triton") else "triton is not installed"


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer that a kernel writes in full."""
    return torch.empty(shape, dtype=dtype, device=device)


def rows(x: Tensor) -> Tensor:
    """x itself, or a copy where the head dimension is not the fastest one, or a tile's rows lie 2³¹ elements apart."""
    stride = x.stride()
    return x if stride[-1] == 1 and stride[0] < FAR_ROWS else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of tokens and heads, tensor by tensor."""
    found: tuple[int, ...] = ()
    for x in tensors:
        found += x.stride()[:2]
    return found


def reach(causal: bool, window: int | None) -> tuple[int, int]:
    """How many positions back and forward a query sees."""
    behind = FAR if window is None else min(window, FAR)
    return behind, 0 if causal else behind


def block_dim(head_dim: int) -> int:
    """The power of two, at least 16, that holds a head."""
    return max(16, 1 << (head_dim - 1).bit_length())


@cache
def has_hardware_tanh() -> bool:
    """Whether kernels may use the tanh instruction of NVIDIA's GPUs; the interpreter and others do not have it."""
    return torch.version.hip is None and not env.triton_interpret()


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether the large tiles fit on this GPU; True where there is none (they are compiled for Hopper)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return _shared_memory(device.index or 0) >= LARGE_SHARED_MEMORY


@cache
def _shared_memory(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).shared_memory_per_multiprocessor)


_address, _dtype = methodcaller("data_ptr"), attrgetter("dtype")
_compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
MOST_COMPILED = 4096  # kernels kept; their keys hold scales, of which a caller may have any number


def launch(
    kernel: Any,
    programs: int,
    tiling: Tiling,
    tensors: Sequence[Tensor],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
    varying: tuple[int, ...] = (),
) -> None:
    """Starts `programs` programs of a kernel on the current stream of the first tensor's device.

    The kernel's arguments in their order: the tensors; `numbers`, for which it may be specialised; those that differ
    from batch to batch, for which it must not be (`do_not_specialize`); the constexprs.
    """
    if programs == 0:
        return
    index = tensors[0].get_device()
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(kernel, programs, tiling, tensors, numbers, constants, varying)
    addresses = [*map(_address, tensors)]
    aligned = index >= 0 and reduce(or_, addresses) % 16 == 0
    key = (kernel.fn, index, tiling, numbers, constants, *map(_dtype, tensors))
    found = _compiled.get(key) if aligned else None
    if found is not None:
        run, function, metadata = found
        stream = torch._C._cuda_getCurrentRawStream(index)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *numbers, *varying, *constants)
        return
    given = (*tensors, *numbers, *varying, *constants)
    compiled = kernel[(programs,)](*given, num_warps=tiling.warps, num_stages=tiling.stages)
    if aligned:
        if len(_compiled) == MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
