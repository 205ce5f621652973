"""Interaction blocks: tokens X [B, n, dim] crossed with each other → [B, outputs, dim].

    wukong, wukong_experts   X' = LN( core(X) + R X )                          wukong.py, experts.py
    dhen                     X' = LN( [core_1(X) ‖ core_2(X) ‖ …] + R X )       DHEN, arXiv 2203.11014
    your own                 X' = LN( core(X) + R X )                           gemctl/specs/custom.py
    mlp                      X' = LN( reshape(MLP(x)) ),  x = flatten(X)
    dot                      X' = LN( reshape(MLP([x ‖ X_i·X_j/√dim for i < j])) )     DLRM, arXiv 1906.00091
    token_mixer              X' = LN( core(X) )                                 token_mixer.py
    dcnv2                    X' = LN( reshape(MLP(c)) ),  c ← x ⊙ (U_l V_l c + b_l) + c, from c = x on, for each cross l
                                                                               DCN-V2, arXiv 2008.13535

R maps tokens linearly, [outputs, n], and is the identity where n = outputs. InterFormer's MLP(Interact(X)) is dot,
dcnv2 or dhen here. As members of a dhen block, mlp, dot, dcnv2 and token_mixer come without their norm.
"""

import torch
from torch import Tensor, nn

from gemctl.model.experts import WukongExperts
from gemctl.model.layers import MLP, TokenLinear, layer_norm
from gemctl.model.own import own_module
from gemctl.model.token_mixer import TokenMixer
from gemctl.model.wukong import Wukong
from gemctl.specs.interaction import (
    DcnSpec,
    DotSpec,
    Interaction,
    Member,
    MlpSpec,
    TokenMixerSpec,
    WukongExpertsSpec,
    WukongSpec,
    has_shortcut,
    members,
)
from gemctl.specs.layout import outputs


class InteractionBlock(nn.Module):
    """Its cores side by side, with shortcut and norm: [B, inputs, dim] → [B, outputs, dim]."""

    def __init__(self, spec: Interaction, inputs: int, dim: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(_core(member, inputs, dim) for member in members(spec))
        self.shortcut, made = has_shortcut(spec), outputs(spec)
        self.residual = TokenLinear(inputs, made) if self.shortcut and inputs != made else None

    def prefetch(self, x_BND: Tensor) -> None:
        """Tells experts that are spread over ranks the leading tokens of the next `forward`, as soon as they exist."""
        for member in self.members:
            if isinstance(member, WukongExperts) and member.exchange is not None:
                member.exchange.prefetch(x_BND)

    def forward(self, x_BND: Tensor) -> Tensor:
        made = torch.cat([member(x_BND) for member in self.members], dim=1)
        if self.shortcut:
            made = made + (x_BND if self.residual is None else self.residual(x_BND))
        return layer_norm(made)


class MlpCore(nn.Module):
    """An MLP over all tokens: [B, n, dim] → [B, tokens, dim]."""

    def __init__(self, inputs: int, hidden: list[int], tokens: int, dim: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.mlp = MLP(inputs, hidden, tokens * dim)

    def forward(self, x_BND: Tensor) -> Tensor:
        made: Tensor = self.mlp(self._features(x_BND))
        return made.view(len(x_BND), self.tokens, x_BND.shape[2])

    def _features(self, x_BND: Tensor) -> Tensor:
        return x_BND.flatten(1)


class DotCore(MlpCore):
    """The products of all pairs of tokens beside the tokens."""

    def __init__(self, spec: DotSpec, inputs: int, dim: int) -> None:
        super().__init__(inputs * dim + inputs * (inputs - 1) // 2, spec.hidden, spec.tokens, dim)

    def _features(self, x_BND: Tensor) -> Tensor:
        products = torch.bmm(x_BND, x_BND.transpose(1, 2)) * x_BND.shape[2] ** -0.5
        first, second = torch.triu_indices(x_BND.shape[1], x_BND.shape[1], offset=1, device=x_BND.device)
        return torch.cat([x_BND.flatten(1), products[:, first, second]], dim=1)


class DcnCore(MlpCore):
    """Low-rank crosses of the flattened tokens."""

    def __init__(self, spec: DcnSpec, inputs: int, dim: int) -> None:
        super().__init__(inputs * dim, spec.hidden, spec.tokens, dim)
        self.crosses = nn.ModuleList(Cross(inputs * dim, spec.rank) for _ in range(spec.crosses))

    def _features(self, x_BND: Tensor) -> Tensor:
        x = crossed = x_BND.flatten(1)
        for cross in self.crosses:
            crossed = x * cross(crossed) + crossed
        return crossed


class Cross(nn.Module):
    """U V c + b: [B, width] → [B, width] through `rank` numbers."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, c: Tensor) -> Tensor:
        made: Tensor = self.up(self.down(c))
        return made


def _core(spec: Member, inputs: int, dim: int) -> nn.Module:
    if isinstance(spec, WukongSpec):
        return Wukong(spec, inputs, dim)
    if isinstance(spec, WukongExpertsSpec):
        return WukongExperts(spec, inputs, dim)
    if isinstance(spec, MlpSpec):
        return MlpCore(inputs * dim, spec.hidden, spec.tokens, dim)
    if isinstance(spec, DotSpec):
        return DotCore(spec, inputs, dim)
    if isinstance(spec, TokenMixerSpec):
        return TokenMixer(spec, inputs, dim)
    return DcnCore(spec, inputs, dim) if isinstance(spec, DcnSpec) else own_module(spec, inputs, dim)
