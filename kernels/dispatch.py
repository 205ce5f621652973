"""Which backend runs an op: the first in `BACKENDS` that takes the tensor, or the one that `use` names.

Nothing is replaced in silence: where no backend takes the tensor, or the named one does not, that is an error which
says what there is and why not; `used()` tells what has run. The plain definition, `reference`, never comes by itself.

    python -c "import torch; from gemctl.kernels import dispatch; print(dispatch.options('gdpa', torch.zeros(1)))"
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from gemctl.errors import InputError
from gemctl.kernels.hopper import support as hopper
from gemctl.kernels.triton_launch import refusal

REFERENCE = "reference"


@dataclass(frozen=True)
class Backend:
    """Its code is <op>/<name>.py. `refuses(op, device, dtype, head_dim)` says why it can't run the op, or None.

    The module has `forward` and `backward`, and `tables` if they read any (gemctl/kernels/tables.py).
    """

    name: str
    refuses: Callable[[str, torch.device, torch.dtype, int], str | None]


def _cpu_refuses(op: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return None if device.type == "cpu" else f"needs tensors on the CPU, not on {device}"


def _triton_refuses(op: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return refusal(device, dtype, head_dim)


BACKENDS = (  # in order of preference
    Backend("cpu", _cpu_refuses),
    Backend("triton", _triton_refuses),
    Backend("hopper", hopper.refusal),  # so far by name only: torch.compile and CUDA graphs are not checked yet
)

_named: str | None = None
_used: dict[str, str] = {}


@contextmanager
def use(name: str) -> Iterator[None]:
    """Within it every op runs on the backend `name`, or on the plain definition with "reference", or fails."""
    global _named  # noqa: PLW0603  process-wide on purpose: the models do not pass a backend through
    names = [*(backend.name for backend in BACKENDS), REFERENCE]
    if name not in names:
        raise InputError(f"unknown kernel backend {name!r}: there are {', '.join(names)}")
    before, _named = _named, name
    try:
        yield
    finally:
        _named = before


def named() -> str | None:
    """The backend that `use` names here, or None."""
    return _named


def options(op: str, q: Tensor) -> dict[str, str]:
    """Every backend with "available" or the reason why it can't run `op` on tensors like q."""
    return _options(op, q.device, q.dtype, q.shape[-1])


def _options(op: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, str]:
    reasons = {backend.name: backend.refuses(op, device, dtype, head_dim) or "available" for backend in BACKENDS}
    return reasons | {REFERENCE: "only by name"}


def load(op: str, device: torch.device, dtype: torch.dtype, head_dim: int, name: str | None) -> ModuleType:
    """The module that runs `op` on such tensors: of backend `name`, or by the rule where it is None."""
    module, key, backend = _load(op, device, dtype, head_dim, name)
    _used[key] = backend
    return module


@lru_cache(maxsize=1024)
def _load(
    op: str, device: torch.device, dtype: torch.dtype, head_dim: int, name: str | None
) -> tuple[ModuleType, str, str]:
    for backend in BACKENDS:
        if name in {None, backend.name} and backend.refuses(op, device, dtype, head_dim) is None:
            module = import_module(f"gemctl.kernels.{op}.{backend.name}")
            return module, f"{op} on {device.type}", backend.name
    reasons = "; ".join(f"{key}: {value}" for key, value in _options(op, device, dtype, head_dim).items())
    raise InputError(f"no backend for {op} on {device}" + (f" named {name!r}" if name else "") + f" ({reasons})")


def used() -> dict[str, str]:
    """The backends that have run in this process, by "<op> on <device type>"."""
    return dict(_used)
