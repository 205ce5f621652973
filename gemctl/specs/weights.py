"""How a block's parameters and their cost are written down, torch-free.

from gemctl.specs.weights import linear, total
total(linear("out", 32, 64))        # 2·32·64 FLOPs for each thing that the layer maps
"""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

Shape = tuple[int, ...]


class Weight(NamedTuple):
    """A parameter, and how many things of a row (or of an event) each of its numbers multiplies; 0: none.

    `name` is None where no parameter but two activations are multiplied: `shape` then is that of the product's second
    operand.
    """

    name: str | None
    shape: Shape
    times: int = 0

    @property
    def flops(self) -> int:
        """Forward FLOPs for a row or event: two for each product."""
        return 2 * self.times * math.prod(self.shape)


def linear(name: str, inputs: int, outputs: int, bias: bool = True, times: int = 1) -> list[Weight]:
    """`nn.Linear(inputs, outputs)` over `times` vectors."""
    found = [Weight(f"{name}.weight", (outputs, inputs), times)]
    return [*found, Weight(f"{name}.bias", (outputs,))] if bias else found


def mlp(name: str, inputs: int, hidden: list[int], outputs: int, times: int = 1) -> list[Weight]:
    """`MLP(inputs, hidden, outputs)` of gemctl/model/layers.py over `times` vectors."""
    layers = enumerate(pairwise([inputs, *hidden, outputs]))
    prefix = f"{name}." if name else ""
    return [weight for i, (a, b) in layers for weight in linear(f"{prefix}{2 * i}", a, b, times=times)]


def token_linear(name: str, inputs: int, outputs: int, dim: int) -> list[Weight]:
    """`TokenLinear(inputs, outputs)` of gemctl/model/layers.py over tokens of width `dim`."""
    return linear(name, inputs, outputs, bias=False, times=dim)


def gate(name: str, dim: int, tokens: int) -> list[Weight]:
    """`Gate(dim)` of gemctl/model/layers.py over `tokens` tokens."""
    return mlp(f"{name}.mlp", dim, [dim], dim, times=tokens)


def total(weights: Iterable[Weight]) -> int:
    """Forward FLOPs of all for one row or event."""
    return sum(weight.flops for weight in weights)
