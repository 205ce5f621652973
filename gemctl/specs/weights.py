"""How a block states what it has, costs and keeps: parameters, FLOPs, activations; torch-free.

    from gemctl.specs.weights import Counts, linear
    Counts(linear("out", 32, 64), kept_by_row=32).flops(rows=2)        # 2 · 2·32·64

Useful FLOPs are those of matrix products and of the attention family (gemctl/specs/flops.py), at the real lengths.
Lookups, norms, activations and recomputed work count nothing. Kept activations are an estimate: every input of a matrix
product, a norm, an activation or an attention is kept once for backward; kernels recompute their scores.
"""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemctl.specs import flops

Shape = tuple[int, ...]
Lengths = NDArray[np.int64]

NORM = 2
"""Values kept for a normalised vector besides its input: mean and deviation."""
NO_EVENTS: Lengths = np.zeros(0, np.int64)


class Weight(NamedTuple):
    """A parameter, and how many vectors of a row (or of an event) each of its numbers multiplies; 0: none.

    `name` is None for a product of two activations: `shape` is then that of its second operand.
    """

    name: str | None
    shape: Shape
    times: int = 0

    @property
    def flops(self) -> int:
        """Forward FLOPs per row or event: two per multiply-add."""
        return 2 * self.times * math.prod(self.shape)


class Pairs(NamedTuple):
    """The (query, key) pairs of an attention over a history of any length; `width`: all heads together.

    `shared`: keys or seeds that every event meets (0: the events meet each other). `block`: events per block in block
    attention.
    """

    width: int
    shared: int = 0
    block: int | None = None
    causal: bool = False
    window: int | None = None

    def flops(self, lengths: Lengths) -> int:
        """Forward FLOPs over histories of these lengths."""
        if self.shared:
            count = flops.pooled_pairs(self.shared, lengths)
        elif self.block is not None:
            count = flops.block_pairs(lengths, self.block)
        else:
            count = flops.pairs(lengths, lengths, self.causal, self.window)
        return flops.attention_forward(count, 1, self.width)


class Counts(NamedTuple):
    """What a module has, costs and keeps.

    Weights that multiply each row, weights that multiply each event, the pairs of its attention; values kept for
    backward per row and per event (of float32 or the compute format).
    """

    by_row: list[Weight] = []  # noqa: RUF012  never written to
    by_event: list[Weight] = []  # noqa: RUF012
    pairs: list[Pairs] = []  # noqa: RUF012
    kept_by_row: int = 0
    kept_by_event: int = 0

    @property
    def weights(self) -> list[Weight]:
        """All weights; those with a name are parameters."""
        return [*self.by_row, *self.by_event]

    def flops(self, rows: int, lengths: Lengths = NO_EVENTS) -> int:
        """Forward FLOPs over `rows` rows with histories of `lengths` int64 [rows]."""
        by_row = rows * sum(weight.flops for weight in self.by_row)
        by_event = int(lengths.sum()) * sum(weight.flops for weight in self.by_event)
        return by_row + by_event + sum(pair.flops(lengths) for pair in self.pairs)


def prefixed(prefix: str, weights: Iterable[Weight]) -> list[Weight]:
    """The weights of a submodule `prefix`, by their names in the module around it."""
    return [weight if weight.name is None else weight._replace(name=f"{prefix}.{weight.name}") for weight in weights]


def linear(name: str, inputs: int, outputs: int, bias: bool = True, times: int = 1) -> list[Weight]:
    """`nn.Linear(inputs, outputs)` over `times` vectors."""
    weight = Weight(f"{name}.weight", (outputs, inputs), times)
    return [weight, Weight(f"{name}.bias", (outputs,))] if bias else [weight]


def mlp(name: str, inputs: int, hidden: list[int], outputs: int, times: int = 1) -> list[Weight]:
    """`MLP(inputs, hidden, outputs)` of gemctl/model/layers.py over `times` vectors."""
    layers = enumerate(pairwise([inputs, *hidden, outputs]))
    prefix = f"{name}." if name else ""
    return [weight for i, (a, b) in layers for weight in linear(f"{prefix}{2 * i}", a, b, times=times)]


def token_linear(name: str, inputs: int, outputs: int, dim: int) -> list[Weight]:
    """`TokenLinear(inputs, outputs)` of gemctl/model/layers.py over tokens of width `dim`."""
    return linear(name, inputs, outputs, bias=False, times=dim)


def gate(kind: str, tokens: int, dim: int) -> Counts:
    """The gate `make_gate(kind, dim)` of gemctl/model/layers.py over `tokens` tokens of a row; nothing for "none"."""
    if kind == "none":
        return Counts()
    return Counts(mlp("gate.mlp", dim, [dim], dim, times=tokens), kept_by_row=4 * tokens * dim)
