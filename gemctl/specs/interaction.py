"""Specs of the interaction blocks, which cross tokens [B, n, dim] with each other; torch-free.

A block is one *core*, or several side by side (dhen), with a shortcut and a norm around them:

    LN([core_1(X) ‖ core_2(X) ‖ …] + R X)      R maps tokens linearly; the identity where their number stays the same

mlp, dot, dcnv2 and token_mixer have no shortcut. Each spec states its module, parameters and costs; the formulas are
in gemctl/model/interaction.py and experts.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from gemctl.errors import InputError
from gemctl.specs import custom
from gemctl.specs.limits import Size
from gemctl.specs.unions import BLOCK, BY_KIND
from gemctl.specs.weights import NORM, Counts, Weight, linear, mlp, prefixed, token_linear

Widths = list[Size]


class Interaction(ABC):
    """A whole interaction block: cores side by side, the shortcut, the norm."""

    shortcut = False
    """Whether the block adds R X before its norm."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens that the block makes."""

    @abstractmethod
    def cores(self) -> "list[Core]":
        """Its cores."""

    def counts(self, inputs: int, dim: int) -> Counts:
        """Of `InteractionBlock(self, inputs, dim)` of gemctl/model/interaction.py."""
        weights: list[Weight] = []
        kept = inputs * dim + self.tokens * (dim + NORM)
        for number, core in enumerate(self.cores()):
            weights += prefixed(f"members.{number}", core.weights(inputs, dim))
            kept += core.kept(inputs, dim)
        if self.shortcut and self.tokens != inputs:
            weights += token_linear("residual", inputs, self.tokens, dim)
            kept += inputs * dim
        return Counts(weights, kept_by_row=kept)


class Core(Interaction):
    """One core, which maps tokens [B, inputs, dim] to [B, tokens, dim]; a block by itself, or a member of dhen."""

    kind: str

    @property
    @abstractmethod
    def module(self) -> str:
        """The dotted name of its nn.Module, made as Module(spec, inputs, dim)."""

    @property
    def own(self) -> Any:
        """The spec that the module is made with: itself, or the one that a `CustomSpec` names."""
        return self

    @property
    def stacked_experts(self) -> int:
        """Experts that every parameter stacks along dim 0, for topology.ep to spread; 0: none."""
        return 0

    @abstractmethod
    def weights(self, inputs: int, dim: int) -> list[Weight]:
        """Every parameter of the module by its name in it, and what each costs per row."""

    @abstractmethod
    def kept(self, inputs: int, dim: int) -> int:
        """Values per row that its backward needs, beside its inputs as they came."""

    def cores(self) -> "list[Core]":
        return [self]

    def problems(self, dim: int) -> Iterator[str]:
        """What keeps it from being built at this width, beyond what the types of its fields say."""
        yield from ()


@dataclass
class WukongSpec(Core):
    """A Wukong block (arXiv 2403.02545): a factorization machine and a linear compression in parallel."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.interaction.Wukong"
    shortcut = True
    kind: Annotated[Literal["wukong"], Field(description="FMB and LCB in parallel")] = "wukong"
    fm_tokens: Annotated[Size, Field(description="output tokens of the factorization machine block")] = 8
    lc_tokens: Annotated[Size, Field(description="output tokens of the linear compression block")] = 8
    rank: Annotated[Size, Field(description="columns of Y in the optimised FM, X(XᵀY)")] = 8
    hidden: Annotated[Widths, Field(description="hidden widths of the FMB's MLP")] = field(
        default_factory=lambda: [128]
    )
    fm: Annotated[
        Literal["learnable", "attentive"], Field(description="Y: a parameter, or computed from each row's tokens")
    ] = "learnable"
    fm_compression: Annotated[Size, Field(description="attentive: tokens that Y is computed from")] = 4
    fm_hidden: Annotated[Widths, Field(description="attentive: hidden widths of the MLP that computes Y")] = field(
        default_factory=lambda: [32]
    )

    @property
    def tokens(self) -> int:
        return self.fm_tokens + self.lc_tokens

    def weights(self, inputs: int, dim: int) -> list[Weight]:
        columns = [Weight("columns.weight", (inputs, self.rank), 2 * dim)]  # X (XᵀY): two products of Y's size
        if self.fm == "attentive":
            columns = [columns[0]._replace(name=None)]
            columns += token_linear("columns.compression", inputs, self.fm_compression, dim)
            columns += mlp("columns.mlp", self.fm_compression * dim, self.fm_hidden, inputs * self.rank)
        fm = mlp("fm_mlp", inputs * self.rank, self.hidden, self.fm_tokens * dim)
        return [*columns, *fm, *token_linear("compression", inputs, self.lc_tokens, dim)]

    def kept(self, inputs: int, dim: int) -> int:
        """The input in two layouts, as it came and transposed, FM's products, the MLPs."""
        columns = 0
        if self.fm == "attentive":
            columns = (inputs + self.fm_compression) * dim + 2 * sum(self.fm_hidden) + inputs * self.rank
        products = dim * self.rank + 2 * inputs * self.rank + NORM
        return 2 * inputs * dim + columns + products + 2 * sum(self.hidden)


