"""How FSDP2 will shard the dense part: its units, and the bytes that each shard of a group holds.

FSDP2 cuts dim 0 of every parameter into chunks of ⌈rows/shards⌉ rows; storage is padded to full chunks, AdamW's state
is not. A block of at least `UNIT_PARAMETERS` is gathered and freed alone; the rest is the root unit, which stays
gathered from forward to the end of backward.

    gemctl plan experiment=main        # "dense weights", "gradients", "AdamW state", "unsharded peak"
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemctl.specs.count import Shape

UNIT_PARAMETERS = 1 << 20
"""A block below this many parameters costs more as a collective of its own than it saves in memory."""

ROOT = "root"


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together. Counts are elements."""

    name: str
    shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    def padded(self, shards: int) -> int:
        """Elements of one rank's storage: full chunks, the same on every rank."""
        return sum(-(-shape[0] // shards) * math.prod(shape[1:]) for shape in self.shapes)

    def held(self, shards: int) -> NDArray[np.int64]:
        """int64 [shards]: elements of the parameters that each shard really holds (the last ones may be short)."""
        total = np.zeros(shards, np.int64)
        for rows, *others in self.shapes:
            chunk, row = -(-rows // shards), math.prod(others)
            full, rest = divmod(rows, chunk)
            total[:full] += chunk * row
            total[full : full + 1] += rest * row
        return total


def units(parameters: Iterable[tuple[str, Shape]]) -> list[Unit]:
    """Root first, then every block that is a unit of its own, in the order of `parameters` (name, shape).

    A block is a child of the dense model, or an entry of its list of layers: "heads", "layers.0".
    """
    blocks: dict[str, list[Shape]] = {}
    for name, shape in parameters:
        blocks.setdefault(block_of(name), []).append(shape)
    alone = [Unit(name, tuple(shapes)) for name, shapes in blocks.items()]
    own = [unit for unit in alone if unit.numel >= UNIT_PARAMETERS]
    names = {unit.name for unit in own}
    rest = tuple(shape for name, shapes in blocks.items() if name not in names for shape in shapes)
    return [Unit(ROOT, rest), *own]


def block_of(parameter: str) -> str:
    """The block that a parameter belongs to."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else parts[0]
