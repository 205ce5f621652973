"""What a model is made of, torch-free: the plan counts from it and gemctl/model/ builds from it."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from gemctl.specs.limits import FORBID, Size

PLACE_SCALES = (1, 3, 9, 27)
"""An event's place in its history, 0 for the newest, enters as log(1 + place) and as e^(−place/τ) for these τ."""

BLOCK_SIZE = 64
"""Events of a block of block_attention, as published."""


@dataclass
class WukongSpec:
    """A Wukong block over the non-sequence tokens (arXiv 2403.02545): FMB and LCB side by side."""

    __pydantic_config__ = FORBID
    kind: Annotated[Literal["wukong"], Field(description="wukong: FMB and LCB side by side")] = "wukong"
    fm_tokens: Annotated[Size, Field(description="tokens that the factorization machine block makes")] = 8
    lc_tokens: Annotated[Size, Field(description="tokens that the linear compression block makes")] = 8
    rank: Annotated[Size, Field(description="columns of Y in the optimised FM, X(XᵀY)")] = 8
    hidden: Annotated[list[Size], Field(description="hidden widths of the FMB's MLP")] = field(
        default_factory=lambda: [128]
    )


@dataclass
class WukongExpertsSpec:
    """A mixture of Wukong experts (Kunlun, arXiv 2602.10016): each interacts with its own part of the tokens."""

    __pydantic_config__ = FORBID
    kind: Annotated[Literal["wukong_experts"], Field(description="wukong_experts: spread by topology.ep")] = (
        "wukong_experts"
    )
    experts: Annotated[Size, Field(description="experts; topology.ep must divide them")] = 4
    tokens: Annotated[Size, Field(description="tokens that the merged experts make")] = 16
    fm_tokens: Annotated[Size, Field(description="tokens that an expert's factorization machine block makes")] = 4
    lc_tokens: Annotated[Size, Field(description="tokens that an expert's linear compression block makes")] = 4
    rank: Annotated[Size, Field(description="columns of an expert's Y in the optimised FM, X(XᵀY)")] = 8
    hidden: Annotated[list[Size], Field(description="hidden widths of an expert's FMB's MLP")] = field(
        default_factory=lambda: [64]
    )

    def part(self, tokens: int) -> int:
        """Tokens that one expert reads, of `tokens`: ⌈tokens/experts⌉."""
        return -(-tokens // self.experts)


@dataclass
class SequenceBlockSpec:
    """A Kunlun-style block over the events: personalised feed-forward (GDPA), then attention over the history."""

    __pydantic_config__ = FORBID
    attention: Annotated[
        Literal["jagged_flash_attention", "block_attention"], Field(description="self-attention of the events")
    ] = "jagged_flash_attention"
    window: Annotated[
        int | None, Field(ge=0, le=2**24, description="attend to positions within ±window; null: all")
    ] = None
    weight_tokens: Annotated[
        Size, Field(description="tokens that the non-sequence side is compressed to before it makes the keys")
    ] = 4
    ffn_hidden: Annotated[Size, Field(description="keys of the personalised feed-forward (GDPA)")] = 16


@dataclass
class SummarySpec:
    """Pooled multi-head attention: learned seeds attend over the events (InterFormer's PMA)."""

    __pydantic_config__ = FORBID
    kind: Annotated[Literal["pma"], Field(description="pma: pooled multi-head attention")] = "pma"
    seeds: Annotated[Size, Field(description="summary tokens of each history")] = 4


@dataclass
class ModelConfig:
    """`layers` times (interaction block ‖ sequence block with summary), then one head per task."""

    __pydantic_config__ = FORBID
    name: Annotated[str, Field(description="what reports call the model")] = "gem_nano"
    dim: Annotated[int, Field(ge=4, le=2**24, multiple_of=4, description="width of every token and every table")] = 32
    heads: Annotated[Size, Field(description="attention heads; divides `model.dim`")] = 2
    layers: Annotated[int, Field(ge=1, le=1024, description="interaction and sequence blocks, side by side")] = 1
    age_scales: Annotated[
        list[Annotated[float, Field(gt=0, le=1e18)]],
        Field(description="an event's age enters as log(1 + age/scale) for each; in the unit of the data's timestamps"),
    ] = field(default_factory=lambda: [60.0, 3600.0, 86400.0])
    interaction: WukongSpec = field(default_factory=WukongSpec)
    sequence: SequenceBlockSpec = field(default_factory=SequenceBlockSpec)
    summary: SummarySpec = field(default_factory=SummarySpec)
    head_hidden: Annotated[list[Size], Field(description="hidden widths of each task's head")] = field(
        default_factory=lambda: [64]
    )


def experts(model: ModelConfig) -> int | None:
    """How many experts `topology.ep` must divide; None where the model has none."""
    return model.interaction.experts if isinstance(model.interaction, WukongExpertsSpec) else None


def contradictions(model: ModelConfig) -> list[str]:
    """What no single key shows, as problems: values that do not fit each other."""
    problems = []
    if model.dim % model.heads:
        problems.append(f"model.heads is {model.heads}, which does not divide model.dim = {model.dim}")
    if model.sequence.attention == "block_attention" and model.sequence.window is not None:
        window = f"model.sequence.window is {model.sequence.window}"
        problems.append(f"{window}, but block_attention has no window: set it to null, or use jagged_flash_attention")
    return problems
