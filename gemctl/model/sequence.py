"""Sequence blocks: what a layer does with one history S [N, width], given the row's tokens X_sum [B, t, dim].

    Kunlun (arXiv 2602.10016)        S ← S + GDPA(LN(S), K(x), V(x));  S ← S + MHA(S)
    InterFormer (arXiv 2411.09852)   S ← S + f(x)·LN(S);  S ← S + MHA(S)      (without `residual`: S ← MHA(f(x)·LN(S)))
    HSTU (arXiv 2402.17152)          S ← S + SiLU attention(S)                 (it reads no X_sum)

x = flatten(X_sum), or W_C x with `generator_rank`; K(x) = W_K x + b_K and V(x) = W_V x make `hidden` keys and values
per row. GDPA is act(q·kᵀ/√d_h) V/√hidden head by head, the two-layer network act(S W₁(x)) W₂(x) whose weights belong to
the row.
f(x) is its linear form: one head, act the identity, so f(x) = V(x)ᵀ K(x) / √(width · ffn_rank), any matrix of that
rank. X_sum has the candidate among its tokens: here the candidate meets each event. MHA norms its input itself
(attention.py). With CompSkip the layers of one parity have no MHA.
"""

from torch import Tensor, nn

from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged import every
from gemctl.model.attention import SelfAttention, SiluAttention
from gemctl.model.events import Events
from gemctl.model.layers import ZeroLinear, layer_norm
from gemctl.specs.layout import HistoryLayer
from gemctl.specs.sequence import HstuSpec, InterFormerSpec


class PersonalisedFFN(nn.Module):
    """GDPA of events [N, width] with `hidden` keys and values per row, made from X_sum [B, tokens, dim].

    `rank`: of the map from X_sum to each; None: any.
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
    """Kunlun's and InterFormer's block: a personalised feed-forward, then self-attention if the layer has any."""

    def __init__(self, layer: HistoryLayer, x_sum: int, dim: int) -> None:
        super().__init__()
        spec, history = layer.block, layer.history
        assert spec is not None and not isinstance(spec, HstuSpec)
        own = history.dim
        if isinstance(spec, InterFormerSpec):
            self.residual = spec.residual
            self.ffn = PersonalisedFFN(spec.ffn_rank, "identity", x_sum * dim, own, 1, spec.residual)
        else:
            self.residual = True
            inputs, rank = x_sum * dim, spec.generator_rank
            self.ffn = PersonalisedFFN(spec.ffn_hidden, spec.activation, inputs, own, history.heads, rank=rank)
        self.attention = SelfAttention(spec.attention, own, history.heads, self.residual) if layer.attends else None

    def forward(self, events: Events, x_sum: Tensor) -> Events:
        events = self._add(events, self.ffn(events, x_sum))
        return events if self.attention is None else self._add(events, self.attention(events))

    def _add(self, events: Events, made: Tensor) -> Events:
        return events.of(events.values + made if self.residual else made)


class HstuBlock(nn.Module):
    """HSTU's block; X_sum is not read."""

    def __init__(self, layer: HistoryLayer) -> None:
        super().__init__()
        assert isinstance(layer.block, HstuSpec)
        self.attention = SiluAttention(layer.block, layer.history.dim, layer.history.heads)

    def forward(self, events: Events, x_sum: Tensor | None) -> Events:
        return events.of(events.values + self.attention(events))


def sequence_block(layer: HistoryLayer, x_sum: int, dim: int) -> nn.Module | None:
    """The block of one history in one layer; None where its events stay as they are."""
    if layer.block is None:
        return None
    return HstuBlock(layer) if isinstance(layer.block, HstuSpec) else PersonalisedBlock(layer, x_sum, dim)
