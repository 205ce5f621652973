"""What a mixture of Wukong experts has and costs: the formulas are in gemctl/model/experts.py."""

import math
from itertools import pairwise
from typing import NamedTuple

from gemctl.specs.model import WukongExpertsSpec


class Stacked(NamedTuple):
    """A stacked parameter [experts, …]; each of its numbers is in `times` products a row (0: in none)."""

    name: str
    shape: tuple[int, ...]
    times: int

    @property
    def flops(self) -> int:
        """Forward FLOPs of a row: two a product."""
        return 2 * self.times * math.prod(self.shape)


def experts_weights(spec: WukongExpertsSpec, inputs: int, dim: int) -> list[Stacked]:
    """Every parameter of `WukongExperts(spec, inputs, dim)`: X (XᵀY) takes two products of Y's size."""
    count, part, made = spec.experts, spec.part(inputs), spec.fm_tokens + spec.lc_tokens
    found = [
        Stacked("fm_columns", (count, part, spec.rank), 2 * dim),
        Stacked("compression", (count, spec.lc_tokens, part), dim),
        Stacked("merge", (count, spec.tokens, made), dim),
    ]
    if made != part:
        found.append(Stacked("residual", (count, made, part), dim))
    for number, (a, b) in enumerate(pairwise([part * spec.rank, *spec.hidden, spec.fm_tokens * dim])):
        found.append(Stacked(f"fm_mlp.{number}.weight", (count, b, a), 1))
        found.append(Stacked(f"fm_mlp.{number}.bias", (count, b), 0))
    return found
