"""The Wukong interaction of tokens X [B, n, dim] (arXiv 2403.02545).

    core(X) = concat(FMB(X), LCB(X))                        [B, fm_tokens + lc_tokens, dim]
    FMB(X) = MLP(LN(flatten(X (Xᵀ Y)))),   LCB(X) = W_L X    Y [n, rank]: a parameter ("learnable"), or
    Y(X) = reshape(MLP_Y(flatten(W_Y X)))                    made from the row's own tokens ("attentive")

The block around it (gemctl/model/interaction.py) is LN(core(X) + R X); stacked blocks cover interactions of order
1 … 2^layers.
"""

import torch
from torch import Tensor, nn

from gemctl.model.init import InitRule
from gemctl.model.layers import MLP, TokenLinear, layer_norm
from gemctl.specs.interaction import WukongSpec


class Wukong(nn.Module):
    """[B, inputs, dim] → [B, fm_tokens + lc_tokens, dim], without shortcut and norm."""

    def __init__(self, spec: WukongSpec, inputs: int, dim: int) -> None:
        super().__init__()
        self.fm_tokens = spec.fm_tokens
        self.columns = AttentiveColumns(spec, inputs, dim) if spec.fm == "attentive" else LearnedColumns(spec, inputs)
        self.fm_mlp = MLP(inputs * spec.rank, spec.hidden, spec.fm_tokens * dim)
        self.compression = TokenLinear(inputs, spec.lc_tokens)

    def forward(self, x_BND: Tensor) -> Tensor:
        products = torch.matmul(x_BND, torch.matmul(x_BND.transpose(1, 2), self.columns(x_BND)))
        fm = self.fm_mlp(layer_norm(products.flatten(1))).view(len(x_BND), self.fm_tokens, x_BND.shape[2])
        return torch.cat([fm, self.compression(x_BND)], dim=1)


class LearnedColumns(nn.Module):
    """Y [n, rank] as a parameter."""

    def __init__(self, spec: WukongSpec, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, spec.rank))

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.weight

    def init_rules(self) -> dict[str, InitRule]:
        return {"weight": InitRule("uniform", self.weight.shape[0] ** -0.5)}


class AttentiveColumns(nn.Module):
    """Y [B, n, rank] of each row: an MLP over a linear compression of its tokens."""

    def __init__(self, spec: WukongSpec, inputs: int, dim: int) -> None:
        super().__init__()
        self.inputs, self.rank = inputs, spec.rank
        self.compression = TokenLinear(inputs, spec.fm_compression)
        self.mlp = MLP(spec.fm_compression * dim, spec.fm_hidden, inputs * spec.rank)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.mlp(self.compression(x_BND).flatten(1)).view(len(x_BND), self.inputs, self.rank)
