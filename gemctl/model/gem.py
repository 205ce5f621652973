"""The GEM model: embedding tables, and a dense part that crosses non-sequence tokens with event histories.

    X, S ← tokens, events;  each layer: S ← SequenceBlock(S, X), X ← Interaction([X ‖ Summary(S)]);  logits ← heads(X)

InterFormer's alternation (arXiv 2411.09852) with Kunlun's sequence block and Wukong's interaction. Built under
`with torch.device("meta")` it holds no memory; `gemctl.model.init.init_rules` says what each parameter starts from.
"""

import torch
from torch import Tensor, nn

from gemctl.data.batch import Batch
from gemctl.model.embeddings import Embedded, Tables
from gemctl.model.heads import TaskHeads
from gemctl.model.sequence import SequenceBlock
from gemctl.model.summary import PooledAttention
from gemctl.model.tokens import EventEncoder, NonSequenceTokens
from gemctl.model.wukong import WukongBlock
from gemctl.specs.data import FeatureSpec
from gemctl.specs.model import ModelConfig


class Layer(nn.Module):
    """One sequence block and summary per event sequence, and one interaction block over all tokens."""

    def __init__(self, model: ModelConfig, spec: FeatureSpec, tokens: int) -> None:
        super().__init__()
        names = [sequence.name for sequence in spec.sequences]
        self.sequence = nn.ModuleDict(
            {name: SequenceBlock(model.sequence, tokens, model.dim, model.heads) for name in names}
        )
        self.summary = nn.ModuleDict({name: PooledAttention(model.summary, model.dim, model.heads) for name in names})
        merged = tokens + len(names) * model.summary.seeds
        self.interaction = WukongBlock(model.interaction, merged, model.dim)

    def forward(self, x: Tensor, events: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        summaries, updated = [], {}
        for name, s in events.items():
            history = batch.sequences[name]
            updated[name] = self.sequence[name](s, x, history.offsets, history.max_length)
            summaries.append(self.summary[name](updated[name], history.offsets, history.max_length))
        return self.interaction(torch.cat([x, *summaries], dim=1)), updated


class DenseModel(nn.Module):
    """Everything but the tables. `forward` is float32 logits [B, T]; B = 0 and empty histories are legal."""

    def __init__(self, model: ModelConfig, spec: FeatureSpec) -> None:
        super().__init__()
        self.tokens = NonSequenceTokens(spec, model.dim)
        self.events = nn.ModuleDict({s.name: EventEncoder(model, s) for s in spec.sequences})
        tokens = len(spec.categorical) + bool(spec.dense) + bool(spec.domain)
        self.layers = nn.ModuleList()
        for _ in range(model.layers):
            self.layers.append(Layer(model, spec, tokens))
            tokens = model.interaction.fm_tokens + model.interaction.lc_tokens
        self.heads = TaskHeads(spec, tokens * model.dim, model.head_hidden)

    def forward(self, batch: Batch, embedded: Embedded) -> Tensor:
        x = self.tokens(batch, embedded)
        events = {name: encoder(batch.sequences[name], embedded) for name, encoder in self.events.items()}
        for layer in self.layers:
            x, events = layer(x, events, batch)
        return self.heads(x.flatten(1), batch.domain).float()


class GemModel(nn.Module):
    """`tables` and `dense`; the caller joins them (`gemctl.model.embeddings`), as tables are looked up once a step."""

    def __init__(self, model: ModelConfig, spec: FeatureSpec) -> None:
        super().__init__()
        self.tables = Tables(spec, model.dim)
        self.dense = DenseModel(model, spec)
