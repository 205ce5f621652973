"""Saves of the real model, trained, in one world and topology, loaded in others. No pytest here: ranks import this."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gemctl.checkpoint.load import load, load_some
from gemctl.checkpoint.save import Saver
from gemctl.config.schema import CheckpointConfig, LauncherConfig, TableSharding, TopologyConfig
from gemctl.mesh.topology import resolve
from gemctl.parallel.assemble import assemble
from gemctl.run.directory import RunDir
from gemctl.run.manifest import RunFacts, read
from gemctl.specs.interaction import WukongExpertsSpec
from gemctl.specs.model import LayerSpec
from gemctl.train.ledger import Ledger
from gemctl.train.optim import DenseOptimizer
from gemctl.train.step import Flags, Stepper
from tests.support.full_state import full_state_hash, gather_full
from tests.support.small import SPEC, local_batch, small_config

BATCH, STEPS = 10, 2
EXPERTS = WukongExpertsSpec(experts=4, tokens=6, fm_tokens=2, lc_tokens=3, rank=3, hidden=[8])


@dataclass(frozen=True)
class Layout:
    """A world and how the model lies on it."""

    world: int
    dp_replicate: int = 1
    ep: int = 1
    mp_replicate: int = 1
    tables: str = "row_wise"  # or table_wise, or mixed

    def topology(self) -> TopologyConfig:
        rest: TableSharding = "table_wise" if self.tables == "table_wise" else "row_wise"
        item: dict[str, TableSharding] = {"item": "table_wise"} if self.tables == "mixed" else {}
        return TopologyConfig(
            dp_replicate=self.dp_replicate, ep=self.ep, mp_replicate=self.mp_replicate, table_sharding=rest, tables=item
        )


class Job:
    """The small model, with experts, on this world. `tables`: their optimizer."""

    def __init__(self, layout: Layout, seed: int, tables: str = "rowwise_adagrad") -> None:
        self.config = small_config(BATCH)
        self.config.optim.tables.kind = tables  # type: ignore[assignment]
        self.config.model.layers = [LayerSpec(interaction=EXPERTS)]
        self.config.topology = layout.topology()
        topology = resolve(self.config.topology, LauncherConfig(ranks_per_node=layout.world), EXPERTS.experts)
        self.model = assemble(self.config, SPEC, topology, torch.device("cpu"))
        self.model.initialise(seed)
        self.optimizer = DenseOptimizer(self.model.dense, self.config.optim.dense)
        self.stepper = Stepper(self.config, self.model, self.optimizer, Ledger())

    def step(self, index: int) -> float:
        """The global loss of a step."""
        rank, world = dist.get_rank(), dist.get_world_size()
        batch = local_batch(index, BATCH, rank, world)
        return self.stepper.step(index, batch, max(1, -(-BATCH // world)), Flags()).loss

    def state(self) -> dict[str, torch.Tensor]:
        return self.model.state() | self.optimizer.state()


def save_trained(path: Path, layout: Layout, settled: bool = False) -> tuple[str, float]:
    """Trains, saves; the full state's hash at the save, and the loss of the step after it.

    `settled`: the tables' AdaGrad state is set to 1 before the save, so that one step adds little.
    """
    job = Job(layout, seed=7)
    for index in range(STEPS):
        job.step(index)
    state = job.state()
    for key, value in state.items():
        if settled and key.endswith("momentum1"):
            for shard in value.to_local().local_shards():  # type: ignore[attr-defined]
                shard.fill_(1.0)
    facts = RunFacts(layout.world, {}, ["localhost"] * layout.world, "", "", 7, {})
    saver = Saver(RunDir(path).checkpoints, 1, CheckpointConfig(), facts)
    saver.save(STEPS, state, {"applied_updates": job.optimizer.applied})
    digest = full_state_hash(state)
    saver.close()
    return digest, job.step(STEPS)


def load_all(paths: list[Path], layout: Layout) -> list[tuple[str, float]]:
    """Loads each checkpoint into a model of other values; its hash, and the loss of the step after it."""
    found = []
    for path in paths:
        job = Job(layout, seed=8)
        job.step(0)
        job.optimizer.applied = load(path / f"checkpoints/step_{STEPS}.a1", job.state()).position["applied_updates"]
        found.append((full_state_hash(job.state()), job.step(STEPS)))
        _drop_groups()
    return found


def step_of_tables(path: Path, layout: Layout) -> dict[str, torch.Tensor]:
    """By how much the next step moves each table, on rank 0."""
    job = Job(layout, seed=8)
    load(path / f"checkpoints/step_{STEPS}.a1", job.state())
    before = gather_full(job.model.tables.state())
    job.step(STEPS)
    job.model.tables.average()
    after = gather_full(job.model.tables.state())
    return {key: after[key] - before[key] for key in before if key.endswith("weight")}


def _drop_groups() -> None:
    dist.barrier()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def shapes_of_state(kind: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the trainer saves."""
    job = Job(Layout(1), seed=7, tables=kind)
    return {key: tuple(value.shape) for key, value in job.state().items()}


def load_tables_only(path: Path, layout: Layout) -> list[str]:
    """Names of the tensors that `load_some` changed of those that differ from the checkpoint, on rank 0."""
    job = Job(layout, seed=8)
    folder = path / f"checkpoints/step_{STEPS}.a1"
    before = gather_full(job.state())
    keys = [key for key in read(folder).objects if key.startswith("tables.")]
    chosen = load_some(folder, job.state(), keys)
    assert list(chosen.objects) == keys
    after = gather_full(job.state())
    return [key for key, value in after.items() if not torch.equal(value, before[key])]
