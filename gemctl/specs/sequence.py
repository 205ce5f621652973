"""Specs of what is done with event histories: attention, sequence blocks, summaries; torch-free.

Each spec states its module, parameters and costs; the formulas are in gemctl/model/attention.py, sequence.py and
summary.py.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

from pydantic import Field

from gemctl.specs.limits import PositiveFloat, Size
from gemctl.specs.unions import BLOCK, BY_KIND
from gemctl.specs.weights import NORM, Counts, Pairs, Weight, gate, linear, prefixed, token_linear

BLOCK_SIZE = 64
"""Events of a block of block_attention, as published."""

Window = Annotated[int | None, Field(ge=0, le=2**24, description="attend within ±window positions; null: everywhere")]
Position = Annotated[
    Literal["none", "rope", "rote"],
    Field(description="rope: rotate by position; rote: by position and age (Kunlun)"),
]
RoteScale = Annotated[PositiveFloat, Field(description="rote: age at which log(1 + age/scale) is log 2")]
Activation = Literal[
    "identity", "gelu", "gelu_approx", "fast_gelu", "relu", "relu_square", "leaky_relu", "silu", "hardswish"
]
Gate = Literal["none", "literal", "scaled"]


class Attention(ABC):
    """Self-attention of a row's events inside a sequence block."""

    windowed = False
    """Whether it takes a window."""

    @property
    @abstractmethod
    def module(self) -> str:
        """The dotted name of its nn.Module, made as Module(spec, width, heads, residual)."""

    @property
    @abstractmethod
    def rotates(self) -> bool:
        """Whether it rotates queries and keys, which takes heads of an even width."""

    @abstractmethod
    def counts(self, width: int, heads: int) -> Counts:
        """Of its module over events of this width."""

    def with_window(self, window: int) -> Self:
        """The same with another window, if it takes one."""
        return self


def _softmax_attention(width: int, heads: int, pairs: Pairs, qk_norm: bool, rotated: bool) -> Counts:
    """Kept: the norm's output, q, k and v, the result and its log-sum-exp; normed and rotated q and k are new ones."""
    weights = linear("queries_keys_values", width, 3 * width, bias=False) + linear("output", width, width, bias=False)
    kept = width + NORM + 3 * width + width + heads
    kept += 2 * width + 2 * heads if qk_norm else 0
    kept += _rotated(width, heads) if rotated else 0
    return Counts([], weights, [pairs], kept_by_event=kept + width)


def _rotated(width: int, heads: int) -> int:
    """Rotated queries and keys of an event, and its angles' cosines and sines."""
    return 2 * width + width // heads


@dataclass
class JaggedAttentionSpec(Attention):
    """Softmax attention of events over their history: full, windowed or causal."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.attention.JaggedAttention"
    windowed = True
    kind: Annotated[Literal["jagged_flash_attention"], Field(description="full, windowed or causal")] = (
        "jagged_flash_attention"
    )
    window: Window = None
    causal: Annotated[bool, Field(description="do not attend to later events")] = False
    position: Position = "none"
    rote_scale: RoteScale = 3600.0
    qk_norm: Annotated[bool, Field(description="normalise queries and keys to √d_h, which bounds scores by √d_h")] = (
        False
    )

    @property
    def rotates(self) -> bool:
        return self.position != "none"

    def counts(self, width: int, heads: int) -> Counts:
        pairs = Pairs(width, causal=self.causal, window=self.window)
        return _softmax_attention(width, heads, pairs, self.qk_norm, self.rotates)

    def with_window(self, window: int) -> Self:
        return replace(self, window=window)


@dataclass
class BlockAttentionSpec(Attention):
    """Softmax attention within blocks of 64 events."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.attention.BlockAttention"
    kind: Annotated[Literal["block_attention"], Field(description="within blocks of 64 events")] = "block_attention"
    rope: Annotated[bool, Field(description="rotate queries, keys and values by position, inside the kernel")] = False
    qk_norm: Annotated[bool, Field(description="normalise queries and keys to √d_h, which bounds scores by √d_h")] = (
        False
    )

    @property
    def rotates(self) -> bool:
        return self.rope

    def counts(self, width: int, heads: int) -> Counts:
        """The kernel rotates: nothing of that is kept."""
        return _softmax_attention(width, heads, Pairs(width, block=BLOCK_SIZE), self.qk_norm, rotated=False)


