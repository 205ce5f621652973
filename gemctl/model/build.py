"""From a block's spec to its module, which the spec names: built-in blocks and users' own go the same way.

    build(KunlunSpec(), width, heads, x_sum, attends)          # gemctl.model.sequence.KunlunBlock
    build_core(CustomSpec("mypackage.specs.Gated", {…}), inputs, dim)

What a core's spec told the plan must be what its module has: every difference is refused by parameter. Buffers are
refused: modules are made on the meta device and filled by their parameters' rules, and a checkpoint holds parameters
alone.
"""

import importlib
from typing import Any

import torch
from torch import nn

from gemctl.errors import InputError
from gemctl.specs.interaction import Core


def build(spec: Any, *sizes: Any) -> nn.Module:
    """The module that `spec.module` names, made as Module(spec, *sizes)."""
    module, _, name = spec.module.rpartition(".")
    with torch.device("cpu"):  # models are made on the meta device, and a module's own constants are real
        kind = getattr(importlib.import_module(module), name)
    made: nn.Module = kind(spec, *sizes)
    return made


def build_core(core: Core, inputs: int, dim: int) -> nn.Module:
    """A core's module over `inputs` tokens. Raises InputError with every difference from its spec."""
    try:
        made = build(core.own, inputs, dim)
    except (ImportError, AttributeError, TypeError) as error:
        raise InputError(f"{core.kind}: its module {core.module} cannot be made: {error}") from error
    has = {parameter: tuple(value.shape) for parameter, value in made.named_parameters()}
    said = {weight.name: weight.shape for weight in core.weights(inputs, dim) if weight.name is not None}
    problems = [
        f"{core.kind}: parameter {key}: weights() says {said.get(key)}, the module has {has.get(key)}"
        for key in sorted({*has, *said})
        if has.get(key) != said.get(key)
    ]
    problems += [
        f"{core.kind}: its module keeps the buffer {name}: only parameters are filled, agree on all ranks and are "
        "saved; compute it in forward, or make it a parameter"
        for name, _ in made.named_buffers()
    ]
    if problems:
        raise InputError(problems)
    return made
