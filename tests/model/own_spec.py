"""The torch-free spec of a block of a user's own package, as a model's YAML names it; its module is own_block.py."""

from dataclasses import dataclass
from typing import ClassVar

from gemctl.specs.weights import Weight, linear


@dataclass
class Squares:
    """`tokens` mixes of the squared tokens, each column scaled by a gate of the row's mean token."""

    tokens: int
    module: ClassVar[str] = "tests.model.own_block.SquaresBlock"

    def weights(self, inputs: int, dim: int) -> list[Weight]:
        return [Weight("mix", (self.tokens, inputs), dim), *linear("scale", dim, dim)]

    def kept(self, inputs: int, dim: int) -> int:
        return 2 * inputs * dim + self.tokens * dim
