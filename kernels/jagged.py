"""What every op asks of its inputs, checked in one place, and the lengths behind offsets.

Shapes and dtypes are checked where an op is called (so under fake tensors, too), the offsets' values where a kernel
reads them anyway. A violation is a ValueError that lists all of them. `every` makes offsets of equal lengths.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: dict[str, Tensor],
    window: int | None = None,
    more: Sequence[str] = (),
    query: str = "q",
) -> None:
    """Raises ValueError with every violation of the shared contract, and those in `more`; `query` is q's name.

    NotImplementedError for forward-mode differentiation, whose tangents an op would drop in silence.
    """
    if any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)):
        raise NotImplementedError(f"{op} has no forward-mode derivative")
    problems = [*_shape_problems({query: q, "k": k, "v": v}), *more]
    for name, tensor in offsets.items():
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape[0] < 1:
            problems.append(f"{name} must be int64 [B+1], not {tensor.dtype} {list(tensor.shape)}")
        elif not tensor.is_contiguous():  # GPU kernels would read what lies between
            problems.append(f"{name} must be contiguous, not of stride {tensor.stride(0)}")
        if tensor.device != q.device:
            problems.append(f"{name} is on {tensor.device}, {query} on {q.device}")
    if len({tensor.shape for tensor in offsets.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in offsets.items())
        problems.append(f"offsets of one batch have one length, not {shapes}")
    if window is not None and window < 0:
        problems.append(f"window must be ≥ 0 or None, not {window}")
    if problems:
        raise ValueError(f"{op}: " + "; ".join(problems))


def _shape_problems(named: dict[str, Tensor]) -> list[str]:
    wrong = [
        f"{name} must be [tokens, heads, head_dim], not {list(x.shape)}" for name, x in named.items() if x.dim() != 3
    ]
    if wrong:
        return wrong
    (query, q), (_, k), (_, v) = named.items()
    names, problems = ", ".join(named), []
    if k.shape != v.shape:
        problems.append(f"k {list(k.shape)} and v {list(v.shape)} must have one shape")
    problems += [
        f"{name} needs at least one head and a head_dim of at least 1, not {list(x.shape)}"
        for name, x in named.items()
        if 0 in x.shape[1:]
    ]
    if q.shape[2] != k.shape[2]:
        problems.append(f"head_dim of {query} ({q.shape[2]}) and k ({k.shape[2]}) differ")
    if q.shape[1] % max(1, k.shape[1]):
        problems.append(f"heads of k and v ({k.shape[1]}) must divide heads of {query} ({q.shape[1]})")
    if not q.is_floating_point() or len({x.dtype for x in named.values()}) > 1:
        problems.append(f"{names} must have one floating dtype, not {', '.join(str(x.dtype) for x in named.values())}")
    if len({x.device for x in named.values()}) > 1:
        problems.append(f"{names} must be on one device, not {', '.join(str(x.device) for x in named.values())}")
    return problems


def lengths(offsets: Tensor) -> NDArray[np.int64]:
    """Lengths [B] behind real offsets [B+1]; ValueError where the offsets have no values (fake or meta tensors)."""
    if type(offsets) is not Tensor or offsets.is_meta:
        raise ValueError("the pairs of a jagged batch depend on the offsets' values: count FLOPs on a real batch")
    return np.diff(offsets.cpu().numpy())


def check_offsets(op: str, **sides: tuple[Tensor, int]) -> None:
    """Raises ValueError unless each side's offsets (CPU) rise from 0 to its number of tokens."""
    problems = []
    for name, (offsets, tokens) in sides.items():
        values = offsets.numpy()
        if values[0] != 0 or values[-1] != tokens or (np.diff(values) < 0).any():
            problems.append(f"{name} must rise from 0 to the {tokens} tokens there are")
    if problems:
        raise ValueError(f"{op}: " + "; ".join(problems))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What CPU kernels compute and accumulate in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """k or v [N, Hk, D] as [N, heads, D]: query head h uses key head h // (heads / Hk)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def reduce_heads(grad: Tensor, heads: int) -> Tensor:
    """The adjoint of `expand_heads`: [N, H, D] → [N, heads, D]."""
    if grad.shape[1] == heads:
        return grad
    return grad.view(grad.shape[0], heads, grad.shape[1] // heads, grad.shape[2]).sum(2)


def every(step: int, offsets: Tensor) -> Tensor:
    """Offsets of as many sequences as `offsets` has, of `step` tokens each; kept, so that tile schedules are, too."""
    if torch.compiler.is_compiling():  # asked alone: the other questions would break the graph
        return torch.arange(offsets.shape[0], device=offsets.device) * step
    # What is kept is not traced, and is of no capture, whose memory is its own, nor of an inference mode.
    capturing = offsets.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or is_in_torch_dispatch_mode() or torch.is_inference_mode_enabled():
        return torch.arange(offsets.shape[0], device=offsets.device) * step
    return _every(step, offsets.shape[0], offsets.device)


@lru_cache(maxsize=16)
def _every(step: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) * step
