"""What the interaction blocks have and cost; the formulas are in gemctl/model/interaction.py and beside it."""

from itertools import pairwise

from gemctl.specs import custom
from gemctl.specs.interaction import (
    DcnSpec,
    DotSpec,
    Interaction,
    Member,
    MlpSpec,
    TokenMixerSpec,
    WukongExpertsSpec,
    WukongSpec,
    has_shortcut,
    members,
)
from gemctl.specs.layout import outputs
from gemctl.specs.weights import Weight, linear, mlp, token_linear


def interaction_weights(spec: Interaction, inputs: int, dim: int) -> list[Weight]:
    """Every parameter of `InteractionBlock(spec, inputs, dim)`, and its products for each row."""
    found = []
    for number, member in enumerate(members(spec)):
        for weight in core_weights(member, inputs, dim):
            name = None if weight.name is None else f"members.{number}.{weight.name}"
            found.append(weight._replace(name=name))
    made = outputs(spec)
    if has_shortcut(spec) and made != inputs:
        found += token_linear("residual", inputs, made, dim)
    return found


def core_weights(spec: Member, inputs: int, dim: int) -> list[Weight]:
    """Every parameter of one core over `inputs` tokens."""
    if isinstance(spec, WukongSpec):
        return _wukong(spec, inputs, dim)
    if isinstance(spec, WukongExpertsSpec):
        return _experts(spec, inputs, dim)
    if isinstance(spec, MlpSpec):
        return mlp("mlp", inputs * dim, spec.hidden, spec.tokens * dim)
    if isinstance(spec, DotSpec):
        pairs = inputs * (inputs - 1) // 2
        products = Weight(None, (inputs, inputs), dim)
        return [products, *mlp("mlp", inputs * dim + pairs, spec.hidden, spec.tokens * dim)]
    if isinstance(spec, DcnSpec):
        return _dcn(spec, inputs, dim)
    if isinstance(spec, TokenMixerSpec):
        return _token_mixer(spec, inputs, dim)
    return custom.load(spec).weights(inputs, dim)


def _wukong(spec: WukongSpec, inputs: int, dim: int) -> list[Weight]:
    """X (XᵀY) takes two products of Y's size."""
    columns = Weight("columns.weight", (inputs, spec.rank), 2 * dim)
    found = [columns]
    if spec.fm == "attentive":
        found = [columns._replace(name=None), *token_linear("columns.compression", inputs, spec.fm_compression, dim)]
        found += mlp("columns.mlp", spec.fm_compression * dim, spec.fm_hidden, inputs * spec.rank)
    found += mlp("fm_mlp", inputs * spec.rank, spec.hidden, spec.fm_tokens * dim)
    return found + token_linear("compression", inputs, spec.lc_tokens, dim)


def _experts(spec: WukongExpertsSpec, inputs: int, dim: int) -> list[Weight]:
    count, part, made = spec.experts, spec.part(inputs), spec.fm_tokens + spec.lc_tokens
    found = [
        Weight("fm_columns", (count, part, spec.rank), 2 * dim),
        Weight("compression", (count, spec.lc_tokens, part), dim),
        Weight("merge", (count, spec.tokens, made), dim),
    ]
    if made != part:
        found.append(Weight("residual", (count, made, part), dim))
    for number, (a, b) in enumerate(pairwise([part * spec.rank, *spec.hidden, spec.fm_tokens * dim])):
        found.append(Weight(f"fm_mlp.{number}.weight", (count, b, a), 1))
        found.append(Weight(f"fm_mlp.{number}.bias", (count, b)))
    return found


def _dcn(spec: DcnSpec, inputs: int, dim: int) -> list[Weight]:
    width = inputs * dim
    found = []
    for number in range(spec.crosses):
        found += linear(f"crosses.{number}.down", width, spec.rank, bias=False)
        found += linear(f"crosses.{number}.up", spec.rank, width)
    return found + mlp("mlp", width, spec.hidden, spec.tokens * dim)


def _token_mixer(spec: TokenMixerSpec, inputs: int, dim: int) -> list[Weight]:
    """The stacked matrices: each row of them meets one vector of a row."""
    entry = token_linear("entry", inputs, spec.tokens, dim) if inputs != spec.tokens else []
    width, hidden = spec.group * dim, spec.wide * spec.hidden
    return [*entry, *linear("up", width, hidden), *linear("down", spec.hidden, spec.wide * width)]
