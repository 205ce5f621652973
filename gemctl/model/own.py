"""An interaction block of the user's own package, built from its torch-free spec (gemctl/specs/custom.py).

What the spec said to the plan must be what the module has: a difference is refused, by parameter.
"""

import importlib

from torch import nn

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
    if wrong:
        raise InputError(wrong)
    return made
