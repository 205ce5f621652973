"""What every op asks of its inputs, checked in one place, and the lengths behind offsets.

Shapes and dtypes are checked where an op is called (so under fake tensors, too), the offsets' values where a kernel
reads them anyway. A violation is a ValueError that lists all of them. `kept` gives all layers of a batch what depends
on its offsets alone; `every` makes offsets of equal lengths.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gemctl.kernels.library import is_plain


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
    """Raises ValueError with every violation of the shared contract, and those in `more`; `query` is q's name."""
    problems = [*_shape_problems(query, q, k, v), *more]
    device = q.device
    for name, tensor in offsets.items():
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape[0] < 1:
            problems.append(f"{name} must be int64 [B+1], not {tensor.dtype} {list(tensor.shape)}")
        elif not tensor.is_contiguous():  # GPU kernels would read what lies between
            problems.append(f"{name} must be contiguous, not of stride {tensor.stride(0)}")
        if tensor.device != device:
            problems.append(f"{name} is on {tensor.device}, {query} on {device}")
    first, *others = offsets.values()
    if others and first.shape != others[0].shape:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in offsets.items())
        problems.append(f"offsets of one batch have one length, not {shapes}")
    if window is not None and window < 0:
        problems.append(f"window must be ≥ 0 or None, not {window}")
    if problems:
        raise ValueError(f"{op}: " + "; ".join(problems))


def _shape_problems(query: str, q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """Compares pair by pair: in a set, sizes would have to be numbers, and a compiled graph would be one of each."""
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        wrong = {name: list(x.shape) for name, x in ((query, q), ("k", k), ("v", v)) if x.dim() != 3}
        return [f"{name} must be [tokens, heads, head_dim], not {shape}" for name, shape in wrong.items()]
    (_, heads, dim), shape = q.shape, k.shape
    _, key_heads, key_dim = shape
    problems = []
    if shape != v.shape:
        problems.append(f"k {list(shape)} and v {list(v.shape)} must have one shape")
    if heads < 1 or dim < 1:
        problems.append(f"{query} needs at least one head and a head_dim of at least 1, not {list(q.shape)}")
    if key_heads < 1 or key_dim < 1:
        problems.append(f"k needs at least one head and a head_dim of at least 1, not {list(shape)}")
    if dim != key_dim:
        problems.append(f"head_dim of {query} ({dim}) and k ({key_dim}) differ")
    if key_heads >= 1 and heads % key_heads:
        problems.append(f"heads of k and v ({key_heads}) must divide heads of {query} ({heads})")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        problems.append(f"{query}, k, v must have one floating dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        problems.append(f"{query}, k, v must be on one device, not {q.device}, {k.device}, {v.device}")
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


T = TypeVar("T")


class _Kept(NamedTuple):
    """Results for one tensor of offsets, by key: its version, the other offsets and theirs, the result."""

    offsets: Callable[[], Tensor | None]
    results: dict[Hashable, tuple[int, Any, int | None, Any]]


_kept: dict[int, _Kept] = {}  # by id, for as long as the offsets live


def kept(key: Hashable, make: Callable[[], T], offsets: Tensor, other: Tensor | None = None) -> T:
    """make(), or what it gave before for this key and these offsets: the same tensors, not changed since.

    In a compiled graph, under a dispatch mode and in a CUDA graph's capture nothing is kept: there make's own
    operations are what counts, and their memory may belong to the graph. Nor of tensors of inference mode, which have
    no version and no gradient. Offsets may be changed in place by PyTorch operations, not behind PyTorch's back.
    """
    if (
        not is_plain(offsets)
        or torch.is_inference_mode_enabled()
        or offsets.is_inference()
        or (other is not None and other.is_inference())
        or (offsets.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return make()
    if offsets.is_cuda:  # of another stream it may not be there yet
        key = key, torch._C._cuda_getCurrentRawStream(offsets.device.index)
    entry = _kept.get(id(offsets))
    if entry is None or entry.offsets() is not offsets:
        number = id(offsets)
        entry = _kept[number] = _Kept(ref(offsets, lambda _: _kept.pop(number, None)), {})
    version, second = offsets._version, None if other is None else other._version
    found = entry.results.get(key)
    if found is None or found[0] != version or found[1]() is not other or found[2] != second:
        # A reference to the offsets themselves would keep them for ever.
        found = version, _nothing if other is None else ref(other), second, make()
        entry.results[key] = found
    result: T = found[3]
    return result


def _nothing() -> None:
    return None


def every(step: int, offsets: Tensor) -> Tensor:
    """Offsets of as many sequences as `offsets` has, of `step` tokens each."""
    return kept(("every", step), lambda: torch.arange(offsets.shape[0], device=offsets.device) * step, offsets)
