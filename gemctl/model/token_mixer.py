"""RankMixer's interaction of tokens X [B, n, dim] (arXiv 2507.15551): large matrix products and nothing else.

    core(X) = M + FFN(M),  M = LN(Z + mix(Z))               [B, tokens, dim]
    Z = the tokens R X as T = tokens/group wide ones, [B, T, D], D = group · dim; R as in gemctl/model/interaction.py
    mix: each wide token is cut into T parts; new token t is part t of every token, in their order
    FFN: W₂ᵗ GELU(W₁ᵗ m + b₁ᵗ) + b₂ᵗ, weights of each wide token's own

The published tokens are as wide as one pleases; here they are `group` of the model's tokens, as those of a layer's
interaction have the width of the tables.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemctl.model.init import InitRule
from gemctl.model.layers import TokenLinear, layer_norm
from gemctl.specs.interaction import TokenMixerSpec


class TokenMixer(nn.Module):
    """[B, inputs, dim] → [B, tokens, dim], without the norm at its end."""

    def __init__(self, spec: TokenMixerSpec, inputs: int, dim: int) -> None:
        super().__init__()
        self.wide, self.width = spec.wide, spec.group * dim
        self.entry = nn.Identity() if inputs == spec.tokens else TokenLinear(inputs, spec.tokens)
        self.up = PerTokenLinear(self.wide, self.width, spec.hidden)
        self.down = PerTokenLinear(self.wide, spec.hidden, self.width)

    def forward(self, x_BND: Tensor) -> Tensor:
        rows, dim = len(x_BND), x_BND.shape[2]
        z_BTD = self.entry(x_BND).reshape(rows, self.wide, self.width)
        parts = z_BTD.view(rows, self.wide, self.wide, self.width // self.wide)
        m_TBD = layer_norm(z_BTD + parts.transpose(1, 2).reshape(z_BTD.shape)).transpose(0, 1)
        made_TBD = m_TBD + self.down(F.gelu(self.up(m_TBD)))
        return made_TBD.transpose(0, 1).reshape(rows, self.wide * self.width // dim, dim)


class PerTokenLinear(nn.Module):
    """A linear layer of each token's own: [T, B, inputs] → [T, B, outputs].

    The matrices are stacked in one of T·outputs rows, so that FSDP2, which cuts rows, can spread them over more ranks
    than there are tokens.
    """

    def __init__(self, tokens: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.weight = nn.Parameter(torch.empty(tokens * outputs, inputs))
        self.bias = nn.Parameter(torch.empty(tokens * outputs))

    def forward(self, x_TBD: Tensor) -> Tensor:
        weight, bias = self.weight.unflatten(0, (self.tokens, -1)), self.bias.unflatten(0, (self.tokens, 1, -1))
        return torch.baddbmm(bias, x_TBD, weight.transpose(1, 2))

    def init_rules(self) -> dict[str, InitRule]:
        return {"weight": InitRule("uniform", self.weight.shape[1] ** -0.5), "bias": InitRule("zeros")}
