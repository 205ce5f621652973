"""Embedding tables on the ranks: `mp_replicate` replicas, each sharded over `mp_shard` ranks by TorchRec's public API
(`sharder.shard`), with the optimizer fused into backward.

Three facts shape this code. TorchRec on gloo needs the same row count, at least one, on every rank, so rows without
ids are appended before the lookup and dropped after it. The tables update inside their backward, so a step looks them
up once, and their backward runs once, after all micro-batches of the dense part. Replicas see different rows, so each
updates with its own rows only, and weights and optimizer state are averaged afterwards (arXiv 2508.03854):

    looked_up = tables(batch, padded_rows)      # exchange inside the group of mp_shard ranks
    tables.backward(looked_up)                  # local update
    tables.sync(step)                           # average over mp_replicate, every `optim.tables.sync_every` steps
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from gemctl.config.schema import TablesOptimConfig
from gemctl.data.batch import Batch
from gemctl.mesh.topology import Topology
from gemctl.model.embeddings import Embedded, Tables, gather, kjt_inputs
from gemctl.model.init import InitRule
from gemctl.parallel.init import Slice, fill
from gemctl.parallel.table_layout import TableLayout
from gemctl.plan.tables import DUMMY, TablePlan
from gemctl.specs.data import FeatureSpec


@dataclass(frozen=True)
class LookedUp:
    """Looked-up embeddings with their graph (`outputs`) and as leaves that collect the dense part's gradients."""

    outputs: Embedded
    leaves: Embedded


