"""The initial value of every parameter as a rule, so that a rank can fill only its own slice.

A parameter's rule depends only on its shape and role. `gemctl.parallel` draws the numbers from (seed, name, global
index), which makes the full initial state the same for every world and sharding.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class InitRule:
    """`uniform`: in (−bound, bound); `zeros` and `ones` have no bound."""

    kind: Literal["uniform", "zeros", "ones"]
    bound: float = 0.0


def init_rules(model: nn.Module) -> dict[str, InitRule]:
    """The rule of every parameter of `model`, by its name in `model.named_parameters()`.

    Linear weights are uniform with variance 1/(3·inputs), biases are zero. A module with other
    parameters has a method `init_rules()`, which returns the rules of its own parameters.
    """
    rules: dict[str, InitRule] = {}
    for prefix, module in model.named_modules():
        own = _module_rules(module)
        rules.update({f"{prefix}.{name}" if prefix else name: rule for name, rule in own.items()})
    missing = [name for name, _ in model.named_parameters() if name not in rules]
    if missing:
        raise TypeError(f"parameters without an init rule: {', '.join(missing)}")
    return rules


def _module_rules(module: nn.Module) -> dict[str, InitRule]:
    own = getattr(module, "init_rules", None)
    if own is not None:
        return own()
    if isinstance(module, nn.Linear):
        weight = {"weight": InitRule("uniform", module.in_features**-0.5)}
        return weight if module.bias is None else {**weight, "bias": InitRule("zeros")}
    return {}
