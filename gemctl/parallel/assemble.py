"""A model on the ranks: built on the meta device, sharded as planned, its values set by (seed, name, global index)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from gemctl.config.schema import Config
from gemctl.data.batch import Batch
from gemctl.mesh.topology import Topology
from gemctl.model.gem import DenseModel, GemModel
from gemctl.model.init import InitRule, init_rules
from gemctl.parallel.dense import initialise_dense, shard_dense
from gemctl.parallel.tables import ShardedTables, TablePlacement
from gemctl.specs.data import FeatureSpec


@dataclass
class ShardedModel:
    """One rank's part of a model. `stride`: rows that each lookup pads to (see `ShardedTables`)."""

    dense: DenseModel
    tables: ShardedTables
    rules: Mapping[str, InitRule]
    topology: Topology
    group: dist.ProcessGroup
    device: torch.device

    def initialise(self, seed: int) -> None:
        """Sets every value; the full state is the same for every world and sharding."""
        initialise_dense(self.dense, self.rules, seed)
        self.tables.initialise(self.rules, seed)

    def state(self) -> dict[str, Tensor]:
        """Parameters of both parts and the tables' optimizer state, by the unsharded model's names."""
        dense = {f"dense.{name}": parameter.detach() for name, parameter in self.dense.named_parameters()}
        return dense | self.tables.state()

    def predict(self, batch: Batch, stride: int) -> Tensor:
        """Logits float32 [B, T] without a graph. Collective."""
        with torch.no_grad():
            logits: Tensor = self.dense(batch, self.tables(batch, stride).leaves)
        return logits


def assemble(
    config: Config,
    spec: FeatureSpec,
    topology: Topology,
    placements: Mapping[str, TablePlacement],
    device: torch.device,
) -> ShardedModel:
    """Builds and shards the model over the default process group; its values are not set yet. Collective."""
    with torch.device("meta"):
        model = GemModel(config.model, spec)
    rules = init_rules(model)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("assemble needs an initialised process group")
    degrees = {"dp_replicate": topology.dp_replicate, "dp_shard": topology.dp_shard}
    axes = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == "dp_shard"}
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    shard_dense(model.dense, mesh, config.precision, device)
    tables = ShardedTables(model.tables, spec, placements, config.optim.tables, group, device)
    return ShardedModel(model.dense, tables, rules, topology, group, device)
