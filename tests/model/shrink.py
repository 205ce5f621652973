"""A preset's small twin, for tests against the oracle: the same kinds in the same order, in tiny sizes.

    from tests.model.shrink import shrunk
    shrunk(compose(None, ["model=kunlun_nano"]).model)

What is kept: which blocks there are and in which order, gates, activations, causality, positions, norms of q and k,
residuals, CompSkip and its parity, what the interaction reads, the number of hidden layers, event types and which of
their sizes are their own, the merge. What gets small: widths, heads, tokens, ranks, experts; windows, in their order
(the smallest is 2, the next 3). Depth keeps its pattern: a form repeats at most 4 times, two of each parity, and an
event type ends in the form in which it ended.
"""

from dataclasses import fields, is_dataclass, replace
from itertools import cycle, islice
from typing import Any

from gemctl.specs.model import LayerSpec, ModelConfig

DIM, HEADS, MOST_REPEATS, SMALLEST_WINDOW = 16, 4, 4, 2
SIZES = {
    "x_sum": 3,
    "ffn_hidden": 5,
    "ffn_rank": 6,
    "generator_rank": 4,
    "group": 1,
    "tokens": 2,
    "seeds": 5,
    "fm_tokens": 3,
    "lc_tokens": 2,
    "rank": 3,
    "fm_compression": 2,
    "crosses": 2,
}
WIDTHS = {"hidden": (7, 6), "fm_hidden": (5, 6), "head_hidden": (5, 4)}
OWN_DIM, OWN_HEADS, OWN_TOKENS = 8, 2, 3  # of an event type that has its own


def shrunk(model: ModelConfig) -> ModelConfig:
    """The twin; `model` stays as it is."""
    windows = sorted(set(_windows(model)))
    small: ModelConfig = _small(replace(model, dim=DIM, heads=HEADS), windows)
    for name, personal in model.event_types.items():
        own = small.event_types[name]
        own.dim, own.heads = personal.dim and OWN_DIM, personal.heads and OWN_HEADS
        own.tokens = personal.tokens and OWN_TOKENS
        own.depth = personal.depth and _depth(model.layers, personal.depth)
    return small


def _depth(forms: list[LayerSpec], depth: int) -> int:
    """Layers of the twin that an event type of this depth goes through: short of a form's end where it was before."""
    found = 0
    for form in forms:
        inside = max(0, min(depth, form.repeat))
        kept = min(form.repeat, MOST_REPEATS)
        found += min(inside, kept if inside == form.repeat else kept - 1)
        depth -= form.repeat
    return max(found, 1)


def _windows(value: Any) -> list[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [window for item in value for window in _windows(item)]
    if not is_dataclass(value):
        return []
    own = getattr(value, "window", None)
    inner = [window for one in fields(value) for window in _windows(getattr(value, one.name))]
    return inner if own is None else [own, *inner]


def _small(value: Any, windows: list[int]) -> Any:
    if isinstance(value, list):
        return [_small(item, windows) for item in value]
    if isinstance(value, dict):
        return {key: _small(item, windows) for key, item in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{one.name: _size(one.name, getattr(value, one.name), windows) for one in fields(value)})


def _size(name: str, value: Any, windows: list[int]) -> Any:
    if value is None:
        return None
    if name in WIDTHS and isinstance(value, list):
        return list(islice(cycle(WIDTHS[name]), len(value)))
    if name == "hidden":  # of a MaskNet
        return 7
    if name == "experts":
        return 2 if value % 3 else 3
    if name == "repeat":
        return min(value, MOST_REPEATS)
    if name == "window":
        return SMALLEST_WINDOW + windows.index(value)
    return SIZES[name] if name in SIZES else _small(value, windows)
