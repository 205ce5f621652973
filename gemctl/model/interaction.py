"""Interaction blocks: tokens X [B, n, dim] crossed with each other → [B, outputs, dim].

    wukong, wukong_experts   X' = LN( core(X) + R X )                          Wukong, experts.py
    dhen                     X' = LN( [core_1(X) ‖ core_2(X) ‖ …] + R X )       DHEN, arXiv 2203.11014
    your own                 X' = LN( core(X) + R X )                           gemctl/specs/custom.py
    mlp                      X' = LN( reshape(MLP(x)) ),  x = flatten(X)
    dot                      X' = LN( reshape(MLP([x ‖ X_i·X_j/√dim for i < j])) )     DLRM, arXiv 1906.00091
    token_mixer              X' = LN( core(X) )                                 TokenMixer
    dcnv2                    X' = LN( reshape(MLP(c)) ),  c ← x ⊙ (U_l V_l c + b_l) + c, from c = x on, for each cross l
                                                                               DCN-V2, arXiv 2008.13535

R maps tokens linearly, [outputs, n], and is the identity where n = outputs. InterFormer's MLP(Interact(X)) is dot,
dcnv2 or dhen here. Members of a dhen block have no norms of their own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemctl.errors import InputError
from gemctl.model.build import build_core
from gemctl.model.init import InitRule
from gemctl.model.layers import MLP, TokenLinear, layer_norm
from gemctl.specs.interaction import DcnSpec, DotSpec, Interaction, MlpSpec, TokenMixerSpec, WukongSpec


class InteractionBlock(nn.Module):
    """Its cores side by side, with shortcut and norm: [B, inputs, dim] → [B, spec.tokens, dim]."""

    def __init__(self, spec: Interaction, inputs: int, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.members = nn.ModuleList(build_core(core, inputs, dim) for core in spec.cores())
        self.residual = TokenLinear(inputs, spec.tokens) if spec.shortcut and inputs != spec.tokens else None

    def prefetch(self, x_BND: Tensor) -> None:
        """Gives experts that are spread over ranks the leading tokens of the next `forward` as soon as they exist."""
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


class Wukong(nn.Module):
    """[B, inputs, dim] → [B, fm_tokens + lc_tokens, dim] (arXiv 2403.02545).

        core(X) = concat(FMB(X), LCB(X))
        FMB(X) = MLP(LN(flatten(X (Xᵀ Y)))),   LCB(X) = W_L X    Y [n, rank]: a parameter ("learnable"), or
        Y(X) = reshape(MLP_Y(flatten(W_Y X)))                    made from the row's own tokens ("attentive")

    Stacked blocks cover interactions of order 1 … 2^layers.
    """

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


class TokenMixer(nn.Module):
    """RankMixer's core (arXiv 2507.15551), [B, inputs, dim] → [B, tokens, dim]: large matrix products and nothing else.

        core(X) = M + FFN(M),  M = LN(Z + mix(Z))
        Z = the tokens R X as T = tokens/group wide ones, [B, T, D], D = group · dim
        mix: each wide token is cut into T parts; new token t is part t of every token, in their order
        FFN: W₂ᵗ GELU(W₁ᵗ m + b₁ᵗ) + b₂ᵗ, with weights of its own for each wide token

    In the paper tokens are of any width; here a wide token is `group` of the model's tokens, which have the width of
    the tables.
    """

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
