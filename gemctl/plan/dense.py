"""How FSDP2 shards the dense part: its units, the elements that each shard holds, and the modules of experts.

FSDP2 cuts dim 0 of every parameter into chunks of ⌈rows/shards⌉ rows; storage is padded to full chunks, AdamW's state
is not. A block of at least `UNIT_PARAMETERS` is gathered and freed by itself; the rest is the root unit, which
stays gathered from forward to the end of backward. Experts are stacked along dim 0, which `ep` cuts first: a rank
then sees experts/ep of them, sharded over dp_shard/ep ranks, and each module of experts is a unit.

    gemctl plan experiment=synthetic        # "dense weights", "gradients", "AdamW state", "unsharded peak"
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemctl.mesh.topology import Topology
from gemctl.specs.count import Shape
from gemctl.specs.data import FeatureSpec
from gemctl.specs.layout import layout
from gemctl.specs.model import ModelConfig

UNIT_PARAMETERS = 1 << 20
"""A smaller block would cost more as a collective of its own than it saves in memory."""

CONTAINERS = ("events", "layers")  # children of the dense model that are never called themselves: their entries are
ROOT = "root"


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together, by one rank: with `ep` > 1, those of its own experts.

    `shapes` are as FSDP2 sees them, each cut along its entry of `dims` into `shards` parts.
    """

    name: str
    shapes: tuple[Shape, ...]
    dims: tuple[int, ...]
    shards: int
    ep: int = 1

    @property
    def numel(self) -> int:
        """Elements of all parameters when gathered."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def parameters(self) -> int:
        """Elements of the model in this unit, on all ranks of an `ep` group."""
        return self.numel * self.ep

    @property
    def padded(self) -> int:
        """Elements of one rank's storage: full chunks, the same on every rank."""
        cuts = zip(self.shapes, self.dims, strict=True)
        return sum(-(-shape[dim] // self.shards) * (math.prod(shape) // shape[dim]) for shape, dim in cuts)

    def held(self) -> NDArray[np.int64]:
        """int64 [dp_shard]: elements that each shard holds without padding (the last ones may be short)."""
        total = np.zeros(self.shards, np.int64)
        for shape, dim in zip(self.shapes, self.dims, strict=True):
            chunk, row = -(-shape[dim] // self.shards), math.prod(shape) // shape[dim]
            full, rest = divmod(shape[dim], chunk)
            total[:full] += chunk * row
            total[full : full + 1] += rest * row
        return np.repeat(total, self.ep)


def cut_dim(stacked: Shape, shards: int) -> int:
    """The dimension of stacked experts [experts, rows, …] that FSDP2 cuts into `shards`: 0, or 1 if only that is even.

    There are usually fewer experts than shards, so a cut along dim 0 would leave ranks without any.
    """
    return 1 if stacked[0] % shards and len(stacked) > 1 and stacked[1] % shards == 0 else 0


def units(
    parameters: Iterable[tuple[str, Shape]], topology: Topology, expert_modules: Collection[str] = ()
) -> list[Unit]:
    """Root first, then every block that is a unit of its own, in the order of `parameters` (name, shape).

    A block is a child of the dense model, or an entry of one of its containers ("heads", "layers.0", "events.clicks");
    with `ep` > 1 also each of `expert_modules`, whose parameters are stacked by expert.
    """
    blocks: dict[str, list[tuple[Shape, int]]] = {}
    experts: dict[str, list[Shape]] = {}
    for name, shape in parameters:
        module = next((module for module in expert_modules if name.startswith(f"{module}.")), None)
        if module is not None and topology.ep > 1:
            experts.setdefault(module, []).append((shape[0] // topology.ep, *shape[1:]))
        else:
            dim = 0 if module is None else cut_dim(shape, topology.dp_shard)
            blocks.setdefault(block_of(name), []).append((shape, dim))
    sizes = {name: sum(math.prod(shape) for shape, _ in cuts) for name, cuts in blocks.items()}
    rest = [cut for name, cuts in blocks.items() if sizes[name] < UNIT_PARAMETERS for cut in cuts]
    alone = {ROOT: rest} | {name: cuts for name, cuts in blocks.items() if sizes[name] >= UNIT_PARAMETERS}
    found = [_unit(name, cuts, topology.dp_shard) for name, cuts in alone.items()]
    return found + [
        _unit(name, [(shape, cut_dim(shape, topology.expert_shard)) for shape in shapes], topology.expert_shard,
              topology.ep)
        for name, shapes in experts.items()
    ]  # fmt: skip


def _unit(name: str, cuts: list[tuple[Shape, int]], shards: int, ep: int = 1) -> Unit:
    return Unit(name, tuple(shape for shape, _ in cuts), tuple(dim for _, dim in cuts), shards, ep)


def block_of(parameter: str) -> str:
    """The block that a parameter belongs to."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] in CONTAINERS else parts[0]


@dataclass(frozen=True)
class ExpertModule:
    """A module of experts: the tokens of a row that it reads and makes. The first `early` inputs exist when its layer
    begins.
    """

    name: str
    inputs: int
    early: int
    outputs: int


def expert_modules(model: ModelConfig, spec: FeatureSpec) -> list[ExpertModule]:
    """All modules of experts, by their names in the dense part, in the order in which they run."""
    return [
        ExpertModule(
            f"layers.{index}.interaction.members.{number}",
            layer.reads,
            layer.x_sum if layer.spec.reads == "x_sum" else layer.inputs,
            core.tokens,
        )
        for index, layer in enumerate(layout(model, spec).layers)
        for number, core in enumerate(layer.spec.interaction.cores())
        if core.stacked_experts
    ]
