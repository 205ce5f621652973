"""The Wukong interaction block over non-sequence tokens (arXiv 2403.02545).

    X' = LN( concat(FMB(X), LCB(X)) + R X ),   FMB(X) = MLP(LN(flatten(X (Xᵀ Y)))),   LCB(X) = W_L X

Stacked blocks cover interactions of order 1 … 2^layers. R, a linear map over tokens, stands in for the identity
where the numbers of tokens differ.
"""

import torch
from torch import Tensor, nn

from gemctl.model.init import InitRule
from gemctl.model.layers import MLP, TokenLinear, layer_norm
from gemctl.specs.model import WukongSpec


class WukongBlock(nn.Module):
    """[B, tokens, dim] → [B, fm_tokens + lc_tokens, dim]."""

    def __init__(self, spec: WukongSpec, tokens: int, dim: int) -> None:
        super().__init__()
        outputs = spec.fm_tokens + spec.lc_tokens
        self.fm_columns = nn.Parameter(torch.empty(tokens, spec.rank))
        self.fm_mlp = MLP(tokens * spec.rank, spec.hidden, spec.fm_tokens * dim)
        self.compression = TokenLinear(tokens, spec.lc_tokens)
        self.residual = TokenLinear(tokens, outputs) if tokens != outputs else None

    def forward(self, x_BND: Tensor) -> Tensor:
        products = torch.matmul(x_BND, torch.matmul(x_BND.transpose(1, 2), self.fm_columns))
        fm = self.fm_mlp(layer_norm(products.flatten(1))).unflatten(1, (-1, x_BND.shape[2]))
        shortcut = x_BND if self.residual is None else self.residual(x_BND)
        return layer_norm(torch.cat([fm, self.compression(x_BND)], dim=1) + shortcut)

    def init_rules(self) -> dict[str, InitRule]:
        return {"fm_columns": InitRule("uniform", self.fm_columns.shape[0] ** -0.5)}
