"""What no single key of a model shows: values that do not fit each other, or the feature spec; torch-free.

from gemctl.specs.contradictions import contradictions
contradictions(ModelConfig(dim=32, heads=3), spec)     # ["model.heads is 3, which does not divide model.dim = 32"]
"""

from collections.abc import Iterator

from gemctl.errors import InputError
from gemctl.specs import custom
from gemctl.specs.data import FeatureSpec
from gemctl.specs.interaction import CustomSpec, TokenMixerSpec, members
from gemctl.specs.layout import MERGED, histories
from gemctl.specs.model import MOST_LAYERS, LayerSpec, ModelConfig
from gemctl.specs.sequence import BlockAttentionSpec, HstuSpec, SequenceBlock


def contradictions(model: ModelConfig, spec: FeatureSpec) -> list[str]:
    """All of them, as problems; none for a model that can be built."""
    found = [*_widths(model, spec), *_depth(model), *_event_types(model, spec)]
    for index, layer in enumerate(model.layers):
        found += [f"model.layers.{index}.{problem}" for problem in _layer(layer, model)]
    return list(dict.fromkeys(found))


def _widths(model: ModelConfig, spec: FeatureSpec) -> Iterator[str]:
    if model.dim % model.heads:
        yield f"model.heads is {model.heads}, which does not divide model.dim = {model.dim}"
    for history in histories(model, spec):
        own = f"model.event_types.{history.name}"
        personal = model.event_types.get(history.name)
        if personal and (personal.dim or personal.heads) and history.dim % history.heads:
            yield f"{own}: {history.heads} heads do not divide its dim = {history.dim}"
        elif history.dim % history.heads == 0 and history.dim // history.heads % 2 and _rotates(model):
            yield f"{own}: heads of width {history.dim // history.heads} cannot be rotated: that takes an even width"


def _rotates(model: ModelConfig) -> bool:
    return any(_rotated(layer.sequence) for layer in model.layers)


def _rotated(block: SequenceBlock) -> bool:
    if isinstance(block, HstuSpec):
        return block.position != "none"
    attention = block.attention
    return attention.rope if isinstance(attention, BlockAttentionSpec) else attention.position != "none"


def _depth(model: ModelConfig) -> Iterator[str]:
    depth = sum(layer.repeat for layer in model.layers)
    if depth > MOST_LAYERS:
        yield f"model.layers are {depth} layers in all: more than {MOST_LAYERS}"


def _event_types(model: ModelConfig, spec: FeatureSpec) -> Iterator[str]:
    known = [history.name for history in histories(model, spec)]
    blocks = [layer.sequence for layer in model.layers]
    for name, personal in model.event_types.items():
        if name not in known:
            why = (
                f"model.merge makes one history, {MERGED}" if model.merge else f"there are {', '.join(known) or 'none'}"
            )
            yield f"model.event_types.{name}: the feature spec has no event sequence {name!r}: {why}"
        if personal.window is not None and any(_in_blocks(block) for block in blocks):
            yield f"model.event_types.{name}.window is {personal.window}, but block_attention has no window"


def _in_blocks(block: SequenceBlock) -> bool:
    return not isinstance(block, HstuSpec) and isinstance(block.attention, BlockAttentionSpec)


def _layer(layer: LayerSpec, model: ModelConfig) -> Iterator[str]:
    if layer.comp_skip and isinstance(layer.sequence, HstuSpec):
        yield "comp_skip skips self-attention, which is all that an hstu block has: set it to null"
    for member in members(layer.interaction):
        if isinstance(member, TokenMixerSpec):
            yield from _token_mixer(member, model.dim)
        if isinstance(member, CustomSpec):
            yield from _own_block(member, model)


def _token_mixer(spec: TokenMixerSpec, dim: int) -> Iterator[str]:
    if spec.tokens % spec.group:
        yield f"interaction: token_mixer: group = {spec.group} does not divide tokens = {spec.tokens}"
    elif spec.group * dim % spec.wide:
        yield (
            f"interaction: token_mixer: {spec.wide} wide tokens (tokens/group) cannot cut their width, "
            f"{spec.group * dim} (group · model.dim), into as many parts"
        )


def _own_block(member: CustomSpec, model: ModelConfig) -> Iterator[str]:
    asked = "weights"
    try:
        block = custom.load(member)
        for weight in block.weights(2, model.dim):
            if not (isinstance(weight.shape, tuple) and all(isinstance(size, int) for size in weight.shape)):
                yield f"interaction: {member.kind}: weights() gives {weight!r}, not Weight(name, shape, times)"
        asked = "kept"
        if not isinstance(kept := block.kept(2, model.dim), int) or kept < 0:
            yield f"interaction: {member.kind}: kept() gives {kept!r}, not a number of values ≥ 0"
    except InputError as error:
        yield from (f"interaction: {problem}" for problem in error.problems)
    except Exception as error:
        yield f"interaction: {member.kind}: {asked}() raises {type(error).__name__}: {error}"
