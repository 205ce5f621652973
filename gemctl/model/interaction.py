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

from gemctl.errors import InputError
from gemctl.model.build import build_core
from gemctl.model.layers import MLP, TokenLinear, layer_norm
from gemctl.specs.interaction import DcnSpec, DotSpec, Interaction, MlpSpec


class InteractionBlock(nn.Module):
    """Its cores side by side, with shortcut and norm: [B, inputs, dim] → [B, spec.tokens, dim]."""

    def __init__(self, spec: Interaction, inputs: int, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.members = nn.ModuleList(build_core(core, inputs, dim) for core in spec.cores())
        self.residual = TokenLinear(inputs, spec.tokens) if spec.shortcut and inputs != spec.tokens else None

    def prefetch(self, x_BND: Tensor) -> None:
        """Tells experts that are spread over ranks the leading tokens of the next `forward`, as soon as they exist."""
        for member in self.members:
            if (exchange := getattr(member, "exchange", None)) is not None:
                exchange.prefetch(x_BND)

    def forward(self, x_BND: Tensor) -> Tensor:
        made = torch.cat([self._checked(number, member(x_BND), x_BND) for number, member in enumerate(self.members)], 1)
        if self.spec.shortcut:
            made = made + (x_BND if self.residual is None else self.residual(x_BND))
        return layer_norm(made)

    def _checked(self, number: int, made: Tensor, x_BND: Tensor) -> Tensor:
        """What a core made: another shape would be broadcast against the shortcut unseen."""
        core = self.spec.cores()[number]
        expected = (len(x_BND), core.tokens, x_BND.shape[2])
        if made.shape != expected:
            raise InputError(f"{core.kind}: its module made {tuple(made.shape)}, not [B, tokens, dim] = {expected}")
        return made


class MlpCore(nn.Module):
    """An MLP over all tokens: [B, n, dim] → [B, tokens, dim]."""

    def __init__(self, spec: MlpSpec | DotSpec | DcnSpec, inputs: int, dim: int) -> None:
        super().__init__()
        self.tokens = spec.tokens
        self.mlp = MLP(spec.features(inputs, dim), spec.hidden, spec.tokens * dim)

    def forward(self, x_BND: Tensor) -> Tensor:
        made: Tensor = self.mlp(self._features(x_BND))
        return made.view(len(x_BND), self.tokens, x_BND.shape[2])

    def _features(self, x_BND: Tensor) -> Tensor:
        return x_BND.flatten(1)


class DotCore(MlpCore):
    """The products of all pairs of tokens beside the tokens."""

    def _features(self, x_BND: Tensor) -> Tensor:
        products = torch.bmm(x_BND, x_BND.transpose(1, 2)) * x_BND.shape[2] ** -0.5
        first, second = torch.triu_indices(x_BND.shape[1], x_BND.shape[1], offset=1, device=x_BND.device)
        return torch.cat([x_BND.flatten(1), products[:, first, second]], dim=1)


class DcnCore(MlpCore):
    """Low-rank crosses of the flattened tokens."""

    def __init__(self, spec: DcnSpec, inputs: int, dim: int) -> None:
        super().__init__(spec, inputs, dim)
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
