"""Specs of what is done with event histories: attention, sequence blocks, summaries; torch-free.

The formulas are in gemctl/model/attention.py, sequence.py and summary.py.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, Tag

from gemctl.specs.limits import PositiveFloat, Size
from gemctl.specs.unions import BLOCK, BY_KIND

BLOCK_SIZE = 64
"""Events of a block of block_attention, as published."""

Window = Annotated[int | None, Field(ge=0, le=2**24, description="see positions within ±window alone; null: all")]
Position = Annotated[
    Literal["none", "rope", "rote"],
    Field(description="rope: rotate by an event's place; rote: by its place and its age (Kunlun)"),
]
RoteScale = Annotated[PositiveFloat, Field(description="rote: age at which log(1 + age/scale) is log 2")]
Activation = Literal[
    "identity", "gelu", "gelu_approx", "fast_gelu", "relu", "relu_square", "leaky_relu", "silu", "hardswish"
]
Gate = Literal["none", "literal", "scaled"]


@dataclass
class JaggedAttentionSpec:
    """Softmax attention of the events over their history: all of it, a window, or what is not later."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["jagged_flash_attention"], Field(description="full, windowed or causal")] = (
        "jagged_flash_attention"
    )
    window: Window = None
    causal: Annotated[bool, Field(description="see no later event")] = False
    position: Position = "none"
    rote_scale: RoteScale = 3600.0
    qk_norm: Annotated[bool, Field(description="queries and keys of length √d_h: no score beyond √d_h")] = False


@dataclass
class BlockAttentionSpec:
    """Softmax attention within blocks of 64 events."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["block_attention"], Field(description="within blocks of 64 events")] = "block_attention"
    rope: Annotated[bool, Field(description="rotate queries, keys and values by position, inside the kernel")] = False
    qk_norm: Annotated[bool, Field(description="queries and keys of length √d_h: no score beyond √d_h")] = False


AttentionSpec = Annotated[
    Annotated[JaggedAttentionSpec, Tag("jagged_flash_attention")]
    | Annotated[BlockAttentionSpec, Tag("block_attention")],
    BY_KIND,
]
Attention = JaggedAttentionSpec | BlockAttentionSpec


@dataclass
class KunlunSpec:
    """A Kunlun block (arXiv 2602.10016): personalised feed-forward by GDPA, then self-attention, both residual."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["kunlun"], Field(description="GDPA feed-forward, then self-attention")] = "kunlun"
    ffn_hidden: Annotated[Size, Field(description="keys of the personalised feed-forward (GDPA)")] = 16
    generator_rank: Annotated[
        Size | None, Field(description="X_sum makes keys and values through this many numbers; null: by full matrices")
    ] = None
    activation: Annotated[Activation, Field(description="of the personalised feed-forward")] = "gelu_approx"
    attention: Annotated[AttentionSpec, Field(description="of the events among themselves")] = field(
        default_factory=JaggedAttentionSpec
    )


@dataclass
class InterFormerSpec:
    """An InterFormer block (arXiv 2411.09852): each row's own linear map of its events, then self-attention."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["interformer"], Field(description="f(X_sum)·S, then self-attention")] = "interformer"
    ffn_rank: Annotated[Size, Field(description="rank of the matrix f(X_sum); dim: any matrix")] = 32
    residual: Annotated[bool, Field(description="add what each part reads; the paper's formula does not")] = True
    attention: Annotated[AttentionSpec, Field(description="of the events among themselves")] = field(
        default_factory=JaggedAttentionSpec
    )


@dataclass
class HstuSpec:
    """An HSTU block (arXiv 2402.17152): causal SiLU attention without softmax, gated event by event."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["hstu"], Field(description="causal SiLU attention, gated by U")] = "hstu"
    length_scale: Annotated[PositiveFloat, Field(description="divisor of the scores, for the longest length")] = 64.0
    window: Window = None
    position: Position = "none"
    rote_scale: RoteScale = 3600.0


SequenceBlockSpec = Annotated[
    Annotated[KunlunSpec, Tag("kunlun")]
    | Annotated[InterFormerSpec, Tag("interformer")]
    | Annotated[HstuSpec, Tag("hstu")],
    BY_KIND,
]
SequenceBlock = KunlunSpec | InterFormerSpec | HstuSpec


@dataclass
class PmaSpec:
    """Pooled multi-head attention: learned seeds attend over the events (InterFormer's PMA)."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["pma"], Field(description="learned seeds attend over the events")] = "pma"
    tokens: Annotated[Size, Field(description="seeds, so summary tokens of each history")] = 4


@dataclass
class HspSpec:
    """Hierarchical seed pooling (Kunlun): more seeds than tokens, compressed by a sum of Kronecker products."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["hsp"], Field(description="seeds attend, a SumKronLinear makes fewer tokens")] = "hsp"
    seeds: Annotated[Size, Field(description="learned seeds")] = 16
    tokens: Annotated[Size, Field(description="summary tokens of each history")] = 4
    rank: Annotated[Size, Field(description="Kronecker products in the sum")] = 2


@dataclass
class LastSpec:
    """The newest events as they are."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["last_k"], Field(description="the newest events")] = "last_k"
    tokens: Annotated[Size, Field(description="events taken, so summary tokens")] = 4


@dataclass
class ClsSpec:
    """What the CLS tokens have become: the first layer's X_sum, put before the oldest event (InterFormer)."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["cls"], Field(description="X_sum put before the events, read again here")] = "cls"


PartSpec = Annotated[
    Annotated[PmaSpec, Tag("pma")]
    | Annotated[HspSpec, Tag("hsp")]
    | Annotated[LastSpec, Tag("last_k")]
    | Annotated[ClsSpec, Tag("cls")],
    BY_KIND,
]
Part = PmaSpec | HspSpec | LastSpec | ClsSpec


@dataclass
class GatedSpec:
    """Several summaries side by side, gated together (InterFormer's S_sum)."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["gated"], Field(description="several summaries, gated together")] = "gated"
    parts: Annotated[list[PartSpec], Field(min_length=1, description="the summaries, any kind but gated")] = field(
        default_factory=lambda: [ClsSpec(), PmaSpec(tokens=2), LastSpec(tokens=2)]
    )
    gate: Annotated[Gate, Field(description="literal: σ(Z ⊙ MLP(Z)); scaled: Z ⊙ σ(MLP(Z))")] = "literal"


SummarySpec = Annotated[
    Annotated[PmaSpec, Tag("pma")]
    | Annotated[HspSpec, Tag("hsp")]
    | Annotated[LastSpec, Tag("last_k")]
    | Annotated[ClsSpec, Tag("cls")]
    | Annotated[GatedSpec, Tag("gated")],
    BY_KIND,
]
Summary = Part | GatedSpec


def parts(spec: Summary) -> list[Part]:
    """The summaries of a spec; one for all but gated."""
    return list(spec.parts) if isinstance(spec, GatedSpec) else [spec]
