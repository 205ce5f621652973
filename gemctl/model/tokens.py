"""What the blocks read: non-sequence tokens X [B, n, dim] and encoded events S [N, dim].

    X = LN( [categorical embeddings ‖ MLP(dense) ‖ domain's token] )           one token each
    S = Σ id embeddings + W [floats ‖ log(1 + age/scale)/4 by scale ‖ log(1 + place)/2 ‖ e^(−place/τ) by τ] + b

τ = 1, 3, 9, 27; the newest event has place 0; the MLP has one hidden layer of width dim. From the second layer on, X is
the output of the previous interaction block.
"""

import torch
from torch import Tensor, nn

from gemctl.data.batch import Batch, EventSequence
from gemctl.model.embeddings import Embedded
from gemctl.model.events import Events, places
from gemctl.model.init import InitRule
from gemctl.model.layers import MLP, layer_norm
from gemctl.specs.count import event_features
from gemctl.specs.data import FeatureSpec, SequenceSpec
from gemctl.specs.model import PLACE_SCALES, ModelConfig


class NonSequenceTokens(nn.Module):
    """One token per categorical feature, one for all dense features, one for the domain, normalised: [B, n, dim].

    Normalised tokens of all kinds have the same length, so no kind dominates the products in the interaction block.
    """

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
        return layer_norm(torch.stack(tokens, dim=1))


class DomainToken(nn.Module):
    """A learned token per domain: [B] → [B, dim]."""

    def __init__(self, domains: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(domains, dim))

    def forward(self, domain: Tensor) -> Tensor:
        return self.weight[domain]

    def init_rules(self) -> dict[str, InitRule]:
        return {"weight": InitRule("uniform", self.weight.shape[1] ** -0.5)}


class EventEncoder(nn.Module):
    """The sum of an event's id embeddings, and a linear map of its floats, age and place in the history.

    Summed embeddings (as in ULTRA-HSTU, arXiv 2602.16986) stay in the space of the candidate's tokens, so that the
    match of a candidate with an event is a product from the first step on.
    """

    def __init__(self, model: ModelConfig, spec: SequenceSpec) -> None:
        super().__init__()
        self.ids = [f"{spec.name}.{feature.name}" for feature in spec.ids]
        self.floats = [feature.name for feature in spec.floats]
        self.age_scales = model.age_scales
        self.linear = nn.Linear(event_features(model, spec), model.dim)

    def forward(self, events: EventSequence, embedded: Embedded) -> Events:
        place = places(events.offsets, len(events.ages))
        columns = [events.floats[name] for name in self.floats] + self._ages(events)
        columns += place_features(place.to(events.ages.dtype))
        s = self.linear(torch.stack(columns, dim=1).to(self.linear.weight.dtype))
        for name in self.ids:
            s = s + embedded.events[name]
        return Events(s, events.offsets, place, events.ages, events.max_length)

    def _ages(self, events: EventSequence) -> list[Tensor]:
        """log(1 + age/scale)/4: of order 1 for ages up to some thousand scales."""
        return [torch.log1p(events.ages / scale) / 4 for scale in self.age_scales]


def place_features(place: Tensor) -> list[Tensor]:
    """[N] each: log(1 + place)/2 and e^(−place/τ) for τ in `PLACE_SCALES`; the newest event has place 0."""
    return [torch.log1p(place) / 2, *(torch.exp(-place / scale) for scale in PLACE_SCALES)]
