"""What single ranks do in the tests of tables in 2D, beyond training a case. No pytest here: ranks import this."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv

from gemctl.config.schema import LauncherConfig, TopologyConfig
from gemctl.data.batch import Batch
from gemctl.mesh.topology import resolve
from gemctl.model.embeddings import features_of, kjt_inputs
from gemctl.parallel.assemble import ShardedModel, assemble
from gemctl.parallel.tables import ShardedTables, local_slices
from gemctl.train.ledger import Ledger
from gemctl.train.loop import Trainer
from gemctl.train.optim import DenseOptimizer
from gemctl.train.step import Flags, Stepper
from tests.parallel.table_runs import DIM, LR, POOLED, Case, drop_groups, local_values, made, take_step
from tests.support.full_state import gather_full
from tests.support.small import SPEC, local_batch, small_config


def beside_torchrec() -> bool:
    """Whether the pooled tables and their state equal, to the bit, those of TorchRec's own 1D sharding of one group."""
    case, rank, world = Case(1, 4), dist.get_rank(), dist.get_world_size()
    ours = made(case)
    configs = [
        EmbeddingBagConfig(rows, DIM, name=name, feature_names=features_of(case.spec, name))
        for name, rows in (("user", case.rows[0]), ("tag", case.rows[2]))
    ]
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": 1e-8}
    sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    plan = construct_module_sharding_plan(
        bags, {config.name: row_wise(compute_kernel="fused") for config in configs}, sharder, world, world, "cpu"
    )
    theirs = sharder.shard(
        bags, plan, ShardingEnv(world, rank, dist.group.WORLD, output_dtensor=True), torch.device("cpu")
    )
    state = {f"tables.pooled.{key}": value for key, value in theirs.state_dict().items()}
    for key, value in state.items():
        for target, source in zip(local_slices(value), local_slices(ours.state()[key]), strict=True):
            target.tensor.copy_(source.tensor)
    for step in range(4):
        take_step(ours, case, step)
        batch = case.batch(step, rank, world)
        ids, _ = kjt_inputs(batch, case.spec, 4)
        pooled = theirs(ids).wait()
        (sum(pooled[name][: len(batch)].sin().sum() for name in ("user", "tags")) * world).backward()
    for key, slots in theirs.fused_optimizer.state_dict()["state"].items():
        state[f"optim.tables.pooled.{key}.momentum1"] = next(iter(slots.values()))
    return all(
        torch.equal(mine.tensor, other.tensor)
        for key, value in ours.state().items()
        if POOLED in key
        for mine, other in zip(local_slices(value), local_slices(state[key]), strict=True)
    )


Ranks = set[tuple[int, ...]]


def groups_of_a_step(case: Case) -> tuple[Ranks, Ranks]:
    """The groups of every collective in a step: of lookup and backward, and of the average."""
    tables = made(case)
    take_step(tables, case, 0)
    seen: Ranks = set()
    averaged: Ranks = set()
    average = tables.average

    def recorded() -> None:
        exchanged = set(seen)
        seen.clear()
        average()
        averaged.update(seen)
        seen.clear()
        seen.update(exchanged)

    patches = [patch.object(dist, name, _watched(function, seen)) for name, function in _collectives()]
    for one in [*patches, patch.object(tables, "average", recorded)]:
        one.start()
    take_step(tables, case, 1)
    patch.stopall()
    return seen, averaged


def _collectives() -> list[tuple[str, Callable[..., Any]]]:
    found = inspect.getmembers(dist, inspect.isfunction)
    return [
        (n, f) for n, f in found if "group" in inspect.signature(f).parameters and not n.startswith(("get_", "new_"))
    ]


def _watched(function: Callable[..., Any], seen: Ranks) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        group = signature.bind(*args, **kwargs).arguments.get("group") or dist.group.WORLD
        seen.add(tuple(dist.get_process_group_ranks(group)))
        return function(*args, **kwargs)

    return call


