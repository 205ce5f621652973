"""The tables of the small model alone, trained under any layout, and their oracle in float64; no pytest here.

The loss is the sum of the sines of everything that is looked up, so every row's gradient is its own function. The
oracle is written from the published semantics: each replica of the tables steps on its own rows, with gradients
M times those of the global loss, and then weights and sums of squares are averaged; row-wise AdaGrad with moment
scaling divides by √(v/M) + eps (arXiv 2508.03854).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torchrec.distributed import comm

from gemctl.checkpoint.pieces import state_pieces
from gemctl.config.schema import Config, TablesOptimConfig, TopologyConfig
from gemctl.data.batch import Batch, Jagged
from gemctl.mesh.topology import Topology
from gemctl.model.embeddings import Tables
from gemctl.model.init import InitRule
from gemctl.parallel.tables import ShardedTables, local_slices
from gemctl.plan.tables import place
from gemctl.specs.data import FeatureSpec, TableSpec
from tests.support.full_state import gather_full
from tests.support.small import SPEC, local_batch, small_config

NAMES = ("user", "item", "tag")  # item is looked up by events, the others pooled
LR, DIM, ROWS = 0.02, 8, 13
POOLED, SEQUENCE = "tables.pooled.embedding_bags", "tables.sequence.embeddings"


@dataclass(frozen=True)
class Case:
    """A layout of the three tables. `rows` and `kinds` in the order of NAMES; `hosts`: of the world."""

    replicas: int
    shards: int
    kinds: tuple[str, str, str] = ("row_wise", "row_wise", "row_wise")
    optimizer: str = "rowwise_adagrad"
    rows: tuple[int, int, int] = (23, 41, 7)
    hosts: int = 1
    sync_every: int = 1
    steps: int = 4
    global_batch: int = ROWS

    @property
    def world(self) -> int:
        return self.replicas * self.shards

    @property
    def spec(self) -> FeatureSpec:
        return replace(SPEC, tables=[TableSpec(name, rows) for name, rows in zip(NAMES, self.rows, strict=True)])

    @property
    def topology(self) -> Topology:
        return Topology(self.world, 1, self.world, 1, self.replicas, self.shards, self.world // self.hosts)

    @property
    def config(self) -> Config:
        config = small_config()
        config.topology = TopologyConfig(tables=dict(zip(NAMES, self.kinds, strict=True)))  # type: ignore[arg-type]
        config.optim.tables = TablesOptimConfig(
            kind=self.optimizer,  # type: ignore[arg-type]
            lr=LR,
            sync_every=self.sync_every,
        )
        return config

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """This rank's rows of a global batch; ids wrapped to the tables' rows."""
        batch = local_batch(step, self.global_batch, rank, world)
        rows = dict(zip(NAMES, self.rows, strict=True))
        for feature in SPEC.categorical:
            batch.categorical[feature.name].values.remainder_(rows[feature.table])
        batch.sequences["history"].ids["item"].remainder_(rows["item"])
        return batch


@dataclass
class Trained:
    """On rank 0 the full state (weights, sums of squares) at the start, and at the end once the replicas are averaged;
    on every rank what it holds before and after that average, and how many elements of it it would save.
    """

    start: dict[str, Tensor]
    state: dict[str, Tensor]
    before: list[Tensor]
    after: list[Tensor]
    saved: int


def made(case: Case) -> ShardedTables:
    """The case's tables on this world, values set by seed 3."""
    with torch.device("meta"):
        tables = Tables(case.spec, DIM)
    config = case.config
    placements = place(case.spec, config, case.topology)
    sharded = ShardedTables(tables, case.spec, placements, config.optim.tables, case.topology, torch.device("cpu"))
    rules = {key: InitRule("uniform", 0.3) for key in sharded.state() if not key.startswith("optim.")}
    gathered: list[dict[str, InitRule]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, rules)  # a rank without rows of a table may not know it
    sharded.initialise({key: rule for part in gathered for key, rule in part.items()}, 3)
    return sharded


