"""A preset's small twin, for tests against the oracle: the same kinds in the same order, in tiny sizes.

from tests.models.shrink import shrunk
shrunk(compose(None, ["model=kunlun_nano"]).model)

What is kept: which blocks there are and in which order, gates, activations, causality, positions, norms of q and k,
residuals, CompSkip and its parity, what the interaction reads, whether windows are set, event types, the merge. What
gets small: widths, heads, tokens, ranks, experts, hidden layers; a window is at most 2, a form repeats at most 4 times
(two of each parity).
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from gemctl.specs.model import ModelConfig

DIM, HEADS, MOST_REPEATS, MOST_WINDOW = 8, 2, 4, 2
SIZES = {
    "x_sum": 3,
    "ffn_hidden": 5,
    "ffn_rank": 6,
    "tokens": 2,
    "seeds": 5,
    "fm_tokens": 3,
    "lc_tokens": 2,
    "rank": 3,
    "fm_compression": 2,
    "crosses": 2,
}
WIDTHS = {"hidden": [7, 6], "fm_hidden": [5], "head_hidden": [5, 4]}


def shrunk(model: ModelConfig) -> ModelConfig:
    """The twin. Widths' lists keep up to their number of layers; an event type's width is half of the model's."""
    small: ModelConfig = _small(replace(model, dim=DIM, heads=HEADS))
    for personal in small.event_types.values():
        personal.dim = personal.dim and DIM // 2
        personal.heads = personal.heads and 1
        personal.depth = personal.depth and min(personal.depth, 2)
    return small


def _small(value: Any) -> Any:
    if isinstance(value, list):
        return [_small(item) for item in value]
    if isinstance(value, dict):
        return {key: _small(item) for key, item in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{one.name: _size(one.name, getattr(value, one.name)) for one in fields(value)})


def _size(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in WIDTHS and isinstance(value, list):
        return WIDTHS[name][: len(value)]
    if name == "hidden":  # of a MaskNet
        return 7
    if name == "experts":
        return 2 if value % 3 else 3
    if name == "repeat":
        return min(value, MOST_REPEATS)
    if name == "window":
        return min(value, MOST_WINDOW)
    return SIZES[name] if name in SIZES else _small(value)
