"""Values a row that an interaction block keeps for its backward; an estimate, as in gemctl/plan/activations.py.

A product over tokens keeps its input twice: as it came, and transposed for the other operand's gradient.
"""

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

NORM = 2  # mean and deviation of a normalised vector


def block_values(spec: Interaction, inputs: int, dim: int) -> int:
    """Of a whole block over `inputs` tokens: its input, its cores, the shortcut, the norm's input."""
    made = outputs(spec)
    kept = inputs * dim + sum(_core(member, inputs, dim) for member in members(spec)) + made * (dim + NORM)
    return kept + (inputs * dim if has_shortcut(spec) and made != inputs else 0)


def _core(spec: Member, inputs: int, dim: int) -> int:
    if isinstance(spec, WukongSpec):
        return _wukong(spec, inputs, dim)
    if isinstance(spec, WukongExpertsSpec):
        return _experts(spec, inputs, dim)
    if isinstance(spec, MlpSpec):
        return 2 * sum(spec.hidden)
    if isinstance(spec, DotSpec):
        return inputs * dim + inputs * (inputs - 1) // 2 + 2 * sum(spec.hidden)
    if isinstance(spec, DcnSpec):
        return spec.crosses * (2 * inputs * dim + spec.rank) + 2 * sum(spec.hidden)
    if isinstance(spec, TokenMixerSpec):  # the norm's input and output, and the hidden layer before and after GELU
        return 2 * spec.tokens * dim + spec.wide * (NORM + 2 * spec.hidden)
    return custom.load(spec).kept(inputs, dim)


def _wukong(spec: WukongSpec, inputs: int, dim: int) -> int:
    columns = 0
    if spec.fm == "attentive":
        columns = (inputs + spec.fm_compression) * dim + 2 * sum(spec.fm_hidden) + inputs * spec.rank
    products = dim * spec.rank + 2 * inputs * spec.rank + NORM
    return 2 * inputs * dim + columns + products + 2 * sum(spec.hidden)


def _experts(spec: WukongExpertsSpec, inputs: int, dim: int) -> int:
    """Per expert: its tokens in two layouts, FM's products, the MLP, the norm's input and output."""
    part, made = spec.part(inputs), spec.fm_tokens + spec.lc_tokens
    products = dim * spec.rank + 2 * part * spec.rank + NORM
    each = 2 * part * dim + products + 2 * sum(spec.hidden) + made * (2 * dim + NORM)
    return spec.experts * each
