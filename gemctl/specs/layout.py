"""A model for a feature spec, layer by layer: the one expansion that modules, counts and the plan read.

    from gemctl.specs.layout import layout
    for layer in layout(config.model, spec).layers:
        print(layer.inputs, layer.reads, layer.outputs)

It resolves `repeat`, event personalisation, CompSkip, merged histories and CLS tokens. Each history goes through the
layers; what nothing reads is left out: X_sum in layers where no block reads it, and sequence blocks after the last
fresh summary of their history.
"""

from dataclasses import dataclass

from gemctl.specs.data import FeatureSpec
from gemctl.specs.model import EventTypeSpec, LayerSpec, ModelConfig
from gemctl.specs.sequence import SequenceBlock, Summary

MERGED = "merged"


@dataclass(frozen=True)
class History:
    """One history of the stack: a sequence of the spec, or all of them merged (`sources`, in the spec's order)."""

    name: str
    sources: tuple[str, ...]
    dim: int
    heads: int


@dataclass(frozen=True)
class HistoryLayer:
    """What one layer does with one history.

    `block` None: the events stay as they are. `attends`: the block's self-attention runs. `summary` None: the last one
    is reused. `tokens`: tokens of the summary that is read.
    """

    history: History
    block: SequenceBlock | None
    attends: bool
    summary: Summary | None
    tokens: int


@dataclass(frozen=True)
class Layer:
    """`inputs` tokens of X; `x_sum` tokens of X_sum (0: not made); the interaction reads `reads`, makes `outputs`."""

    spec: LayerSpec
    inputs: int
    x_sum: int
    histories: tuple[HistoryLayer, ...]
    reads: int
    outputs: int


@dataclass(frozen=True)
class Layout:
    """`tokens`: of X before the first layer; `cls`: CLS tokens before the oldest event of every history."""

    tokens: int
    cls: int
    histories: tuple[History, ...]
    layers: tuple[Layer, ...]

    @property
    def outputs(self) -> int:
        """Tokens that the heads read."""
        return self.layers[-1].outputs


def layout(model: ModelConfig, spec: FeatureSpec) -> Layout:
    """The expansion of a model without contradictions (gemctl/specs/contradictions.py)."""
    specs = expanded(model)
    stack = histories(model, spec)
    cls = specs[0].x_sum if stack and any(_reads_cls(layer) for layer in specs) else 0
    columns = [_history_layers(specs, history, model.event_types.get(history.name), cls) for history in stack]
    tokens = len(spec.categorical) + bool(spec.dense) + bool(spec.domain)
    layers: list[Layer] = []
    for index, own in enumerate(specs):
        inputs = layers[-1].outputs if layers else tokens
        layers.append(_layer(own, inputs, tuple(column[index] for column in columns), bool(cls and index == 0)))
    return Layout(tokens, cls, tuple(stack), tuple(layers))


def expanded(model: ModelConfig) -> list[LayerSpec]:
    """One spec for each layer."""
    return [layer for layer in model.layers for _ in range(layer.repeat)]


def histories(model: ModelConfig, spec: FeatureSpec) -> list[History]:
    """The histories that go through the layers."""
    names = [sequence.name for sequence in spec.sequences]
    sources = {MERGED: tuple(names)} if model.merge and names else {name: (name,) for name in names}
    stack = []
    for name, own in sources.items():
        personal = model.event_types.get(name, EventTypeSpec())
        stack.append(History(name, own, personal.dim or model.dim, personal.heads or model.heads))
    return stack


def _reads_cls(layer: LayerSpec) -> bool:
    return any(part.reads_cls for part in layer.summary.flat())


def _layer(spec: LayerSpec, inputs: int, rows: tuple[HistoryLayer, ...], makes_cls: bool) -> Layer:
    wanted = any(row.block is not None and row.block.reads_x_sum for row in rows)
    x_sum = spec.x_sum if wanted or makes_cls or spec.reads == "x_sum" else 0
    reads = (x_sum if spec.reads == "x_sum" else inputs) + sum(row.tokens for row in rows)
    return Layer(spec, inputs, x_sum, rows, reads, spec.interaction.tokens)


def _history_layers(
    specs: list[LayerSpec], history: History, personal: EventTypeSpec | None, cls: int
) -> list[HistoryLayer]:
    personal = personal or EventTypeSpec()
    depth = min(personal.depth or len(specs), len(specs))
    fresh = [_makes_summary(spec, index) for index, spec in enumerate(specs[:depth])]
    fresh += [False] * (len(specs) - depth)
    last = max(index for index, makes in enumerate(fresh) if makes)
    layers: list[HistoryLayer] = []
    for index, spec in enumerate(specs):
        block = _with_window(spec.sequence, personal.window) if index <= last else None
        attends = block is not None and _parity(index) != spec.comp_skip
        summary = _with_tokens(spec.summary, personal.tokens) if fresh[index] else None
        tokens = summary.outputs(cls) if summary is not None else layers[-1].tokens
        layers.append(HistoryLayer(history, block, attends, summary, tokens))
    return layers


def _makes_summary(spec: LayerSpec, index: int) -> bool:
    """The first layer always does: there is none to reuse."""
    return index == 0 or spec.comp_skip in {None, _parity(index)}


def _parity(index: int) -> str:
    return "odd" if index % 2 else "even"


def _with_window(block: SequenceBlock, window: int | None) -> SequenceBlock:
    return block if window is None else block.with_window(window)


def _with_tokens(summary: Summary, tokens: int | None) -> Summary:
    return summary if tokens is None else summary.with_tokens(tokens)