@dataclass
class WukongExpertsSpec(Core):
    """A mixture of Wukong experts (Kunlun, arXiv 2602.10016): each works on its own part of the tokens."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.experts.WukongExperts"
    shortcut = True
    kind: Annotated[Literal["wukong_experts"], Field(description="spread over ranks by topology.ep")] = "wukong_experts"
    experts: Annotated[Size, Field(description="number of experts; topology.ep must divide it")] = 4
    tokens: Annotated[Size, Field(description="output tokens of the merged experts")] = 16
    fm_tokens: Annotated[Size, Field(description="output tokens of each expert's factorization machine block")] = 4
    lc_tokens: Annotated[Size, Field(description="output tokens of each expert's linear compression block")] = 4
    rank: Annotated[Size, Field(description="columns of each expert's Y in the optimised FM, X(XᵀY)")] = 8
    hidden: Annotated[Widths, Field(description="hidden widths of the MLP in each expert's FMB")] = field(
        default_factory=lambda: [64]
    )

    @property
    def stacked_experts(self) -> int:
        return self.experts

    @property
    def expert_tokens(self) -> int:
        """Tokens that one expert makes."""
        return self.fm_tokens + self.lc_tokens

    def part(self, tokens: int) -> int:
        """Tokens that one expert reads, of `tokens`: ⌈tokens/experts⌉."""
        return -(-tokens // self.experts)

    def weights(self, inputs: int, dim: int) -> list[Weight]:
        count, part, made = self.experts, self.part(inputs), self.expert_tokens
        weights = [
            Weight("fm_columns", (count, part, self.rank), 2 * dim),
            Weight("compression", (count, self.lc_tokens, part), dim),
            Weight("merge", (count, self.tokens, made), dim),
        ]
        if made != part:
            weights.append(Weight("residual", (count, made, part), dim))
        for number, (a, b) in enumerate(pairwise([part * self.rank, *self.hidden, self.fm_tokens * dim])):
            weights.append(Weight(f"fm_mlp.{number}.weight", (count, b, a), 1))
            weights.append(Weight(f"fm_mlp.{number}.bias", (count, b)))
        return weights

    def kept(self, inputs: int, dim: int) -> int:
        """Per expert: its tokens in two layouts, FM's products, the MLP, the norm's input and output."""
        part = self.part(inputs)
        products = dim * self.rank + 2 * part * self.rank + NORM
        each = 2 * part * dim + products + 2 * sum(self.hidden) + self.expert_tokens * (2 * dim + NORM)
        return self.experts * each


@dataclass
class MlpSpec(Core):
    """A multi-layer perceptron over all tokens, concatenated."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.interaction.MlpCore"
    kind: Annotated[Literal["mlp"], Field(description="an MLP over all tokens")] = "mlp"
    tokens: Annotated[Size, Field(description="output tokens")] = 16
    hidden: Annotated[Widths, Field(description="hidden widths")] = field(default_factory=lambda: [128])

    def features(self, inputs: int, dim: int) -> int:
        """Width of what the MLP reads: all tokens."""
        return inputs * dim

    def weights(self, inputs: int, dim: int) -> list[Weight]:
        return mlp("mlp", self.features(inputs, dim), self.hidden, self.tokens * dim)

    def kept(self, inputs: int, dim: int) -> int:
        return 2 * sum(self.hidden)


@dataclass
class DotSpec(Core):
    """Dot products of all pairs of tokens (DLRM, arXiv 1906.00091), then an MLP over them and the tokens."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.interaction.DotCore"
    kind: Annotated[Literal["dot"], Field(description="products of all pairs, then an MLP")] = "dot"
    tokens: Annotated[Size, Field(description="output tokens")] = 16
    hidden: Annotated[Widths, Field(description="hidden widths of the MLP")] = field(default_factory=lambda: [128])

    def features(self, inputs: int, dim: int) -> int:
        """Width of what the MLP reads: the tokens and the product of each pair."""
        return inputs * dim + inputs * (inputs - 1) // 2

    def weights(self, inputs: int, dim: int) -> list[Weight]:
        products = Weight(None, (inputs, inputs), dim)
        return [products, *mlp("mlp", self.features(inputs, dim), self.hidden, self.tokens * dim)]

    def kept(self, inputs: int, dim: int) -> int:
        return self.features(inputs, dim) + 2 * sum(self.hidden)


@dataclass
class DcnSpec(Core):
    """Low-rank crosses (DCN-V2, arXiv 2008.13535) of all tokens, concatenated, then an MLP."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.interaction.DcnCore"
    kind: Annotated[Literal["dcnv2"], Field(description="low-rank crosses, then an MLP")] = "dcnv2"
    tokens: Annotated[Size, Field(description="output tokens")] = 16
    hidden: Annotated[Widths, Field(description="hidden widths of the MLP")] = field(default_factory=lambda: [128])
    crosses: Annotated[int, Field(ge=1, le=64, description="cross layers; each raises the order by one")] = 2
    rank: Annotated[Size, Field(description="rank of each cross's matrix")] = 16

    def features(self, inputs: int, dim: int) -> int:
        """Width of the crosses and of what the MLP reads: all tokens."""
        return inputs * dim

    def weights(self, inputs: int, dim: int) -> list[Weight]:
        width = self.features(inputs, dim)
        weights: list[Weight] = []
        for number in range(self.crosses):
            weights += linear(f"crosses.{number}.down", width, self.rank, bias=False)
            weights += linear(f"crosses.{number}.up", self.rank, width)
        return weights + mlp("mlp", width, self.hidden, self.tokens * dim)

    def kept(self, inputs: int, dim: int) -> int:
        return self.crosses * (2 * inputs * dim + self.rank) + 2 * sum(self.hidden)


