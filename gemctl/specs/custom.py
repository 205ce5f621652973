"""Interaction blocks of the user's own package, named in a model's YAML by their torch-free spec.

    interaction: {kind: mypackage.specs.Gated, options: {tokens: 8}}

    @dataclass
    class Gated:                                                   # in a module that does not import torch
        tokens: int                                                # tokens that the block makes
        module: ClassVar[str] = "mypackage.blocks.Gated"           # an nn.Module made as Gated(spec, inputs, dim),
                                                                   # which maps [B, inputs, dim] to [B, tokens, dim]
        def weights(self, inputs: int, dim: int) -> list[Weight]:  # its parameters by name, and what they cost
            return [Weight("mix.weight", (self.tokens, inputs), times=dim)]

        def kept(self, inputs: int, dim: int) -> int:              # values a row that its backward needs
            return 2 * inputs * dim

The plan reads the spec alone. A name without such a spec is refused with the reason. The module says what its
parameters start from (`init_rules`, gemctl/model/init.py) where they are no plain linear layers.
"""

import importlib
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Protocol

from gemctl.errors import InputError
from gemctl.specs.interaction import CustomSpec, members
from gemctl.specs.model import ModelConfig
from gemctl.specs.weights import Weight

PARTS = {
    "module": "the dotted name of its nn.Module",
    "weights": "the parameters and their FLOPs",
    "kept": "the values a row that its backward needs",
}


class OwnBlock(Protocol):
    """What the plan and the model ask a spec for."""

    tokens: int
    module: str

    def weights(self, inputs: int, dim: int) -> list[Weight]:
        """Every parameter of the module, by its name in it."""

    def kept(self, inputs: int, dim: int) -> int:
        """Values that a row keeps for the backward."""


def modules(model: ModelConfig) -> list[str]:
    """The modules that a model has imported when it is planned; their specs name more, which its ranks import."""
    blocks = [member for layer in model.layers for member in members(layer.interaction)]
    return sorted({block.kind.rpartition(".")[0] for block in blocks if isinstance(block, CustomSpec)})


def load(spec: CustomSpec) -> OwnBlock:
    """The user's spec, made with the options. Raises InputError with the reason where that is impossible."""
    from pydantic import TypeAdapter, ValidationError

    found = _class(spec.kind)
    known = [field.name for field in fields(found) if field.init]
    if unknown := [name for name in spec.options if name not in known]:
        raise InputError([f"{spec.kind}: options.{name}: unknown; it has {', '.join(known)}" for name in unknown])
    try:
        block: OwnBlock = TypeAdapter(found).validate_python(spec.options)
    except ValidationError as error:
        raise InputError(
            [
                f"{spec.kind}: options.{'.'.join(map(str, problem['loc'])) or 'options'}: {problem['msg']}"
                for problem in error.errors(include_url=False)
            ]
        ) from error
    tokens = getattr(block, "tokens", None)
    if not isinstance(tokens, int) or tokens < 1:
        raise InputError(f"{spec.kind}: `tokens` must be an integer ≥ 1 (the tokens that it makes), not {tokens!r}")
    return block


@cache
def _class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    before = "torch" in sys.modules
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        raise InputError(f"{name}: importing {module} raises {type(error).__name__}: {error}") from error
    if found is None:
        raise InputError(f"{name}: {module} has no {attribute!r}")
    if not before and "torch" in sys.modules:
        raise InputError(f"{name}: importing {module} imports torch: keep the spec in a module that does not")
    if not (isinstance(found, type) and is_dataclass(found)):
        raise InputError(f"{name} is no spec: name a dataclass with {', '.join(('tokens', *PARTS))} (docs/models.md)")
    missing = [f"{part!r} ({meaning})" for part, meaning in PARTS.items() if not hasattr(found, part)]
    if missing:
        raise InputError(f"{name} is no whole spec: it has no {', no '.join(missing)} (docs/models.md)")
    return found