def take_step(tables: ShardedTables, case: Case, step: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    looked_up = tables(case.batch(step, rank, world), max(1, -(-case.global_batch // world)))
    total = sum((leaf.sin().sum() for leaf in looked_up.leaves.tensors()), torch.zeros(()))
    (total * world).backward()
    tables.backward(looked_up)
    tables.sync(step)


def train(case: Case) -> Trained:
    tables = made(case)
    start = gather_full(tables.state())
    for step in range(case.steps):
        take_step(tables, case, step)
    before = local_values(tables)
    tables.average()
    saved = sum(piece.tensor.numel() for pieces in state_pieces(tables.state()).values() for piece in pieces)
    return Trained(start, gather_full(tables.state()), before, local_values(tables), saved)


def local_values(tables: ShardedTables) -> list[Tensor]:
    """Copies of what this rank holds of the tables."""
    return [part.tensor.clone() for value in tables.state().values() for part in local_slices(value)]


def train_all(cases: Sequence[Case]) -> list[Trained]:
    """The cases one after the other in one world."""
    found = []
    for case in cases:
        found.append(train(case))
        drop_groups()
    return found


def drop_groups() -> None:
    """Destroys every process group but the default one, those that TorchRec keeps for tables on hosts too."""
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    comm._INTRA_PG_2D = comm._CROSS_PG_2D = None


@dataclass
class Oracle:
    """The published semantics on whole float64 tables, one copy a replica."""

    case: Case
    weights: list[dict[str, Tensor]]  # by replica, by table
    squares: list[dict[str, Tensor]]

    @staticmethod
    def of(case: Case, start: dict[str, Tensor]) -> "Oracle":
        """From the full initial state."""
        names = range(case.replicas)
        weights = [{name: start[key_of(name)].double() for name in NAMES} for _ in names]
        return Oracle(case, weights, [{name: torch.zeros(len(w[name])).double() for name in NAMES} for w in weights])

    def run(self) -> dict[str, Tensor]:
        """The full state after the case's steps; sums of squares divided by the number of replicas."""
        for step in range(self.case.steps):
            for replica in range(self.case.replicas):
                self._local_step(step, replica)
            if (step + 1) % self.case.sync_every == 0:
                self.average()
        self.average()
        state = {key_of(name): self.weights[0][name] for name in NAMES}
        if self.case.optimizer == "rowwise_adagrad":
            state |= {f"optim.{key_of(name)}.momentum1": self.squares[0][name] / self.case.replicas for name in NAMES}
        return state

    def average(self) -> None:
        for parts in (self.weights, self.squares):
            for name in NAMES:
                mean = torch.stack([part[name] for part in parts]).mean(0)
                for part in parts:
                    part[name] = mean.clone()

    def _local_step(self, step: int, replica: int) -> None:
        case, weights = self.case, self.weights[replica]
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        ranks = range(replica * case.shards, (replica + 1) * case.shards)
        torch.stack([_loss(leaves, case.batch(step, rank, case.world)) for rank in ranks]).sum().backward()
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            gradient = leaf.grad * case.replicas
            if case.optimizer == "sgd":
                weights[name] = weights[name] - LR * gradient
                continue
            squares = self.squares[replica][name]
            squares += gradient.square().mean(1)
            weights[name] = weights[name] - LR * gradient / ((squares / case.replicas).sqrt() + 1e-8)[:, None]


def _loss(tables: dict[str, Tensor], batch: Batch) -> Tensor:
    ids = {name: jagged.values for name, jagged in batch.categorical.items()}
    total = tables["user"][ids["user"]].sin().sum() + tables["item"][ids["candidate"]].sin().sum()
    total = total + tables["item"][batch.sequences["history"].ids["item"]].sin().sum()
    return total + _pool(tables["tag"][ids["tags"]], batch.categorical["tags"]).sin().sum()


def _pool(rows: Tensor, jagged: Jagged) -> Tensor:
    owner = torch.repeat_interleave(torch.arange(len(jagged.offsets) - 1), jagged.offsets.diff())
    return torch.zeros(len(jagged.offsets) - 1, DIM, dtype=rows.dtype).index_add(0, owner, rows)


def key_of(name: str) -> str:
    """A table's key in a state."""
    return f"{SEQUENCE if name == 'item' else POOLED}.{name}.weight"
