"""Contradictions within a model, or with the feature spec, that no single key shows; torch-free.

from gemctl.specs.contradictions import contradictions
contradictions(ModelConfig(dim=32, heads=3), spec)     # ["model.heads is 3, which does not divide model.dim = 32"]
"""

from collections.abc import Iterator

from gemctl.specs.data import FeatureSpec
from gemctl.specs.layout import MERGED, histories
from gemctl.specs.model import MOST_LAYERS, LayerSpec, ModelConfig


def contradictions(model: ModelConfig, spec: FeatureSpec) -> list[str]:
    """All contradictions, as messages; none for a model that can be built."""
    found = [*_widths(model, spec), *_depth(model), *_event_types(model, spec)]
    for index, layer in enumerate(model.layers):
        found += [f"model.layers.{index}.{problem}" for problem in _layer(layer, model)]
    return list(dict.fromkeys(found))


def _widths(model: ModelConfig, spec: FeatureSpec) -> Iterator[str]:
    if model.dim % model.heads:
        yield f"model.heads is {model.heads}, which does not divide model.dim = {model.dim}"
    rotates = any(layer.sequence.rotates for layer in model.layers)
    for history in histories(model, spec):
        own = f"model.event_types.{history.name}"
        personal = model.event_types.get(history.name)
        if personal and (personal.dim or personal.heads) and history.dim % history.heads:
            yield f"{own}: {history.heads} heads do not divide its dim = {history.dim}"
        elif history.dim % history.heads == 0 and history.dim // history.heads % 2 and rotates:
            yield f"{own}: heads of width {history.dim // history.heads} cannot be rotated: their width must be even"


def _depth(model: ModelConfig) -> Iterator[str]:
    depth = sum(layer.repeat for layer in model.layers)
    if depth > MOST_LAYERS:
        yield f"model.layers has {depth} layers in total, more than {MOST_LAYERS}"


def _event_types(model: ModelConfig, spec: FeatureSpec) -> Iterator[str]:
    known = [history.name for history in histories(model, spec)]
    for name, personal in model.event_types.items():
        if name not in known:
            why = (
                f"model.merge makes one history, {MERGED}" if model.merge else f"there are {', '.join(known) or 'none'}"
            )
            yield f"model.event_types.{name}: the feature spec has no event sequence {name!r}: {why}"
        if personal.window is not None and not all(layer.sequence.windowed for layer in model.layers):
            yield f"model.event_types.{name}.window is {personal.window}, but block_attention has no window"


def _layer(layer: LayerSpec, model: ModelConfig) -> Iterator[str]:
    if layer.comp_skip and layer.sequence.only_attends:
        yield (f"comp_skip skips self-attention, which is all that an {layer.sequence.kind} block does: set it to null")
    for core in layer.interaction.cores():
        yield from (f"interaction: {problem}" for problem in core.problems(model.dim))
