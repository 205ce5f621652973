"""What the blocks read: non-sequence tokens X [B, n, dim] and encoded events S [ΣL, dim]."""

import torch
from torch import Tensor, nn

from gemctl.data.batch import Batch, EventSequence
from gemctl.model.embeddings import Embedded
from gemctl.model.init import InitRule
from gemctl.model.layers import MLP
from gemctl.specs.data import FeatureSpec, SequenceSpec


class NonSequenceTokens(nn.Module):
    """One token per categorical feature, one for all dense features, one for the domain: [B, n, dim]."""

    def __init__(self, spec: FeatureSpec, dim: int) -> None:
        super().__init__()
        self.dense = MLP(len(spec.dense), [dim], dim) if spec.dense else None
        self.domain = DomainToken(spec.domain.count, dim) if spec.domain else None

    def forward(self, batch: Batch, embedded: Embedded) -> Tensor:
        tokens = list(embedded.categorical.values())
        if self.dense is not None:
            tokens.append(self.dense(batch.dense))
        if self.domain is not None:
            tokens.append(self.domain(batch.domain))
        return torch.stack(tokens, dim=1)


class DomainToken(nn.Module):
    """A learned token for each domain: [B] → [B, dim]."""

    def __init__(self, domains: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(domains, dim))

    def forward(self, domain: Tensor) -> Tensor:
        return self.weight[domain]

    def init_rules(self) -> dict[str, InitRule]:
        return {"weight": InitRule("uniform", 1.0)}


class EventEncoder(nn.Module):
    """One linear map of an event's id embeddings, floats, age and place in the history to S [ΣL, dim]."""

    def __init__(self, spec: SequenceSpec, dim: int, time_scale: float) -> None:
        super().__init__()
        self.names = [f"{spec.name}.{feature.name}" for feature in spec.ids]
        self.floats = [feature.name for feature in spec.floats]
        self.time_scale = time_scale
        self.linear = nn.Linear(len(self.names) * dim + len(self.floats) + RECENCY_FEATURES, dim)

    def forward(self, events: EventSequence, embedded: Embedded) -> Tensor:
        floats = [events.floats[name][:, None] for name in self.floats]
        ids = [embedded.events[name] for name in self.names]
        recency = recency_features(events, self.time_scale).to(ids[0].dtype)
        return self.linear(torch.cat([*ids, *floats, recency], dim=1))


RECENCY_FEATURES = 6


def recency_features(events: EventSequence, time_scale: float) -> Tensor:
    """Age and place of each event, [ΣL, 6]: log(1 + age/scale), log(1 + place), e^(−place/τ) for τ = 1, 3, 9, 27.

    `place` counts from the newest event, which has place 0.
    """
    lengths = events.offsets.diff()
    ends = torch.repeat_interleave(events.offsets[1:], lengths)
    place = (ends - 1 - torch.arange(len(ends), device=ends.device)).to(events.ages.dtype)
    decays = [torch.exp(-place / scale) for scale in (1.0, 3.0, 9.0, 27.0)]
    return torch.stack([torch.log1p(events.ages / time_scale), torch.log1p(place), *decays], dim=1)
