"""Specs of the interaction blocks, which cross tokens [B, n, dim] with each other; torch-free.

Each is a *core* that makes `outputs` tokens. A block is LN(core(X) + R X) for wukong and wukong_experts,
LN([core_1(X) ‖ core_2(X) ‖ …] + R X) for dhen, and LN(core(X)) for mlp, dot, dcnv2 and token_mixer; R maps tokens
linearly, or is the identity where the numbers of tokens agree. The formulas are in gemctl/model/interaction.py and in
wukong.py, experts.py and token_mixer.py beside it.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gemctl.specs.limits import Size
from gemctl.specs.unions import BLOCK, BY_KIND, CUSTOM

Widths = list[Size]


@dataclass
class WukongSpec:
    """A Wukong block (arXiv 2403.02545): factorization machine and linear compression side by side."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["wukong"], Field(description="FMB and LCB side by side")] = "wukong"
    fm_tokens: Annotated[Size, Field(description="tokens that the factorization machine block makes")] = 8
    lc_tokens: Annotated[Size, Field(description="tokens that the linear compression block makes")] = 8
    rank: Annotated[Size, Field(description="columns of Y in the optimised FM, X(XᵀY)")] = 8
    hidden: Annotated[Widths, Field(description="hidden widths of the FMB's MLP")] = field(
        default_factory=lambda: [128]
    )
    fm: Annotated[
        Literal["learnable", "attentive"], Field(description="Y: a parameter, or made from each row's own tokens")
    ] = "learnable"
    fm_compression: Annotated[Size, Field(description="attentive: tokens that Y is made from")] = 4
    fm_hidden: Annotated[Widths, Field(description="attentive: hidden widths of the MLP that makes Y")] = field(
        default_factory=lambda: [32]
    )


@dataclass
class WukongExpertsSpec:
    """A mixture of Wukong experts (Kunlun, arXiv 2602.10016): each interacts with its own part of the tokens."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["wukong_experts"], Field(description="spread over ranks by topology.ep")] = "wukong_experts"
    experts: Annotated[Size, Field(description="experts; topology.ep must divide them")] = 4
    tokens: Annotated[Size, Field(description="tokens that the merged experts make")] = 16
    fm_tokens: Annotated[Size, Field(description="tokens that an expert's factorization machine block makes")] = 4
    lc_tokens: Annotated[Size, Field(description="tokens that an expert's linear compression block makes")] = 4
    rank: Annotated[Size, Field(description="columns of an expert's Y in the optimised FM, X(XᵀY)")] = 8
    hidden: Annotated[Widths, Field(description="hidden widths of an expert's FMB's MLP")] = field(
        default_factory=lambda: [64]
    )

    def part(self, tokens: int) -> int:
        """Tokens that one expert reads, of `tokens`: ⌈tokens/experts⌉."""
        return -(-tokens // self.experts)


@dataclass
class MlpSpec:
    """A multi-layer perceptron over all tokens together."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["mlp"], Field(description="an MLP over all tokens")] = "mlp"
    tokens: Annotated[Size, Field(description="tokens that it makes")] = 16
    hidden: Annotated[Widths, Field(description="hidden widths")] = field(default_factory=lambda: [128])


@dataclass
class DotSpec:
    """Products of all pairs of tokens (DLRM, arXiv 1906.00091), then an MLP over them and the tokens."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["dot"], Field(description="products of all pairs, then an MLP")] = "dot"
    tokens: Annotated[Size, Field(description="tokens that it makes")] = 16
    hidden: Annotated[Widths, Field(description="hidden widths of the MLP")] = field(default_factory=lambda: [128])


@dataclass
class DcnSpec:
    """Low-rank crosses (DCN-V2, arXiv 2008.13535) of all tokens together, then an MLP."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["dcnv2"], Field(description="low-rank crosses, then an MLP")] = "dcnv2"
    tokens: Annotated[Size, Field(description="tokens that it makes")] = 16
    hidden: Annotated[Widths, Field(description="hidden widths of the MLP")] = field(default_factory=lambda: [128])
    crosses: Annotated[int, Field(ge=1, le=64, description="crosses in a row; each raises the order by one")] = 2
    rank: Annotated[Size, Field(description="rank of each cross's matrix")] = 16


@dataclass
class TokenMixerSpec:
    """A RankMixer block (arXiv 2507.15551): parameter-free token mixing, then a feed-forward of each token's own."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["token_mixer"], Field(description="token mixing, then per-token FFNs")] = "token_mixer"
    tokens: Annotated[Size, Field(description="tokens that it makes")] = 16
    group: Annotated[
        Size,
        Field(description="tokens side by side that are one wide token; divides `tokens`, into divisors of its width"),
    ] = 1
    hidden: Annotated[Size, Field(description="hidden width of each wide token's feed-forward")] = 128

    @property
    def wide(self) -> int:
        """Wide tokens, each with a feed-forward of its own."""
        return self.tokens // self.group


@dataclass
class CustomSpec:
    """A block of the user's own package, named by its torch-free spec (docs/models.md)."""

    __pydantic_config__ = BLOCK
    kind: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$",
            description="dotted name of the block's spec",
            json_schema_extra={"words": "the dotted name of a spec of your own"},
        ),
    ]
    options: Annotated[dict[str, Any], Field(description="what the spec is made with")] = field(default_factory=dict)


MemberSpec = Annotated[
    Annotated[WukongSpec, Tag("wukong")]
    | Annotated[WukongExpertsSpec, Tag("wukong_experts")]
    | Annotated[MlpSpec, Tag("mlp")]
    | Annotated[DotSpec, Tag("dot")]
    | Annotated[DcnSpec, Tag("dcnv2")]
    | Annotated[TokenMixerSpec, Tag("token_mixer")]
    | Annotated[CustomSpec, Tag(CUSTOM)],
    BY_KIND,
]


@dataclass
class DhenSpec:
    """An ensemble of interactions with a shortcut and a norm (DHEN, arXiv 2203.11014)."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["dhen"], Field(description="several interactions side by side")] = "dhen"
    members: Annotated[list[MemberSpec], Field(min_length=1, description="the interactions, any kind but dhen")] = (
        field(default_factory=lambda: [WukongSpec(), DcnSpec()])
    )


InteractionSpec = Annotated[
    Annotated[WukongSpec, Tag("wukong")]
    | Annotated[WukongExpertsSpec, Tag("wukong_experts")]
    | Annotated[DhenSpec, Tag("dhen")]
    | Annotated[MlpSpec, Tag("mlp")]
    | Annotated[DotSpec, Tag("dot")]
    | Annotated[DcnSpec, Tag("dcnv2")]
    | Annotated[TokenMixerSpec, Tag("token_mixer")]
    | Annotated[CustomSpec, Tag(CUSTOM)],
    BY_KIND,
]

Member = WukongSpec | WukongExpertsSpec | MlpSpec | DotSpec | DcnSpec | TokenMixerSpec | CustomSpec
Interaction = Member | DhenSpec


def members(spec: Interaction) -> list[Member]:
    """The cores of a block; one for all but dhen."""
    return list(spec.members) if isinstance(spec, DhenSpec) else [spec]


def has_shortcut(spec: Interaction) -> bool:
    """Whether the block adds R X before its norm."""
    return isinstance(spec, (WukongSpec, WukongExpertsSpec, DhenSpec, CustomSpec))
