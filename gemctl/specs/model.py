"""What a model is made of, torch-free: the plan counts from it and gemctl/model/ builds from it.

    model:
      dim: 64
      layers:
        - repeat: 2                      # two such layers; their blocks are chosen by kind
          sequence: {kind: kunlun, attention: {kind: jagged_flash_attention, window: 50}}
          summary: {kind: hsp, tokens: 8}
          interaction: {kind: wukong, hidden: [256]}

Each layer: S ← sequence(S, X_sum) and H ← summary(S) for every event sequence, then X ← interaction([X ‖ H]).
What that means for a feature spec, layer by layer, is `gemctl.specs.layout`.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from gemctl.specs.interaction import InteractionSpec, WukongSpec
from gemctl.specs.limits import FORBID, Size
from gemctl.specs.sequence import Gate, KunlunSpec, PmaSpec, SequenceBlockSpec, SummarySpec
from gemctl.specs.weights import Counts, mlp

PLACE_SCALES = (1, 3, 9, 27)
"""An event's place in its history, 0 for the newest, enters as log(1 + place) and as e^(−place/τ) for these τ."""

INDEX = 2
"""float32 values of the int64 that is kept for each event that moves."""

MOST_LAYERS = 1024
Width = Annotated[int, Field(ge=4, le=2**24, multiple_of=4)]


@dataclass
class LayerSpec:
    """`repeat` layers of one form: what is done with the events, their summary, and the tokens' interaction."""

    __pydantic_config__ = FORBID
    repeat: Annotated[int, Field(ge=1, le=MOST_LAYERS, description="layers of this form, one after the other")] = 1
    x_sum: Annotated[Size, Field(description="X_sum: tokens that X is compressed to for the sequence blocks")] = 4
    x_sum_gate: Annotated[
        Gate, Field(description="of X_sum; literal: σ(Z ⊙ MLP(Z)); scaled: Z ⊙ σ(MLP(Z)), Z the compressed tokens")
    ] = "none"
    reads: Annotated[
        Literal["x", "x_sum"], Field(description="what the interaction reads beside the summaries (Kunlun: x_sum)")
    ] = "x"
    comp_skip: Annotated[
        Literal["even", "odd"] | None,
        Field(
            description="CompSkip (Kunlun): layers of this parity, the first being 0, skip self-attention; the others "
            "read the last summary again"
        ),
    ] = None
    sequence: Annotated[SequenceBlockSpec, Field(description="what is done with the events")] = field(
        default_factory=KunlunSpec
    )
    summary: Annotated[SummarySpec, Field(description="how a history becomes tokens")] = field(default_factory=PmaSpec)
    interaction: Annotated[InteractionSpec, Field(description="how tokens and summaries are crossed")] = field(
        default_factory=WukongSpec
    )


@dataclass
class EventTypeSpec:
    """What one event sequence has otherwise than the model (Kunlun's event personalisation); null: as the model."""

    __pydantic_config__ = FORBID
    dim: Annotated[Width | None, Field(description="width of its events")] = None
    heads: Annotated[Size | None, Field(description="attention heads; divides its width")] = None
    tokens: Annotated[Size | None, Field(description="tokens of each of its summaries of kind pma, hsp or last_k")] = (
        None
    )
    depth: Annotated[
        int | None, Field(ge=1, le=MOST_LAYERS, description="layers that update it; later ones read its last summary")
    ] = None
    window: Annotated[int | None, Field(ge=0, le=2**24, description="window of its attention")] = None


@dataclass
class MaskNetSpec:
    """Several histories as one (InterFormer): events of equal place side by side, through MaskNet."""

    __pydantic_config__ = FORBID
    hidden: Annotated[Size, Field(description="hidden width of both of its MLPs")] = 64

    def counts(self, sources: int, dim: int) -> Counts:
        """Of `MaskNet(sources, dim, hidden)` of gemctl/model/events.py.

        Kept: its input, mask and product, both hidden layers twice, and where each event goes.
        """
        width = sources * dim
        weights = mlp("mask", width, [self.hidden], width) + mlp("mlp", width, [self.hidden], dim)
        return Counts([], weights, kept_by_event=3 * width + 4 * self.hidden + sources * INDEX)


@dataclass
class ModelConfig:
    """Layers of sequence and interaction blocks over tokens and event histories, then one head per task."""

    __pydantic_config__ = FORBID
    name: Annotated[str, Field(description="what reports call the model")] = "gem_nano"
    dim: Annotated[Width, Field(description="width of every token and every table")] = 32
    heads: Annotated[Size, Field(description="attention heads; divides `model.dim`")] = 2
    layers: Annotated[list[LayerSpec], Field(min_length=1, description="the layers' forms, in their order")] = field(
        default_factory=lambda: [LayerSpec()]
    )
    event_types: Annotated[
        dict[str, EventTypeSpec], Field(description="single event sequences' own sizes, by the sequence's name")
    ] = field(default_factory=dict)
    merge: Annotated[MaskNetSpec | None, Field(description="all event sequences as one, named merged; null: not")] = (
        None
    )
    age_scales: Annotated[
        list[Annotated[float, Field(gt=0, le=1e18)]],
        Field(description="an event's age enters as log(1 + age/scale) for each; in the unit of the data's timestamps"),
    ] = field(default_factory=lambda: [60.0, 3600.0, 86400.0])
    head_hidden: Annotated[list[Size], Field(description="hidden widths of each task's head")] = field(
        default_factory=lambda: [64]
    )


def experts(model: ModelConfig) -> int | None:
    """What `topology.ep` must divide: the greatest common divisor of the layers' experts; None where there are none."""
    stacked = [core.stacked_experts for layer in model.layers for core in layer.interaction.cores()]
    return math.gcd(*stacked) or None


def own_modules(model: ModelConfig) -> list[str]:
    """The modules of users' specs that a model has imported when it is planned; they name more, which ranks import."""
    kinds = [core.kind for layer in model.layers for core in layer.interaction.cores()]
    return sorted({kind.rpartition(".")[0] for kind in kinds if "." in kind})
