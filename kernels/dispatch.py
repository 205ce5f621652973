"""Which backend runs an op: the first in `BACKENDS` that takes the tensor, or the one that `use` names.

Nothing is replaced in silence: where no backend takes the tensor, or the named one does not, that is an error which
says what there is and why not; `used()` tells what has run. The plain definition, `reference`, never comes by itself.

    python -c "import torch; from gemctl.kernels import dispatch; print(dispatch.options('gdpa', torch.zeros(1)))"
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from torch import Tensor

from gemctl.errors import InputError
from gemctl.kernels.triton_launch import refusal

REFERENCE = "reference"


@dataclass(frozen=True)
class Backend:
    """`refuses(op, q)` says why it can't run the op on tensors like q, or None. Its code is <op>/<name>.py."""

    name: str
    refuses: Callable[[str, Tensor], str | None]


def _cpu_refuses(op: str, q: Tensor) -> str | None:
    return None if q.device.type == "cpu" else f"needs tensors on the CPU, not on {q.device}"


def _triton_refuses(op: str, q: Tensor) -> str | None:
    return refusal(q)


BACKENDS = (Backend("cpu", _cpu_refuses), Backend("triton", _triton_refuses))  # in order of preference

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
    return {backend.name: backend.refuses(op, q) or "available" for backend in BACKENDS} | {REFERENCE: "only by name"}


def load(op: str, q: Tensor, name: str | None) -> ModuleType:
    """The module (`forward`, `backward`) that runs `op` on q: backend `name`, or by the rule where it is None."""
    for backend in BACKENDS:
        if name in {None, backend.name} and backend.refuses(op, q) is None:
            _used[f"{op} on {q.device.type}"] = backend.name
            return import_module(f"gemctl.kernels.{op}.{backend.name}")
    reasons = "; ".join(f"{key}: {value}" for key, value in options(op, q).items())
    raise InputError(f"no backend for {op} on {q.device}" + (f" named {name!r}" if name else "") + f" ({reasons})")


def used() -> dict[str, str]:
    """The backends that have run in this process, by "<op> on <device type>"."""
    return dict(_used)
