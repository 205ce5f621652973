"""The plan's placement of tables in TorchRec's terms: environment, process groups, shards, and dummy tables.

    layout = TableLayout.make(topology, placements, device)
    sharded = layout.shard(tables.pooled, EmbeddingBagCollectionSharder(fused_params=fused))

The only place that maps ranks of a table group to ranks of the world and works around TorchRec's peculiarities.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.remote_device import _remote_device
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D

from gemctl.mesh.topology import Axis, Topology
from gemctl.plan.tables import TablePlan, dummy_tables, ranks_of_host


@dataclass(frozen=True)
class TableLayout:
    """Placement of the tables of this rank's replica. `ranks`: its table group as ranks of the world."""

    env: ShardingEnv
    ranks: list[int]
    topology: Topology
    placements: Mapping[str, TablePlan]
    dummies: list[TablePlan]
    device: torch.device
    replica_group: dist.ProcessGroup | None  # ranks that hold the same shards; None: there is one replica

    @staticmethod
    def make(topology: Topology, placements: Mapping[str, TablePlan], device: torch.device) -> "TableLayout":
        """Process groups over the default one, whose size is the topology's world. Collective.

        One replica needs no second axis, unless a table is sharded over one host: TorchRec would take the ranks per
        host from the process's environment.
        """
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("tables need an initialised process group")
        added = dummy_tables(placements.values())
        by_host = any(placement.sharding == "table_row_wise" for placement in placements.values())
        if topology.mp_replicate == 1 and not by_host:
            ranks = list(range(topology.world_size))
            env = ShardingEnv(topology.world_size, dist.get_rank(), world, output_dtensor=True)
            return TableLayout(env, ranks, topology, placements, added, device, None)
        axes = (Axis.MP_REPLICATE.value, Axis.MP_SHARD.value)
        mesh = init_device_mesh(device.type, (topology.mp_replicate, topology.mp_shard), mesh_dim_names=axes)
        replicas, shards = (mesh.get_group(axis) for axis in axes)
        env = ShardingEnv2D(
            shards, replicas, world, mesh, node_group_size=ranks_of_host(topology),
            use_inter_host_allreduce=True,  # TorchRec's name for table groups of consecutive ranks
        )  # fmt: skip
        return TableLayout(env, dist.get_process_group_ranks(shards), topology, placements, added, device, replicas)

    def shard(self, module: Any, sharder: Any) -> Any:
        """The sharded collection (of `module`, an Embedding[Bag]Collection on meta), dummy tables last."""
        module = self._with_dummies(module)
        placed = {**self.placements, **{dummy.name: dummy for dummy in self.dummies}}
        plan = construct_module_sharding_plan(
            module,
            {table.name: self._generator(placed[table.name]) for table in _configs(module)},
            sharder=sharder,
            local_size=ranks_of_host(self.topology),
            world_size=self.topology.mp_shard,
            device_type=self.device.type,
        )
        for parameter in plan.values():
            self._to_global_ranks(parameter)
        return sharder.shard(module, plan, self.env, self.device)

    def add_dummies(self, ids: KeyedJaggedTensor, lookup: str) -> KeyedJaggedTensor:
        """`ids` with an empty feature for each dummy table of a lookup kind."""
        names = [dummy.name for dummy in self.dummies if dummy.lookup == lookup]
        if not names:
            return ids
        none = torch.zeros(len(names) * ids.stride(), dtype=ids.lengths().dtype, device=ids.lengths().device)
        lengths = torch.cat([ids.lengths(), none])
        return KeyedJaggedTensor(keys=[*ids.keys(), *names], values=ids.values(), lengths=lengths, stride=ids.stride())

    def _with_dummies(self, module: Any) -> Any:
        pooled = isinstance(module, EmbeddingBagCollection)
        added = [dummy for dummy in self.dummies if dummy.lookup == ("pooled" if pooled else "sequence")]
        if not added:
            return module
        kind: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
        tables = [kind(dummy.rows, dummy.dim, name=dummy.name, feature_names=[dummy.name]) for dummy in added]
        return type(module)(tables=[*_configs(module), *tables], device=torch.device("meta"))

    def _generator(self, placement: TablePlan) -> Any:
        if placement.sharding == "row_wise":
            return row_wise(compute_kernel="fused")
        if placement.sharding == "table_row_wise":
            return table_row_wise(host_index=placement.first_rank // placement.ranks)
        return table_wise(rank=placement.first_rank, compute_kernel="fused")

    def _to_global_ranks(self, parameter: Any) -> None:
        """A plan names ranks of the group; TorchRec's sharded tensors need ranks of the world."""
        parameter.compute_kernel = "fused"  # table_row_wise() has no such argument and chooses an unfused kernel on CPU
        parameter.ranks = [self.ranks[rank] for rank in parameter.ranks]
        for shard in parameter.sharding_spec.shards:
            rank = self.ranks[shard.placement.rank()]
            local = f":{rank % self.topology.ranks_per_node}" if self.device.type == "cuda" else ""
            shard.placement = _remote_device(f"rank:{rank}/{self.device.type}{local}")


def _configs(module: Any) -> list[Any]:
    """The configurations of a collection's tables."""
    pooled = isinstance(module, EmbeddingBagCollection)
    return list(module.embedding_bag_configs() if pooled else module.embedding_configs())
