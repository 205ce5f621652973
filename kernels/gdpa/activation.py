"""The activations of GDPA, as plain formulas: all have act(0) = 0, so a hidden or padded score adds nothing.

`gelu_approx` is the tanh form. `fast_gelu` is the same function, but a backend may use the hardware's approximate
tanh for it. Kernel variants of one function (bfloat16 tanh, Taylor series, fast sigmoid) are no functions of their own.

    python -c "import torch, gemctl.kernels.gdpa.activation as a; print(a.ACTIVATIONS['silu'](torch.ones(1)))"
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

LEAKY_SLOPE = 0.01


class Activation(StrEnum):
    """What GDPA can apply to the scores."""

    IDENTITY = "identity"
    GELU = "gelu"
    GELU_APPROX = "gelu_approx"
    FAST_GELU = "fast_gelu"
    RELU = "relu"
    RELU_SQUARE = "relu_square"
    LEAKY_RELU = "leaky_relu"
    SILU = "silu"
    HARDSWISH = "hardswish"


@dataclass(frozen=True)
class ScoreFunction:
    """An elementwise function of the scores; ValueError unless it maps 0 to 0."""

    function: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        at_zero = self.function(torch.zeros(1, dtype=torch.float64)).item()
        if at_zero != 0:
            raise ValueError(f"act(0) must be 0, or hidden scores would add to the output; it is {at_zero}")

    def __call__(self, scores: Tensor) -> Tensor:
        return self.function(scores)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS = {
    Activation.IDENTITY: ScoreFunction(lambda x: x),
    Activation.GELU: ScoreFunction(functional.gelu),
    Activation.GELU_APPROX: ScoreFunction(_gelu_tanh),
    Activation.FAST_GELU: ScoreFunction(_gelu_tanh),
    Activation.RELU: ScoreFunction(functional.relu),
    Activation.RELU_SQUARE: ScoreFunction(lambda x: functional.relu(x).square()),
    Activation.LEAKY_RELU: ScoreFunction(lambda x: functional.leaky_relu(x, LEAKY_SLOPE)),
    Activation.SILU: ScoreFunction(functional.silu),
    Activation.HARDSWISH: ScoreFunction(functional.hardswish),
}