AttentionSpec = Annotated[JaggedAttentionSpec | BlockAttentionSpec, BY_KIND]


class SequenceBlock(ABC):
    """What a layer does with the events of one history, given the row's tokens X_sum."""

    reads_x_sum = True
    only_attends = False
    """Whether self-attention is all that it does, so that CompSkip could skip nothing of it."""

    @property
    @abstractmethod
    def module(self) -> str:
        """The dotted name of its nn.Module, made as Module(spec, width, heads, x_sum, attends).

        `x_sum`: numbers of a row's X_sum, all tokens; `attends`: whether its self-attention runs in this layer.
        """

    @property
    @abstractmethod
    def rotates(self) -> bool:
        """Whether its attention rotates queries and keys."""

    @property
    @abstractmethod
    def windowed(self) -> bool:
        """Whether its attention takes a window."""

    @abstractmethod
    def with_window(self, window: int) -> Self:
        """The same with another window, if its attention takes one."""

    @abstractmethod
    def counts(self, width: int, heads: int, x_sum: int, attends: bool) -> dict[str, Counts]:
        """Of each submodule of its module, by name; arguments as for the module."""


class _Personalised(SequenceBlock):
    """A personalised feed-forward, whose weights X_sum makes, then self-attention."""

    attention: "AttentionSpec"

    @property
    def rotates(self) -> bool:
        return self.attention.rotates

    @property
    def windowed(self) -> bool:
        return self.attention.windowed

    def _counts(self, ffn: Counts, width: int, heads: int, attends: bool) -> dict[str, Counts]:
        return {"ffn": ffn} | ({"attention": self.attention.counts(width, heads)} if attends else {})


def _personalised_ffn(hidden: int, width: int, x_sum: int, rank: int | None = None) -> Counts:
    """Per event the queries of GDPA and the new events are kept, per row its keys and values."""
    code = linear("code", x_sum, rank, bias=False) if rank else []
    inputs = rank or x_sum
    made = linear("keys", inputs, hidden * width) + linear("values", inputs, hidden * width, bias=False)
    kept = 2 * hidden * width + (rank or 0)
    return Counts([*code, *made], [], [Pairs(width, shared=hidden)], kept, 2 * width + NORM)


@dataclass
class KunlunSpec(_Personalised):
    """A Kunlun block (arXiv 2602.10016): a personalised feed-forward (GDPA), then self-attention, both residual."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.sequence.KunlunBlock"
    kind: Annotated[Literal["kunlun"], Field(description="GDPA feed-forward, then self-attention")] = "kunlun"
    ffn_hidden: Annotated[Size, Field(description="keys of the personalised feed-forward (GDPA)")] = 16
    generator_rank: Annotated[
        Size | None, Field(description="rank of the map from X_sum to keys and values; null: full rank")
    ] = None
    activation: Annotated[Activation, Field(description="activation of the personalised feed-forward")] = "gelu_approx"
    attention: Annotated[AttentionSpec, Field(description="self-attention of the events")] = field(
        default_factory=JaggedAttentionSpec
    )

    def counts(self, width: int, heads: int, x_sum: int, attends: bool) -> dict[str, Counts]:
        ffn = _personalised_ffn(self.ffn_hidden, width, x_sum, self.generator_rank)
        return self._counts(ffn, width, heads, attends)

    def with_window(self, window: int) -> Self:
        return replace(self, attention=self.attention.with_window(window))


@dataclass
class InterFormerSpec(_Personalised):
    """An InterFormer block (arXiv 2411.09852): a row-dependent linear map of the events, then self-attention."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.sequence.InterFormerBlock"
    kind: Annotated[Literal["interformer"], Field(description="f(X_sum)·S, then self-attention")] = "interformer"
    ffn_rank: Annotated[Size, Field(description="rank of the matrix f(X_sum); dim: full rank")] = 32
    residual: Annotated[bool, Field(description="residual connections; the paper's formula has none")] = True
    attention: Annotated[AttentionSpec, Field(description="self-attention of the events")] = field(
        default_factory=JaggedAttentionSpec
    )

    def counts(self, width: int, heads: int, x_sum: int, attends: bool) -> dict[str, Counts]:
        return self._counts(_personalised_ffn(self.ffn_rank, width, x_sum), width, heads, attends)

    def with_window(self, window: int) -> Self:
        return replace(self, attention=self.attention.with_window(window))


