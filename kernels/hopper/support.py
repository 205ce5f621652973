"""Which tensors the Hopper kernels take; no Triton is imported for the answer.

python -c "import torch; from gemctl.kernels.hopper.support import refusal; print(refusal('gdpa', torch.zeros(1)))"
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

OPS = ("gdpa", "jagged_flash_attention")
HEAD_DIMS = (64, 128)
TRITON = "3.6."  # Gluon, in which these kernels are written, changes with every release


def refusal(op: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the Hopper kernels can't run `op` on such tensors, or None."""
    if op not in OPS:
        return f"has no kernels for {op}"
    if device.type != "cuda" or not _is_hopper(device.index or 0):
        return f"needs tensors on a Hopper GPU (sm_90), not on {device}"
    if dtype != torch.bfloat16:
        return f"needs bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"needs a head_dim of {' or '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    found = _triton_version()
    return None if found.startswith(TRITON) else f"is written for triton {TRITON}x, not {found or 'for none'}"


@cache
def _is_hopper(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) == (9, 0)


@cache
def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
