"""Sequence blocks: what a layer does with one history S [N, width], given the row's tokens X_sum [B, t, dim].

    Kunlun (arXiv 2602.10016)        S ← S + GDPA(LN(S), K(x), V(x));  S ← S + MHA(S)
    InterFormer (arXiv 2411.09852)   S ← S + f(x)·LN(S);  S ← S + MHA(S)      (without `residual`: S ← MHA(f(x)·LN(S)))
    HSTU (arXiv 2402.17152)          S ← S + SiLU attention(S)                 (it reads no X_sum)

x = flatten(X_sum), or W_C x with `generator_rank`; K(x) = W_K x + b_K and V(x) = W_V x make `hidden` keys and values
per row. GDPA is act(q·kᵀ/√d_h) V/√hidden head by head: the two-layer network act(S W₁(x)) W₂(x) with weights of the
row's own. f(x) is linear: one head, act the identity, so f(x) = V(x)ᵀ K(x) / √(width · ffn_rank), any matrix of that
rank. X_sum contains the candidate, so here the candidate meets each event. MHA normalises its input itself
(attention.py). With CompSkip, layers of one parity have no MHA.
"""

from torch import Tensor, nn

from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged import every
from gemctl.model.attention import SiluAttention
from gemctl.model.build import build
from gemctl.model.events import Events
from gemctl.model.layers import ZeroLinear, layer_norm
from gemctl.specs.sequence import HstuSpec, InterFormerSpec, KunlunSpec


class PersonalisedFFN(nn.Module):
    """GDPA of events [N, width] with `hidden` keys and values per row, made from X_sum [B, tokens, dim].

    `rank`: of the maps from X_sum; None: full.
    """

    def __init__(
        self,
        hidden: int,
        activation: str,
        inputs: int,
        width: int,
        heads: int,
        residual: bool = True,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.hidden, self.activation = heads, hidden, activation
        self.code = nn.Linear(inputs, rank, bias=False) if rank else nn.Identity()
        inputs = rank or inputs
        self.keys = nn.Linear(inputs, hidden * width)
        self.values = ZeroLinear(inputs, hidden * width) if residual else nn.Linear(inputs, hidden * width, bias=False)

    def forward(self, events: Events, x_sum: Tensor) -> Tensor:
        rows, width = len(x_sum), events.values.shape[1] // self.heads
        x = self.code(x_sum.flatten(1))
        k, v = (make(x).view(rows * self.hidden, self.heads, width) for make in (self.keys, self.values))
        return gdpa(
            layer_norm(events.values).view(-1, self.heads, width),
            k,
            v,
            events.offsets,
            every(self.hidden, events.offsets),
            events.max_length,
            self.hidden,
            activation=self.activation,
            pre_scale=width**-0.5,
            post_scale=self.hidden**-0.5,
        ).flatten(1)


class PersonalisedBlock(nn.Module):
    """A personalised feed-forward, then self-attention in the layers that have it."""

    def __init__(self, ffn: PersonalisedFFN, attention: nn.Module | None, residual: bool) -> None:
        super().__init__()
        self.ffn, self.attention, self.residual = ffn, attention, residual

    def forward(self, events: Events, x_sum: Tensor) -> Events:
        events = self._add(events, self.ffn(events, x_sum))
        return events if self.attention is None else self._add(events, self.attention(events))

    def _add(self, events: Events, made: Tensor) -> Events:
        return events.of(events.values + made if self.residual else made)


class KunlunBlock(PersonalisedBlock):
    """Kunlun's block over events of one width; `x_sum`: numbers of a row's X_sum."""

    def __init__(self, spec: KunlunSpec, width: int, heads: int, x_sum: int, attends: bool) -> None:
        ffn = PersonalisedFFN(spec.ffn_hidden, spec.activation, x_sum, width, heads, rank=spec.generator_rank)
        super().__init__(ffn, build(spec.attention, width, heads, True) if attends else None, residual=True)


class InterFormerBlock(PersonalisedBlock):
    """InterFormer's block; arguments as above."""

    def __init__(self, spec: InterFormerSpec, width: int, heads: int, x_sum: int, attends: bool) -> None:
        ffn = PersonalisedFFN(spec.ffn_rank, "identity", x_sum, width, 1, spec.residual)
        attention = build(spec.attention, width, heads, spec.residual) if attends else None
        super().__init__(ffn, attention, spec.residual)


class HstuBlock(nn.Module):
    """HSTU's block; X_sum is not read."""

    def __init__(self, spec: HstuSpec, width: int, heads: int, x_sum: int, attends: bool) -> None:
        super().__init__()
        self.attention = SiluAttention(spec, width, heads)

    def forward(self, events: Events, x_sum: Tensor | None) -> Events:
        return events.of(events.values + self.attention(events))