@dataclass
class HstuSpec(SequenceBlock):
    """An HSTU block (arXiv 2402.17152): causal SiLU attention without softmax, gated per event."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.sequence.HstuBlock"
    reads_x_sum = False
    only_attends = True
    windowed = True
    kind: Annotated[Literal["hstu"], Field(description="causal SiLU attention, gated by U")] = "hstu"
    length_scale: Annotated[PositiveFloat, Field(description="divisor of scores, in place of the longest length")] = (
        64.0
    )
    window: Window = None
    position: Position = "none"
    rote_scale: RoteScale = 3600.0

    @property
    def rotates(self) -> bool:
        return self.position != "none"

    def with_window(self, window: int) -> Self:
        return replace(self, window=window)

    def counts(self, width: int, heads: int, x_sum: int, attends: bool) -> dict[str, Counts]:
        """Kept: a norm, U V Q K before and after SiLU, the norm of the result, its product with U, the new events."""
        weights = linear("gate_values_queries_keys", width, 4 * width, bias=False)
        weights += linear("output", width, width, bias=False)
        kept = (width + NORM) + 8 * width + (2 * width + NORM) + width + width
        kept += _rotated(width, heads) if self.rotates else 0
        return {"attention": Counts([], weights, [Pairs(width, causal=True, window=self.window)], kept_by_event=kept)}


SequenceBlockSpec = Annotated[KunlunSpec | InterFormerSpec | HstuSpec, BY_KIND]
"""Every kind of sequence block: a new one is added here."""


class Summary(ABC):
    """What makes a few tokens of a history: one part, or several side by side (gated), normed and gated."""

    gate = "none"

    @abstractmethod
    def flat(self) -> "list[SummaryPart]":
        """Its parts; itself where it is one."""

    @abstractmethod
    def with_tokens(self, tokens: int) -> Self:
        """The same with another number of tokens in every part that takes one."""

    def outputs(self, cls: int) -> int:
        """Tokens that it makes; `cls`: CLS tokens of a row."""
        return sum(part.own_outputs(cls) for part in self.flat())

    def counts(self, width: int, heads: int, cls: int, dim: int) -> Counts:
        """Of `HistorySummary` of gemctl/model/summary.py over events of this width.

        Kept besides its parts': the norm's input, and the adapter's where the width is not `dim`.
        """
        tokens = self.outputs(cls)
        by_row: list[Weight] = []
        by_event: list[Weight] = []
        pairs: list[Pairs] = []
        kept, kept_by_event = tokens * (dim + NORM) + (tokens * width if width != dim else 0), 0
        for number, part in enumerate(self.flat()):
            own = part.own_counts(width, heads)
            by_row += prefixed(f"parts.{number}", own.by_row)
            by_event += prefixed(f"parts.{number}", own.by_event)
            pairs += own.pairs
            kept, kept_by_event = kept + own.kept_by_row, kept_by_event + own.kept_by_event
        if width != dim:
            by_row += linear("adapter", width, dim, bias=False, times=tokens)
        gated = gate(self.gate, tokens, dim)
        return Counts([*by_row, *gated.by_row], by_event, pairs, kept + gated.kept_by_row, kept_by_event)


class SummaryPart(Summary):
    """One way to make tokens of a history."""

    @property
    @abstractmethod
    def module(self) -> str:
        """The dotted name of its nn.Module, made as Module(spec, width, heads)."""

    reads_cls = False
    """Whether it reads CLS tokens, which then stand before every history's oldest event."""

    def flat(self) -> "list[SummaryPart]":
        return [self]

    @abstractmethod
    def own_outputs(self, cls: int) -> int:
        """Tokens that it makes."""

    def own_counts(self, width: int, heads: int) -> Counts:
        """Of its module over events of this width."""
        return Counts()


