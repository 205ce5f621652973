"""How the ops are registered with PyTorch: a schema from a function's types, its kernel, its fake kernel, its gradient.

`torch.library.custom_op` does as much with some 60 µs of Python around each call on a GPU's host, which then does not
keep up with short batches. Here a call takes the dispatcher's way only where someone listens there: a compiler, a mode
(FLOP counters, fake tensors), a transform. A plain eager call goes straight to the gradient's `apply` and the kernel.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import Library, infer_schema, register_fake
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_LIBRARY = Library("gemctl", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # the kernels take tensors of any strides
_PLAIN = (Tensor, Parameter)


def is_plain(x: Tensor) -> bool:
    """Whether a call with x is an eager one that no mode, tracer or transform looks at."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and not x.is_meta
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
        and not torch.jit.is_tracing()
    )


class Differentiable(Function):
    """The gradient of an op that can be differentiated once, backwards.

    `apply` takes the tensors to differentiate in, a tuple of the op's other arguments, and what computes the op of all.
    """

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refuses: without this, tangents would be dropped in silence."""
        raise NotImplementedError("the jagged ops have no forward-mode derivative")


class Op:
    """The op `gemctl::<name>`, called like a function; its first argument is a tensor.

    `kernel` gets real tensors of any device, `fake` makes outputs without values. `gradient`: of the first
    `differentiable` arguments.
    """

    def __init__(
        self,
        name: str,
        kernel: Callable[..., Any],
        fake: Callable[..., Any],
        gradient: type[Differentiable] | None = None,
        differentiable: int = 0,
    ) -> None:
        def differentiated(run: Callable[..., Any], *args: Any) -> Any:
            assert gradient is not None
            return gradient.apply(*args[:differentiable], args[differentiable:], run)

        def below(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args)

        _LIBRARY.define(name + infer_schema(kernel, mutates_args=()), tags=_TAGS)
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        register_fake(f"gemctl::{name}", fake, lib=_LIBRARY)
        op = getattr(torch.ops.gemctl, name).default
        self._op, self._eager = op, kernel
        if gradient is not None:
            _LIBRARY.impl(name, partial(differentiated, below), "Autograd")
            self._eager = partial(differentiated, kernel)

    def __call__(self, *args: Any) -> Any:
        """The op on these arguments, differentiable if it has a gradient."""
        return self._eager(*args) if is_plain(args[0]) else self._op(*args)


def once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """`backward(ctx, saved tensors, gradient of the output)`, whose results raise where they are differentiated again.

    `once_differentiable` of PyTorch cuts them off instead, so that a second `torch.autograd.grad` may give None.
    """

    @wraps(backward)
    def run(ctx: Any, grad: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
        if grad is None:  # nothing depends on the output
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # once: checkpointing gives them away
        if not torch.is_grad_enabled():
            return backward(ctx, saved, grad)
        found: tuple[Tensor | None, ...] = _Twice.apply(lambda: backward(ctx, saved, grad), grad, *saved)
        return found

    return run


class _Twice(Function):
    """What `make` gives, made from `sources`."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Any], *sources: Any) -> Any:
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("the jagged ops can be differentiated once, not twice")
