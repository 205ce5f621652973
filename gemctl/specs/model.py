"""What a model is made of, torch-free: the plan counts from it and gemctl/model/ builds from it."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

FORBID = ConfigDict(extra="forbid")
Positive = Annotated[int, Field(ge=1)]


@dataclass
class WukongSpec:
    """A Wukong block over the non-sequence tokens (arXiv 2403.02545): FMB and LCB side by side."""

    __pydantic_config__ = FORBID
    kind: Literal["wukong"] = "wukong"
    fm_tokens: Annotated[Positive, Field(description="tokens that the factorization machine block makes")] = 8
    lc_tokens: Annotated[Positive, Field(description="tokens that the linear compression block makes")] = 8
    rank: Annotated[Positive, Field(description="columns of Y in the optimised FM, X(XᵀY)")] = 8
    hidden: Annotated[list[Positive], Field(description="hidden widths of the FMB's MLP")] = field(
        default_factory=lambda: [128]
    )


@dataclass
class SequenceBlockSpec:
    """A Kunlun-style block over the events: personalised feed-forward (GDPA), then attention over the history."""

    __pydantic_config__ = FORBID
    attention: Annotated[
        Literal["jagged_flash_attention", "block_attention"], Field(description="self-attention of the events")
    ] = "jagged_flash_attention"
    window: Annotated[int | None, Field(ge=0, description="attend to positions within ±window; null: all")] = None
    ffn_hidden: Annotated[Positive, Field(description="keys of the personalised feed-forward (GDPA)")] = 32


@dataclass
class SummarySpec:
    """Pooled multi-head attention: learned seeds attend over the events (InterFormer's PMA)."""

    __pydantic_config__ = FORBID
    kind: Literal["pma"] = "pma"
    seeds: Positive = 4


@dataclass
class ModelConfig:
    """`layers` times (interaction block ‖ sequence block with summary), then one head per task."""

    __pydantic_config__ = FORBID
    name: str = "gem_nano"
    dim: Annotated[int, Field(ge=4, multiple_of=4, description="width of every token and every table")] = 32
    heads: Positive = 2
    layers: Positive = 1
    interaction: WukongSpec = field(default_factory=WukongSpec)
    sequence: SequenceBlockSpec = field(default_factory=SequenceBlockSpec)
    summary: SummarySpec = field(default_factory=SummarySpec)
    head_hidden: Annotated[list[Positive], Field(description="hidden widths of each task's head")] = field(
        default_factory=lambda: [64]
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
