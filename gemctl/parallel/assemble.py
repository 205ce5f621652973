"""A model on the ranks: built on the meta device, sharded as planned, initialised by (seed, name, global index)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gemctl.config.schema import Config
from gemctl.data.batch import Batch
from gemctl.mesh.topology import WORLD, Topology
from gemctl.model.embeddings import Embedded
from gemctl.model.gem import DenseModel, GemModel
from gemctl.model.init import InitRule, init_rules
from gemctl.parallel.dense import initialise_dense, shard_dense
from gemctl.parallel.experts import EpGroup
from gemctl.parallel.tables import ShardedTables
from gemctl.parallel.traffic import TrafficCounter
from gemctl.plan.tables import place
from gemctl.specs.data import FeatureSpec


@dataclass
class ShardedModel:
    """One rank's part of a model."""

    dense: DenseModel
    tables: ShardedTables
    rules: Mapping[str, InitRule]
    topology: Topology
    group: dist.ProcessGroup
    device: torch.device
    experts: EpGroup | None  # None where ep is 1
    traffic: TrafficCounter

    def initialise(self, seed: int) -> None:
        """Sets all values; the full state is the same for every world and sharding."""
        initialise_dense(self.dense, self.rules, seed)
        self.tables.initialise(self.rules, seed)

    def state(self) -> dict[str, Tensor]:
        """Parameters of both parts and the tables' optimizer state, by their names in the unsharded model."""
        dense = {f"dense.{name}": parameter.detach() for name, parameter in self.dense.named_parameters()}
        return dense | self.tables.state()

    def logits(self, batch: Batch, embedded: Embedded, rows: Callable[[int], int] | None = None) -> Tensor:
        """Logits float32 [B, T] of the dense part. `rows`: the rows of `batch` on each rank, if known; else the
        ranks of an expert group exchange them. Collective.
        """
        if self.experts is not None and rows is not None:
            self.experts.expect([rows(rank) for rank in self.experts.ranks])
        elif self.experts is not None:
            self.experts.count(len(batch))
        logits: Tensor = self.dense(batch, embedded)
        return logits

    def predict(self, batch: Batch, padded_rows: int) -> Tensor:
        """Logits float32 [B, T] without a graph; lookups pad to `padded_rows` (see `ShardedTables`). Collective."""
        with torch.no_grad():
            return self.logits(batch, self.tables(batch, padded_rows).leaves)


def assemble(config: Config, spec: FeatureSpec, topology: Topology, device: torch.device) -> ShardedModel:
    """Builds the model and shards it over the default process group, by `topology` and the plan of its tables, without
    setting its values. Collective.
    """
    with torch.device("meta"):
        model = GemModel(config.model, spec)
    rules = init_rules(model)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("assemble needs an initialised process group")
    mesh, experts = shard_dense(model.dense, topology, config.precision, device, config.train.recompute)
    placements = place(spec, config, topology)
    tables = ShardedTables(model.tables, spec, placements, config.optim.tables, topology, device)
    traffic = TrafficCounter(_axes([mesh, *([experts.mesh] if experts else [])], group))
    return ShardedModel(model.dense, tables, rules, topology, group, device, experts, traffic)


def _axes(meshes: list[DeviceMesh], world: dist.ProcessGroup) -> dict[dist.ProcessGroup, list[str]]:
    """The axes of degree > 1 that each process group of the dense part serves."""
    axes = {world: [WORLD]}
    for mesh in meshes:
        for axis in mesh.mesh_dim_names or ():
            if mesh[axis].size() > 1:
                axes.setdefault(mesh.get_group(axis), []).append(axis)
    return axes
