"""The model: embedding tables, and a dense part that crosses non-sequence tokens with event histories.

    X, S ← tokens, events (tokens.py); with model.merge all histories become one (events.py)
    each layer:
        X_sum ← gate(C X)                               C [x_sum, n]; gates as in summary.py
        first layer: S ← [X_sum ‖ S] where a summary reads CLS tokens;  S ← S A where a history has its own width
        S ← sequence block(S, X_sum)                    sequence.py; every history its own
        H ← summary(S), or the last one again           summary.py; CompSkip, depth of an event type
        X ← interaction([X ‖ H …]), or of [X_sum ‖ H …] interaction.py
    logits of each task ← MLP(flatten(X)) at the row's domain

This is InterFormer's alternation (arXiv 2411.09852); Kunlun, HSTU and GEM are choices of its blocks. A layer's summary
reads the events that the layer has updated, so the last sequence block counts; a block that no summary reads is left
out (gemctl/specs/layout.py). Built under `with torch.device("meta")` the model holds no memory;
`gemctl.model.init.init_rules` has the initial value of each parameter.
"""

import torch
from torch import Tensor, nn

from gemctl.data.batch import Batch
from gemctl.model import experts, sequence  # noqa: F401  the ranks that an agent forks share them
from gemctl.model.build import build
from gemctl.model.embeddings import Embedded, Tables
from gemctl.model.events import Events, MaskNet, prepend
from gemctl.model.interaction import InteractionBlock
from gemctl.model.layers import MLP, TokenLinear, make_gate
from gemctl.model.summary import HistorySummary
from gemctl.model.tokens import EventEncoder, NonSequenceTokens
from gemctl.specs import layout as layouts
from gemctl.specs.data import FeatureSpec
from gemctl.specs.layout import MERGED, Layout
from gemctl.specs.model import ModelConfig


class TokenSum(nn.Module):
    """X_sum: [B, inputs, dim] → [B, outputs, dim], a gated linear compression of the tokens."""

    def __init__(self, inputs: int, outputs: int, dim: int, gate: str) -> None:
        super().__init__()
        self.compression = TokenLinear(inputs, outputs)
        self.gate = make_gate(gate, dim)

    def forward(self, x_BND: Tensor) -> Tensor:
        compressed: Tensor = self.compression(x_BND)
        return compressed if self.gate is None else self.gate(compressed)


class Layer(nn.Module):
    """A sequence block and a summary for every history, and one interaction block over all tokens."""

    def __init__(self, own: layouts.Layer, dim: int, first: bool, cls: int) -> None:
        super().__init__()
        self.reads_x_sum, self.prepends = own.spec.reads == "x_sum", bool(first and cls)
        self.x_sum = TokenSum(own.inputs, own.x_sum, dim, own.spec.x_sum_gate) if own.x_sum else None
        widths = {row.history.name: row.history.dim for row in own.histories if first}
        self.adapters = nn.ModuleDict(
            {name: nn.Linear(dim, width, bias=False) for name, width in widths.items() if width != dim}
        )
        self.sequence, self.summary = nn.ModuleDict(), nn.ModuleDict()
        for row in own.histories:
            name, width, heads = row.history.name, row.history.dim, row.history.heads
            if row.block is not None:
                self.sequence[name] = build(row.block, width, heads, own.x_sum * dim, row.attends)
            if row.summary is not None:
                self.summary[name] = HistorySummary(row.summary, width, heads, dim)
        self.interaction = InteractionBlock(own.spec.interaction, own.reads, dim)

    def forward(
        self, x: Tensor, histories: dict[str, Events], summaries: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Events], dict[str, Tensor]]:
        """Updates X, the histories and the newest summary of each."""
        x_sum: Tensor = x if self.x_sum is None else self.x_sum(x)  # then nothing reads it
        leading = x_sum if self.reads_x_sum else x
        self.interaction.prefetch(leading)
        updated: dict[str, Events] = {}
        for name, before in histories.items():
            events = prepend(x_sum, before) if self.prepends else before
            if name in self.adapters:
                events = events.of(self.adapters[name](events.values))
            updated[name] = self.sequence[name](events, x_sum) if name in self.sequence else events
        newest = summaries | {name: summary(updated[name]) for name, summary in self.summary.items()}
        tokens = torch.cat([leading, *newest.values()], dim=1)
        return self.interaction(tokens), updated, newest


class TaskHeads(nn.Module):
    """[B, inputs] → logits [B, T]: of each task's outputs, the one of the row's domain (one if there are none)."""

    def __init__(self, spec: FeatureSpec, inputs: int, hidden: list[int]) -> None:
        super().__init__()
        domains = spec.domain.count if spec.domain else 1
        self.tasks = nn.ModuleList(MLP(inputs, hidden, domains) for _ in spec.labels)

    def forward(self, x: Tensor, domain: Tensor) -> Tensor:
        return torch.cat([task(x).gather(1, domain[:, None]) for task in self.tasks], dim=1)


class DenseModel(nn.Module):
    """Everything but the tables. `forward` returns logits float32 [B, T]; B = 0 and empty histories are legal."""

    def __init__(self, model: ModelConfig, spec: FeatureSpec) -> None:
        super().__init__()
        plan: Layout = layouts.layout(model, spec)
        self.tokens = NonSequenceTokens(spec, model.dim)
        self.events = nn.ModuleDict({s.name: EventEncoder(model, s) for s in spec.sequences})
        count = len(spec.sequences)
        self.merge = MaskNet(count, model.dim, model.merge.hidden) if model.merge and count else None
        self.layers = nn.ModuleList(
            Layer(layer, model.dim, index == 0, plan.cls) for index, layer in enumerate(plan.layers)
        )
        self.heads = TaskHeads(spec, plan.outputs * model.dim, model.head_hidden)

    def forward(self, batch: Batch, embedded: Embedded) -> Tensor:
        x = self.tokens(batch, embedded)
        histories = {name: encoder(batch.sequences[name], embedded) for name, encoder in self.events.items()}
        if self.merge is not None:
            histories = {MERGED: self.merge(histories)}
        summaries: dict[str, Tensor] = {}
        for layer in self.layers:
            x, histories, summaries = layer(x, histories, summaries)
        return self.heads(x.flatten(1), batch.domain).float()


class GemModel(nn.Module):
    """`tables` and `dense`; the caller connects them (`gemctl.model.embeddings`): one lookup per step."""

    def __init__(self, model: ModelConfig, spec: FeatureSpec) -> None:
        super().__init__()
        self.tables = Tables(spec, model.dim)
        self.dense = DenseModel(model, spec)