def _seed_attention(seeds: int, width: int, heads: int) -> Counts:
    """Kept: the keys, the norm before them; the pooled values and their log-sum-exp."""
    seed, keys = Weight("seeds", (seeds, width)), linear("keys", width, width, bias=False)
    return Counts([seed], keys, [Pairs(width, shared=seeds)], seeds * (width + heads), 2 * width + NORM)


@dataclass
class PmaSpec(SummaryPart):
    """Pooled multi-head attention: learned seeds attend over the events (InterFormer's PMA)."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.summary.PooledAttention"
    kind: Annotated[Literal["pma"], Field(description="learned seeds attend over the events")] = "pma"
    tokens: Annotated[Size, Field(description="seeds; each gives one summary token per history")] = 4

    def own_outputs(self, cls: int) -> int:
        return self.tokens

    def own_counts(self, width: int, heads: int) -> Counts:
        return _seed_attention(self.tokens, width, heads)

    def with_tokens(self, tokens: int) -> Self:
        return replace(self, tokens=tokens)


@dataclass
class HspSpec(SummaryPart):
    """Hierarchical seed pooling (Kunlun): more seeds than tokens, compressed by a sum of Kronecker products."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.summary.HierarchicalPooling"
    kind: Annotated[Literal["hsp"], Field(description="seeds attend, a SumKronLinear makes fewer tokens")] = "hsp"
    seeds: Annotated[Size, Field(description="learned seeds")] = 16
    tokens: Annotated[Size, Field(description="summary tokens per history")] = 4
    rank: Annotated[Size, Field(description="Kronecker products in the sum")] = 2

    def own_outputs(self, cls: int) -> int:
        return self.tokens

    def own_counts(self, width: int, heads: int) -> Counts:
        seeds = _seed_attention(self.seeds, width, heads)
        kronecker = token_linear("tokens", self.seeds, self.rank * self.tokens, width)
        kronecker += linear("widths", self.rank * width, width, bias=False, times=self.tokens)
        kept = seeds.kept_by_row + self.seeds * width + 2 * self.rank * self.tokens * width
        return seeds._replace(by_row=[*seeds.by_row, *kronecker], kept_by_row=kept)

    def with_tokens(self, tokens: int) -> Self:
        return replace(self, tokens=tokens)


@dataclass
class LastSpec(SummaryPart):
    """The newest events, unchanged."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.summary.LastEvents"
    kind: Annotated[Literal["last_k"], Field(description="the newest events")] = "last_k"
    tokens: Annotated[Size, Field(description="newest events to take; each is one summary token")] = 4

    def own_outputs(self, cls: int) -> int:
        return self.tokens

    def with_tokens(self, tokens: int) -> Self:
        return replace(self, tokens=tokens)


@dataclass
class ClsSpec(SummaryPart):
    """The CLS tokens (the first layer's X_sum, prepended to the events) after the sequence blocks (InterFormer)."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.summary.ClsTokens"
    reads_cls = True
    kind: Annotated[Literal["cls"], Field(description="the prepended X_sum, after attention")] = "cls"

    def own_outputs(self, cls: int) -> int:
        return cls

    def with_tokens(self, tokens: int) -> Self:
        return self


_Parts = PmaSpec | HspSpec | LastSpec | ClsSpec
"""Every kind of summary but gated: a new one is added here."""
PartSpec = Annotated[_Parts, BY_KIND]


@dataclass
class GatedSpec(Summary):
    """Several summaries concatenated and gated together (InterFormer's S_sum)."""

    __pydantic_config__ = BLOCK
    kind: Annotated[Literal["gated"], Field(description="several summaries, gated together")] = "gated"
    parts: Annotated[list[PartSpec], Field(min_length=1, description="the summaries, of any kind but gated")] = field(
        default_factory=lambda: [ClsSpec(), PmaSpec(tokens=2), LastSpec(tokens=2)]
    )
    gate: Annotated[Gate, Field(description="literal: σ(Z ⊙ MLP(Z)); scaled: Z ⊙ σ(MLP(Z))")] = "literal"

    def flat(self) -> list[SummaryPart]:
        return list(self.parts)

    def with_tokens(self, tokens: int) -> Self:
        return replace(self, parts=[part.with_tokens(tokens) for part in self.parts])


SummarySpec = Annotated[_Parts | GatedSpec, BY_KIND]
