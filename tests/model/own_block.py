"""A block of a user's own package (own_spec.py), and the same formula for the oracle."""

import torch
from torch import Tensor, nn

from gemctl.model.init import InitRule
from tests.model.oracle import Oracle
from tests.model.own_spec import Squares

KIND = "tests.model.own_spec.Squares"


class SquaresBlock(nn.Module):
    """M X² ⊙ (W mean(X) + b): [B, inputs, dim] → [B, tokens, dim]."""

    def __init__(self, spec: Squares, inputs: int, dim: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(spec.tokens, inputs))
        self.scale = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.mix, x.square()) * self.scale(x.mean(1))[:, None]

    def init_rules(self) -> dict[str, InitRule]:
        return {"mix": InitRule("uniform", self.mix.shape[1] ** -0.5)}


def squares(oracle: Oracle, module: str, prefix: str, x: Tensor) -> Tensor:
    """The block's formula, its work counted."""
    mean = x.sum(1) / x.shape[1]
    return oracle.mix(module, f"{prefix}.mix", x * x) * oracle.linear(module, f"{prefix}.scale", mean)[:, None]
