"""An interaction block of the user's own package, built from its torch-free spec (gemctl/specs/custom.py).

What the spec said to the plan must be what the module has: a difference is refused, by parameter, and so is an output
of another shape, which would be broadcast against the shortcut unseen. Buffers are refused: modules are made on the
meta device and filled by their parameters' rules, and a checkpoint holds parameters alone.
"""

import importlib
from collections.abc import Callable

from torch import Tensor, nn

from gemctl.errors import InputError
from gemctl.specs import custom
from gemctl.specs.interaction import CustomSpec


def own_module(spec: CustomSpec, inputs: int, dim: int) -> nn.Module:
    """The module that the spec names, made as Module(spec, inputs, dim). Raises InputError with every difference."""
    block = custom.load(spec)
    module, _, name = block.module.rpartition(".")
    try:
        made = getattr(importlib.import_module(module), name)(block, inputs, dim)
    except (ImportError, AttributeError, TypeError) as error:
        raise InputError(f"{spec.kind}: its module {block.module} cannot be made: {error}") from error
    found = {parameter: tuple(value.shape) for parameter, value in made.named_parameters()}
    said = {weight.name: weight.shape for weight in block.weights(inputs, dim) if weight.name is not None}
    wrong = [
        f"{spec.kind}: parameter {key}: weights() says {said.get(key)}, the module has {found.get(key)}"
        for key in sorted({*found, *said})
        if found.get(key) != said.get(key)
    ]
    wrong += [
        f"{spec.kind}: its module keeps the buffer {name}: only parameters are filled, agree on all ranks and are "
        "saved; compute it in forward, or make it a parameter"
        for name, _ in made.named_buffers()
    ]
    if wrong:
        raise InputError(wrong)
    made.register_forward_hook(_shape_check(spec.kind, block.tokens, dim))
    return made


def _shape_check(kind: str, tokens: int, dim: int) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
    def check(_: nn.Module, given: tuple[Tensor], made: Tensor) -> None:
        expected = (len(given[0]), tokens, dim)
        if tuple(made.shape) != expected:
            raise InputError(f"{kind}: its module made {tuple(made.shape)}, not [B, tokens, dim] = {expected}")

    return check
