"""Interaction blocks of the user's own package, named in a model's YAML by their torch-free spec.

    interaction: {kind: mypackage.specs.Gated, options: {tokens: 8}}

    @dataclass
    class Gated:                                                   # in a module that does not import torch
        tokens: int                                                # tokens that the block makes
        module: ClassVar[str] = "mypackage.blocks.Gated"           # an nn.Module made as Gated(spec, inputs, dim),
                                                                   # which maps [B, inputs, dim] to [B, tokens, dim]
        def weights(self, inputs: int, dim: int) -> list[Weight]:  # its parameters by name, and what they cost
            return [Weight("mix.weight", (self.tokens, inputs), times=dim)]

        def kept(self, inputs: int, dim: int) -> int:              # values per row that its backward needs
            return 2 * inputs * dim

The plan reads the spec alone. A name without such a spec is refused with the reason. The module says what its
parameters start from (`init_rules`, gemctl/model/init.py) where they are not plain linear layers.
"""

import importlib
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from gemctl.errors import InputError
from gemctl.specs.weights import Weight

PARTS = {
    "module": "the dotted name of its nn.Module",
    "weights": "the parameters and their FLOPs",
    "kept": "the values per row that its backward needs",
}


class OwnSpec(Protocol):
    """What a user's spec must have: what a built-in core has, too (gemctl/specs/interaction.py)."""

    tokens: int
    module: str

    def weights(self, inputs: int, dim: int) -> list[Weight]:
        """Every parameter of the module, by its name in it."""

    def kept(self, inputs: int, dim: int) -> int:
        """Values per row that its backward needs."""


def load(name: str, options: dict[str, Any]) -> OwnSpec:
    """The spec of this dotted name, made with `options`. Raises InputError with the reason if it cannot be made."""
    spec = _class(name)
    known = [field.name for field in fields(spec) if field.init]
    if unknown := [option for option in options if option not in known]:
        raise InputError([f"{name}: options.{option}: unknown; it has {', '.join(known)}" for option in unknown])
    try:
        made: OwnSpec = TypeAdapter(spec).validate_python(options)
    except ValidationError as error:
        raise InputError(
            [
                f"{name}: options.{'.'.join(map(str, problem['loc'])) or 'options'}: {problem['msg']}"
                for problem in error.errors(include_url=False)
            ]
        ) from error
    tokens = getattr(made, "tokens", None)
    if not isinstance(tokens, int) or tokens < 1:
        raise InputError(f"{name}: `tokens` must be an integer ≥ 1 (the tokens that it makes), not {tokens!r}")
    return made


@cache
def _class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    before = "torch" in sys.modules
    try:
        spec = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        raise InputError(f"{name}: importing {module} raises {type(error).__name__}: {error}") from error
    if spec is None:
        raise InputError(f"{name}: {module} has no {attribute!r}")
    if not before and "torch" in sys.modules:
        raise InputError(f"{name}: importing {module} imports torch: keep the spec in a module that does not")
    if not (isinstance(spec, type) and is_dataclass(spec)):
        needed = ", ".join(("tokens", *PARTS))
        raise InputError(f"{name} is not a spec: name a dataclass with {needed} (docs/models.md)")
    missing = [f"{part!r} ({meaning})" for part, meaning in PARTS.items() if not hasattr(spec, part)]
    if missing:
        raise InputError(f"{name} is an incomplete spec: it has no {', no '.join(missing)} (docs/models.md)")
    return spec
