"""What the checkpoint tests save: a small model of the real kinds (FSDP2, TorchRec's sharded tables, plain tensors)."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv

from gemctl.run.attempt import Attempt, Base
from gemctl.run.directory import RunDir
from gemctl.run.manifest import RunFacts

# On 4 ranks a row-wise table of 5 leaves one rank without rows. It is not the last, as FBGEMM's CPU backward would
# then read past the end of its table sizes and stop at random ("more than 2B rows").
ROWS = {"uneven": 5, "wide": 40, "whole": 17}
DIM = 4


class Trainee:
    """HSDP linear layers with AdamW, two row-wise tables and one table-wise, a replicated tensor; trained for real."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        world = dist.get_world_size()
        replicas = 2 if world == 4 else 1
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
        self.dense = nn.Sequential(nn.Linear(len(ROWS) * DIM, 7), nn.Tanh(), nn.Linear(7, 1))
        fully_shard(self.dense, mesh=mesh)
        self.adam = torch.optim.AdamW(self.dense.parameters(), lr=0.01)
        self.tables = _tables()
        with torch.no_grad():
            for key, value in self.tables.state_dict().items():
                for shard in value.to_local().local_shards():
                    shard.copy_(torch.randn_like(shard) + len(key))
        self.scale = torch.tensor([1.0, float(seed)])

    def state(self) -> dict[str, Tensor]:
        state = {f"dense.{name}": parameter for name, parameter in self.dense.named_parameters()}
        state |= {f"tables.{key}": value for key, value in self.tables.state_dict().items()}
        for key, slots in self.tables.fused_optimizer.state_dict()["state"].items():
            state |= {f"optim.tables.{key}.{slot}": value for slot, value in slots.items()}
        for name, parameter in self.dense.named_parameters():
            state |= {f"optim.dense.{name}.{slot}": value for slot, value in self.adam.state[parameter].items()}
        return state | {"scale": self.scale}

    def trained(self) -> "Trainee":
        """After one step, so that AdamW has a state."""
        self.step(0)
        return self

    def step(self, number: int) -> float:
        """One training step on data that depend on the rank; returns the local loss."""
        draw = torch.Generator().manual_seed(100 * number + dist.get_rank())
        lengths = torch.randint(0, 4, (len(ROWS) * 3,), generator=draw)
        ids = torch.randint(0, min(ROWS.values()), (int(lengths.sum()),), generator=draw)
        looked_up = self.tables(KeyedJaggedTensor(keys=list(ROWS), values=ids, lengths=lengths)).wait().values()
        loss = (self.dense(looked_up) * self.scale[1] - 1).square().mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return float(loss.detach())


def _tables() -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    generators = {name: row_wise(compute_kernel="fused") for name in ROWS}
    generators["whole"] = table_wise(rank=1 % world, compute_kernel="fused")
    plan = construct_module_sharding_plan(
        module, generators, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    return sharder.shard(
        module, plan, ShardingEnv(world, rank, dist.group.WORLD, output_dtensor=True), torch.device("cpu")
    )


def make_run(path: Path, attempts: int = 1) -> RunDir:
    """A run directory with that many attempts, all from the start."""
    run = RunDir(path)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    for number in range(1, attempts + 1):
        add_attempt(run, number, Base(None, 0))
    return run


def add_attempt(run: RunDir, number: int, base: Base) -> Attempt:
    attempt = run.attempt(number)
    attempt.path.mkdir(parents=True)
    attempt.write_base(base)
    return attempt


def facts() -> RunFacts:
    return RunFacts(
        world=dist.get_world_size(),
        axes={"dp_replicate": 1, "dp_shard": dist.get_world_size()},
        hosts=["localhost"] * dist.get_world_size(),
        plan_hash="a1",
        config_hash="b2",
        seed=3,
        optimizers={"dense": "adamw", "tables": "rowwise_adagrad"},
    )
