"""Pieces that every block shares. Norms have no parameters: the next matrix makes an affine map redundant.

No linear layer has a bias that a norm or a softmax after it would cancel: its gradient would be rounding noise, which
AdamW turns into full steps.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemctl.model.init import InitRule

EPSILON = 1e-6


def layer_norm(x: Tensor) -> Tensor:
    """Zero mean and unit variance over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], eps=EPSILON)


class MLP(nn.Sequential):
    """Linear layers with GELU between them, over the last dimension: inputs → hidden… → outputs."""

    def __init__(self, inputs: int, hidden: list[int], outputs: int, bias: bool = True) -> None:
        widths = [inputs, *hidden]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.GELU()]
        super().__init__(*layers, nn.Linear(widths[-1], outputs, bias=bias))


class Gate(nn.Module):
    """InterFormer's gate of tokens [B, t, dim]: σ(Z ⊙ MLP(Z)) as published, or Z ⊙ σ(MLP(Z)) (`scaled`)."""

    def __init__(self, dim: int, scaled: bool) -> None:
        super().__init__()
        self.mlp, self.scaled = MLP(dim, [dim], dim), scaled

    def forward(self, z: Tensor) -> Tensor:
        return z * self.mlp(z).sigmoid() if self.scaled else (z * self.mlp(z)).sigmoid()


def make_gate(kind: str, dim: int) -> Gate | None:
    """The gate of a `Gate` key; None for "none"."""
    return None if kind == "none" else Gate(dim, scaled=kind == "scaled")


class ZeroLinear(nn.Linear):
    """The end of a residual branch. It starts at zero, so that every block starts as the identity."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def init_rules(self) -> dict[str, InitRule]:
        return {"weight": InitRule("zeros")}


class TokenLinear(nn.Module):
    """Mixes tokens: [B, inputs, d] → [B, outputs, d], with the same weights for all d columns."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x_BND: Tensor) -> Tensor:
        return torch.matmul(self.weight, x_BND)

    def init_rules(self) -> dict[str, InitRule]:
        return {"weight": InitRule("uniform", self.weight.shape[1] ** -0.5)}