@dataclass
class TokenMixerSpec(Core):
    """A RankMixer block (arXiv 2507.15551): parameter-free token mixing, then a per-token feed-forward."""

    __pydantic_config__ = BLOCK
    module = "gemctl.model.interaction.TokenMixer"
    kind: Annotated[Literal["token_mixer"], Field(description="token mixing, then per-token FFNs")] = "token_mixer"
    tokens: Annotated[Size, Field(description="output tokens")] = 16
    group: Annotated[
        Size,
        Field(description="tokens per wide token; divides `tokens`, and tokens / group divides its width"),
    ] = 1
    hidden: Annotated[Size, Field(description="hidden width of each wide token's feed-forward")] = 128

    @property
    def wide(self) -> int:
        """Wide tokens, each with a feed-forward of its own."""
        return self.tokens // self.group

    def weights(self, inputs: int, dim: int) -> list[Weight]:
        """The stacked matrices: each row of them meets one vector of a row."""
        entry = token_linear("entry", inputs, self.tokens, dim) if inputs != self.tokens else []
        width, hidden = self.group * dim, self.wide * self.hidden
        return [*entry, *linear("up", width, hidden), *linear("down", self.hidden, self.wide * width)]

    def kept(self, inputs: int, dim: int) -> int:
        """The norm's input and output, and the hidden layer before and after GELU."""
        return 2 * self.tokens * dim + self.wide * (NORM + 2 * self.hidden)

    def problems(self, dim: int) -> Iterator[str]:
        if self.tokens % self.group:
            yield f"token_mixer: group = {self.group} does not divide tokens = {self.tokens}"
        elif self.group * dim % self.wide:
            yield (
                f"token_mixer: {self.wide} wide tokens (tokens/group) cannot cut their width, "
                f"{self.group * dim} (group · model.dim), into as many parts"
            )


@dataclass
class CustomSpec(Core):
    """Your own block, named by its torch-free spec (docs/models.md)."""

    __pydantic_config__ = BLOCK
    shortcut = True
    kind: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$",
            description="dotted name of the block's spec",
            json_schema_extra={"words": "the dotted name of a spec of your own"},
        ),
    ]
    options: Annotated[dict[str, Any], Field(description="arguments of the spec")] = field(default_factory=dict)

    @cached_property
    def own(self) -> custom.OwnSpec:
        """The user's spec. Raises InputError with the reason where it cannot be made."""
        return custom.load(self.kind, self.options)

    @property
    def module(self) -> str:
        return self.own.module

    @property
    def tokens(self) -> int:
        return self.own.tokens

    def weights(self, inputs: int, dim: int) -> list[Weight]:
        return self.own.weights(inputs, dim)

    def kept(self, inputs: int, dim: int) -> int:
        return self.own.kept(inputs, dim)

    def problems(self, dim: int) -> Iterator[str]:
        asked = "weights"
        try:
            for weight in self.weights(2, dim):
                if not (isinstance(weight.shape, tuple) and all(isinstance(size, int) for size in weight.shape)):
                    yield f"{self.kind}: weights() gives {weight!r}, not Weight(name, shape, times)"
            asked = "kept"
            if not isinstance(kept := self.kept(2, dim), int) or kept < 0:
                yield f"{self.kind}: kept() gives {kept!r}, not a number of values ≥ 0"
        except InputError as error:
            yield from error.problems
        except Exception as error:
            yield f"{self.kind}: {asked}() raises {type(error).__name__}: {error}"


_Cores = WukongSpec | WukongExpertsSpec | MlpSpec | DotSpec | DcnSpec | TokenMixerSpec | CustomSpec
"""Every kind of core: a new one is added here."""
CoreSpec = Annotated[_Cores, BY_KIND]


@dataclass
class DhenSpec(Interaction):
    """An ensemble of interactions with a shortcut and a norm (DHEN, arXiv 2203.11014)."""

    __pydantic_config__ = BLOCK
    shortcut = True
    kind: Annotated[Literal["dhen"], Field(description="several interactions in parallel")] = "dhen"
    members: Annotated[list[CoreSpec], Field(min_length=1, description="interactions of any kind but dhen")] = field(
        default_factory=lambda: [WukongSpec(), DcnSpec()]
    )

    @property
    def tokens(self) -> int:
        return sum(core.tokens for core in self.members)

    def cores(self) -> list[Core]:
        return list(self.members)


InteractionSpec = Annotated[DhenSpec | _Cores, BY_KIND]
