"""A mixture of Wukong experts (Kunlun, arXiv 2602.10016): tokens are split, each expert crosses its own part.

    X_e = the w = ⌈n/E⌉ tokens e·w, e·w + 1, … modulo n          for expert e = 0 … E−1
    Y_e = LN( concat(FMB_e(X_e), LCB_e(X_e)) + R_e X_e )         a Wukong layer (gemctl/model/interaction.py) of its own
    Y   = Σ_e M_e Y_e                                            M_e [tokens, fm_tokens + lc_tokens] merges them

The block around it adds the shortcut and the norm. Any number of tokens is legal: if E does not divide n, the last
experts wrap around to the first tokens, so there is no padding and no weight without data. R_e is the identity if
w = fm_tokens + lc_tokens.

Every parameter stacks the experts along dim 0, so a full state does not depend on how they are spread. Under expert
parallelism a rank holds some experts (dim 0 of its local weights) and nothing is routed: `exchange` gathers the group's
rows, the local experts compute their part of the output for all of them, and a reduce-scatter sums the parts.
"""

from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gemctl.model.init import InitRule
from gemctl.model.layers import layer_norm
from gemctl.specs.interaction import WukongExpertsSpec


class Exchange(Protocol):
    """Moves rows between the ranks of an expert group; both directions are differentiable."""

    first: int
    """The first expert that this rank holds."""

    def prefetch(self, x: Tensor) -> None:
        """Starts the all-gather of the leading tokens of the next `gather`'s input."""

    def gather(self, x: Tensor) -> Tensor:
        """[B, n, D] of this rank → [ΣB, n, D] of its group."""

    def reduce_scatter(self, y: Tensor) -> Tensor:
        """[ΣB, out, D] → [B, out, D]: the sum over the group, this rank's rows of it."""


def local(weight: Tensor) -> Tensor:
    """This rank's part of a stacked weight: experts first … first + dim 0 − 1."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class StackedLinear(nn.Module):
    """One linear map per expert: [E, N, inputs] → [E, N, outputs]."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs))

    def forward(self, x_ENI: Tensor) -> Tensor:
        return torch.bmm(x_ENI, local(self.weight).transpose(1, 2)) + local(self.bias)[:, None]

    def init_rules(self) -> dict[str, InitRule]:
        return {"weight": InitRule("uniform", self.weight.shape[2] ** -0.5), "bias": InitRule("zeros")}


class WukongExperts(nn.Module):
    """[B, inputs, dim] → [B, spec.tokens, dim] by `spec.experts` experts."""

    def __init__(self, spec: WukongExpertsSpec, inputs: int, dim: int) -> None:
        super().__init__()
        self.exchange: Exchange | None = None
        self.inputs, self.part, self.fm_tokens = inputs, spec.part(inputs), spec.fm_tokens
        experts, made = spec.experts, spec.fm_tokens + spec.lc_tokens
        self.fm_columns = nn.Parameter(torch.empty(experts, self.part, spec.rank))
        widths = [self.part * spec.rank, *spec.hidden, spec.fm_tokens * dim]
        self.fm_mlp = nn.ModuleList(StackedLinear(experts, a, b) for a, b in pairwise(widths))
        self.compression = nn.Parameter(torch.empty(experts, spec.lc_tokens, self.part))
        self.residual = nn.Parameter(torch.empty(experts, made, self.part)) if made != self.part else None
        self.merge = nn.Parameter(torch.empty(experts, spec.tokens, made))

    def forward(self, x_BND: Tensor) -> Tensor:
        if self.exchange is None:
            return self._part_of_output(x_BND, 0)
        gathered = self.exchange.gather(x_BND)
        return self.exchange.reduce_scatter(self._part_of_output(gathered, self.exchange.first))

    def _part_of_output(self, x_BND: Tensor, first: int) -> Tensor:
        """Σ M_e Y_e over this rank's experts, [B, tokens, D]."""
        merge = local(self.merge)
        held, rows, dim = len(merge), x_BND.shape[0], x_BND.shape[2]
        index = torch.arange(first * self.part, (first + held) * self.part, device=x_BND.device) % self.inputs
        x_EBND = x_BND.index_select(1, index).view(rows, held, self.part, dim).transpose(0, 1)
        x_ETN = x_EBND.transpose(2, 3).reshape(held, rows * dim, self.part)  # T: each column of each row
        made = torch.cat([self._fm(x_EBND, x_ETN), _mix(self.compression, x_ETN, rows, dim)], dim=2)
        shortcut = x_EBND if self.residual is None else _mix(self.residual, x_ETN, rows, dim)
        y_EBND = layer_norm(made + shortcut)
        return torch.matmul(merge.transpose(0, 1).flatten(1), y_EBND.transpose(0, 1).flatten(1, 2))

    def _fm(self, x_EBND: Tensor, x_ETN: Tensor) -> Tensor:
        held, rows, _, dim = x_EBND.shape
        columns = local(self.fm_columns)
        inner = torch.bmm(x_ETN, columns).view(held, rows, dim, columns.shape[2])
        hidden = layer_norm(torch.matmul(x_EBND, inner).flatten(2))
        for number, linear in enumerate(self.fm_mlp):
            hidden = linear(hidden if number == 0 else F.gelu(hidden))
        return hidden.view(held, rows, self.fm_tokens, dim)

    def init_rules(self) -> dict[str, InitRule]:
        mixed = InitRule("uniform", self.part**-0.5)
        experts, _, made = self.merge.shape
        rules = {"fm_columns": mixed, "compression": mixed, "merge": InitRule("uniform", (experts * made) ** -0.5)}
        return rules if self.residual is None else {**rules, "residual": mixed}


def _mix(weight: Tensor, x_ETN: Tensor, rows: int, dim: int) -> Tensor:
    """Each expert's own mix of its tokens: [E, B·D, n] → [E, B, outputs, D]."""
    held = local(weight)
    return torch.bmm(x_ETN, held.transpose(1, 2)).view(len(held), rows, dim, held.shape[1]).transpose(2, 3)
