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
    """`repeat` equal layers: a sequence block and a summary for each event history, and one interaction block."""

    __pydantic_config__ = FORBID
    repeat: Annotated[int, Field(ge=1, le=MOST_LAYERS, description="consecutive layers with these settings")] = 1
    x_sum: Annotated[Size, Field(description="tokens in X_sum, the compression of X that sequence blocks read")] = 4
    x_sum_gate: Annotated[
        Gate, Field(description="gate of X_sum; literal: σ(Z ⊙ MLP(Z)); scaled: Z ⊙ σ(MLP(Z)), Z the compressed tokens")
    ] = "none"
    reads: Annotated[
        Literal["x", "x_sum"], Field(description="what the interaction reads besides the summaries (Kunlun: x_sum)")
    ] = "x"
    comp_skip: Annotated[
        Literal["even", "odd"] | None,
        Field(
            description="CompSkip (Kunlun): layers of this parity, the first being 0, skip self-attention; the others "
            "reuse the last summary"
        ),
    ] = None
    sequence: Annotated[SequenceBlockSpec, Field(description="sequence block: updates the events")] = field(
        default_factory=KunlunSpec
    )
    summary: Annotated[SummarySpec, Field(description="summary: a few tokens per history")] = field(
        default_factory=PmaSpec
    )
    interaction: Annotated[InteractionSpec, Field(description="interaction block: crosses all tokens")] = field(
        default_factory=WukongSpec
    )


@dataclass
class EventTypeSpec:
    """Settings of one event sequence, in place of the model's (Kunlun's event personalisation); null: the model's."""

    __pydantic_config__ = FORBID
    dim: Annotated[Width | None, Field(description="width of its events")] = None
    heads: Annotated[Size | None, Field(description="attention heads; divides its width")] = None
    tokens: Annotated[Size | None, Field(description="tokens of each of its pma, hsp or last_k summaries")] = None
    depth: Annotated[
        int | None,
        Field(ge=1, le=MOST_LAYERS, description="layers that update it; later ones reuse its last summary"),
    ] = None
    window: Annotated[int | None, Field(ge=0, le=2**24, description="window of its attention")] = None


@dataclass
class MaskNetSpec:
    """Merges all histories into one (InterFormer): events at equal positions, concatenated, through MaskNet."""

    __pydantic_config__ = FORBID
    hidden: Annotated[Size, Field(description="hidden width of its two MLPs")] = 64

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
    name: Annotated[str, Field(description="name of the model in reports")] = "gem_nano"
    dim: Annotated[Width, Field(description="width of every token and every table")] = 32
    heads: Annotated[Size, Field(description="attention heads; divides `model.dim`")] = 2
    layers: Annotated[list[LayerSpec], Field(min_length=1, description="the layers, in order")] = field(
        default_factory=lambda: [LayerSpec()]
    )
    event_types: Annotated[
        dict[str, EventTypeSpec], Field(description="settings of single event sequences, by name")
    ] = field(default_factory=dict)
    merge: Annotated[MaskNetSpec | None, Field(description="merge all event sequences into one; null: do not")] = None
    age_scales: Annotated[
        list[Annotated[float, Field(gt=0, le=1e18)]],
        Field(description="encode an event's age as log(1 + age/scale) for each; unit of the timestamps"),
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