@dataclass
class Job:
    """The whole small model on this world."""

    model: ShardedModel
    stepper: Stepper
    optimizer: DenseOptimizer

    @staticmethod
    def of(replicas: int, global_batch: int, sync_every: int = 1) -> "Job":
        config = small_config(global_batch)
        config.topology = TopologyConfig(mp_replicate=replicas)
        config.optim.tables.sync_every = sync_every
        topology = resolve(config.topology, LauncherConfig(ranks_per_node=dist.get_world_size()))
        model = assemble(config, SPEC, topology, torch.device("cpu"))
        model.initialise(7)
        optimizer = DenseOptimizer(model.dense, config.optim.dense)
        return Job(model, Stepper(config, model, optimizer, Ledger()), optimizer)

    def step(self, index: int) -> float:
        batch = self.stepper.config.train.global_batch
        rows = local_batch(index, batch, dist.get_rank(), dist.get_world_size())
        return self.stepper.step(index, _learnable(rows), -(-batch // dist.get_world_size()), Flags()).loss


def _learnable(batch: Batch) -> Batch:
    """The batch with labels that user and item decide, up to a draw for each row."""
    draw = torch.Generator().manual_seed(5)
    users, items = torch.randn(23, generator=draw), torch.randn(41, generator=draw)
    logits = 1.5 * (users[batch.categorical["user"].values] + items[batch.categorical["candidate"].values])
    uniform = torch.stack([torch.rand((), generator=torch.Generator().manual_seed(int(row))) for row in batch.rows])
    batch.labels[:] = torch.stack([uniform < logits.sigmoid(), uniform < 0.6 * logits.sigmoid()], 1).float()
    return batch


def loss_curves() -> list[list[float]]:
    """60 steps with one replica of the tables, with four, and with four without moment scaling."""
    found = []
    for replicas, scaled in ((1, True), (4, True), (4, False)):
        job = Job.of(replicas, 32)
        if not scaled:
            job.model.tables._gradient_scale, job.model.tables._lr = 1.0, 0.05
        found.append([job.step(index) for index in range(60)])
        drop_groups()
    return found


def moves_from_equal_sums() -> list[dict[str, Tensor]]:
    """By how much one step moves each table if its sums of squares were 10⁶, with one, two and four replicas."""
    found = []
    for replicas in (1, 2, 4):
        case = Case(replicas, 4 // replicas)
        tables = made(case)
        for key, value in tables.state().items():
            for part in local_slices(value):
                if key.endswith("momentum1"):
                    part.tensor.fill_(1e6)
        before = gather_full(tables.state())
        take_step(tables, case, 0)
        after = gather_full(tables.state())
        found.append({key: after[key] - value for key, value in before.items() if key.endswith("weight")})
        drop_groups()
    return found


def resume_between_averages(case: Case) -> tuple[bool, bool]:
    """Two steps, an average as a save needs it, and the rest of the steps: in one go, and in tables that take over the
    state there. Whether both end bit-equal, and whether the average has changed anything.
    """
    whole = made(case)
    for step in (0, 1):
        take_step(whole, case, step)
    before = local_values(whole)
    whole.average()
    saved = local_values(whole)
    resumed = made(case)
    parts = [part.tensor for value in resumed.state().values() for part in local_slices(value)]
    for target, source in zip(parts, saved, strict=True):
        target.copy_(source)
    for step in range(2, case.steps):
        take_step(whole, case, step)
        take_step(resumed, case, step)
    ends = zip(local_values(whole), local_values(resumed), strict=True)
    moved = any(not torch.equal(a, b) for a, b in zip(before, saved, strict=True))
    return all(torch.equal(a, b) for a, b in ends), moved or not before


def save_between_averages() -> tuple[bool, bool]:
    """Whether the replicas agree after a step that does not average them, and in what the trainer then saves."""
    job = Job.of(2, 16, sync_every=10)
    job.step(0)
    before = _agree(job.model.tables)
    saver: Any = SimpleNamespace(save=lambda step, state, position: None)
    trainer = Trainer(
        job.stepper.config, SPEC, job.model, job.optimizer, saver, cast(Any, None), Ledger(), lambda batch: 0.0,
        lambda name, step: None, Flags, lambda: False, dist.get_rank(), dist.get_world_size(), done=1,
    )  # fmt: skip
    trainer.save()
    return before, _agree(job.model.tables)


def _agree(tables: ShardedTables) -> bool:
    """Whether all replicas hold the same bits."""
    shards = dist.get_world_size() // 2
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, torch.cat([part.flatten() for part in local_values(tables)]))
    return all(torch.equal(parts[rank], parts[rank + shards]) for rank in range(shards))