class ShardedTables(nn.Module):
    """The model's tables, placed by the plan inside each group of `mp_shard` ranks and replicated over the groups."""

    def __init__(
        self,
        tables: Tables,
        spec: FeatureSpec,
        placements: Mapping[str, TablePlan],
        optim: TablesOptimConfig,
        topology: Topology,
        device: torch.device,
    ) -> None:
        """Shards over the default process group, whose size is the topology's world. Collective."""
        super().__init__()
        self.spec = spec
        self._sync_every = optim.sync_every
        self._replicas = topology.mp_replicate
        self._diverged = False  # an update since the last average
        adagrad = optim.kind == "rowwise_adagrad"
        # AdaGrad's "moment scaling": each replica squares gradients of its own 1/M of the rows, so its sum of squares
        # grows M times too fast, and v/M replaces v. With gradients scaled by M^-1/2 the state itself is v/M, in memory
        # and in checkpoints of any M, and lr·√M gives lr · g / (√(v/M) + eps).
        self._gradient_scale = self._replicas**-0.5 if adagrad else 1.0
        self._lr = optim.lr / self._gradient_scale
        kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD if adagrad else EmbOptimType.EXACT_SGD
        fused = {"optimizer": kind, "learning_rate": self._lr, "eps": optim.eps}
        self._layout = TableLayout.make(topology, placements, device)
        bags, sequences = tables.pooled, tables.sequence
        self.pooled: Any = bags and self._layout.shard(bags, EmbeddingBagCollectionSharder(fused_params=fused))
        self.sequence: Any = sequences and self._layout.shard(sequences, EmbeddingCollectionSharder(fused_params=fused))
        self._replica_group = self._layout.replica_group
        self._storages = _storages(self.state().values()) if self._replicas > 1 else []

    def forward(self, batch: Batch, padded_rows: int) -> LookedUp:
        """Looks up `batch`. Every rank pads to `padded_rows` = max(1, ⌈G/world⌉). Collective over mp_shard."""
        pooled, sequence = kjt_inputs(batch, self.spec, padded_rows)
        # Both lookups are started before either is waited for.
        pooled_out = self.pooled(self._layout.add_dummies(pooled, "pooled")) if pooled is not None else None
        sequence_out = self.sequence(self._layout.add_dummies(sequence, "sequence")) if sequence is not None else None
        outputs = gather(batch, self.spec, pooled_out, sequence_out)
        return LookedUp(outputs, outputs.detached() if torch.is_grad_enabled() else outputs)

    def backward(self, looked_up: LookedUp) -> None:
        """Sends the leaves' gradients through the tables, which updates this replica. Collective over mp_shard.

        The gradients are those of the global loss × world: TorchRec averages them over the group of mp_shard ranks,
        which leaves the gradient of the group's own rows × mp_replicate, so the replicas' average is the global one.
        """
        outputs, gradients = [], []
        for output, leaf in zip(looked_up.outputs.tensors(), looked_up.leaves.tensors(), strict=True):
            outputs.append(output)
            gradients.append(torch.zeros_like(output) if leaf.grad is None else leaf.grad)
        if self._gradient_scale != 1.0:
            torch._foreach_mul_(gradients, self._gradient_scale)
        torch.autograd.backward(outputs, gradients)
        self._diverged = self._replicas > 1

    def sync(self, step: int) -> None:
        """At the end of step `step` (from 0): averages the replicas every `sync_every` steps. Collective."""
        if (step + 1) % self._sync_every == 0:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Averages weights and optimizer state over the replicas, which makes them bit-equal; does nothing if they are.
        Needed before the state is read. Collective over mp_replicate.
        """
        if not self._diverged:
            return
        self._diverged = False
        # A storage holds all tables of one fused kernel: few large messages without a copy to join them.
        nccl = dist.get_backend(self._replica_group) == "nccl"
        kind = dist.ReduceOp.AVG if nccl else dist.ReduceOp.SUM
        works = [dist.all_reduce(flat, kind, self._replica_group, async_op=True) for flat in self._storages]
        for flat, work in zip(self._storages, works, strict=True):
            work.wait()
            if not nccl:
                flat.div_(self._replicas)

    def initialise(self, rules: Mapping[str, InitRule], seed: int) -> None:
        """Fills this rank's shards as a function of (seed, name, global index)."""
        for name, value in self.state().items():
            if name in rules:
                for part in local_slices(value):
                    fill(part, rules[name], seed, name)

    def scale_lr(self, factor: float) -> None:
        """Sets the learning rate of the next backward to `factor` × the configured one."""
        for module in self._modules_present():
            for group in module.fused_optimizer.param_groups:
                group["lr"] = self._lr * factor
            module.fused_optimizer.step()  # passes the rate to FBGEMM; weights are updated in backward only

    def state(self) -> dict[str, Tensor]:
        """Weights under the unsharded model's names; row-wise AdaGrad's `momentum1` of each, whose meaning does not
        depend on the number of replicas. The replicas agree after `average`.
        """
        state: dict[str, Tensor] = {}
        for prefix, module in (("tables.pooled", self.pooled), ("tables.sequence", self.sequence)):
            if module is None:
                continue
            state |= {f"{prefix}.{key}": value for key, value in module.state_dict().items()}
            for parameter, slots in module.fused_optimizer.state_dict()["state"].items():
                for slot, value in slots.items():
                    state[f"optim.{prefix}.{parameter}.{slot.rsplit('.', 1)[-1]}"] = value
        return {key: value for key, value in state.items() if DUMMY not in key}

    def _modules_present(self) -> list[Any]:
        return [module for module in (self.pooled, self.sequence) if module is not None]


def local_slices(value: Tensor) -> list[Slice]:
    """This rank's row blocks of a table's weight or state."""
    local = value.to_local()  # type: ignore[attr-defined]
    # A rank without a shard still has one offset, hence not strict.
    parts = zip(local.local_shards(), local.local_offsets(), strict=False)
    return [Slice(shard, offset[0]) for shard, offset in parts if shard.numel()]


def _storages(values: Iterable[Tensor]) -> list[Tensor]:
    """Flat tensors over the distinct storages of the local parts of `values`."""
    found: dict[int, Tensor] = {}
    for part in (part.tensor for value in values for part in local_slices(value)):
        storage = part.untyped_storage()
        if storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=part.dtype, device=part.device).set_(storage)
    return list(found.values())
