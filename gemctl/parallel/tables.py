"""Embedding tables over the ranks: TorchRec's sharded modules by `sharder.shard`, row-wise AdaGrad fused in backward.

Two facts shape this file. TorchRec on gloo needs the same row count, at least one, on every rank, so rows without
ids are appended before the lookup and dropped after it; and the tables update inside their backward, so a step looks
them up once, and their backward runs once, after all micro-batches of the dense part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv

from gemctl.config.schema import TablesOptimConfig
from gemctl.data.batch import Batch
from gemctl.model.embeddings import Embedded, Tables, gather, kjt_inputs
from gemctl.model.init import InitRule
from gemctl.parallel.init import Slice, fill
from gemctl.specs.data import FeatureSpec


class TablePlacement(Protocol):
    """What the plan says of one table."""

    @property
    def sharding(self) -> str: ...

    @property
    def rank(self) -> int | None: ...


@dataclass(frozen=True)
class LookedUp:
    """Looked-up embeddings with their graph (`outputs`) and as leaves that collect the dense part's gradients."""

    outputs: Embedded
    leaves: Embedded

    def backward(self) -> None:
        """Sends the leaves' gradients through the tables, which updates them. Collective."""
        outputs, gradients = [], []
        for output, leaf in zip(self.outputs.tensors(), self.leaves.tensors(), strict=True):
            outputs.append(output)
            gradients.append(torch.zeros_like(output) if leaf.grad is None else leaf.grad)
        torch.autograd.backward(outputs, gradients)


class ShardedTables(nn.Module):
    """The model's tables, each row-wise over the group or whole on one rank, as placed by the plan."""

    def __init__(
        self,
        tables: Tables,
        spec: FeatureSpec,
        placements: Mapping[str, TablePlacement],
        optim: TablesOptimConfig,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.lr = optim.lr
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": optim.lr, "eps": optim.eps}
        env = ShardingEnv(dist.get_world_size(group), dist.get_rank(group), group, output_dtensor=True)
        bags, sequences = tables.pooled, tables.sequence
        self.pooled = bags and _shard(bags, EmbeddingBagCollectionSharder(fused_params=fused), placements, env, device)
        self.sequence = sequences and _shard(
            sequences, EmbeddingCollectionSharder(fused_params=fused), placements, env, device
        )

    def forward(self, batch: Batch, stride: int) -> LookedUp:
        """Looks up `batch`. `stride`: rows that every rank pads to, max(1, ⌈G/world⌉). Collective."""
        pooled, sequence = kjt_inputs(batch, self.spec, stride)
        # Both lookups are started before either is waited for.
        pooled_out = self.pooled(pooled) if self.pooled is not None else None
        sequence_out = self.sequence(sequence) if self.sequence is not None else None
        outputs = gather(batch, self.spec, pooled_out, sequence_out)
        return LookedUp(outputs, outputs.detached() if torch.is_grad_enabled() else outputs)

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
                group["lr"] = self.lr * factor
            module.fused_optimizer.step()  # hands the rate to FBGEMM; the weights are updated in backward alone

    def state(self) -> dict[str, Tensor]:
        """Weights under the unsharded model's names; `momentum1` of row-wise AdaGrad beside each."""
        state: dict[str, Tensor] = {}
        for prefix, module in (("tables.pooled", self.pooled), ("tables.sequence", self.sequence)):
            if module is None:
                continue
            state |= {f"{prefix}.{key}": value for key, value in module.state_dict().items()}
            for parameter, slots in module.fused_optimizer.state_dict()["state"].items():
                for slot, value in slots.items():
                    state[f"optim.{prefix}.{parameter}.{slot.rsplit('.', 1)[-1]}"] = value
        return state

    def _modules_present(self) -> list[Any]:
        return [module for module in (self.pooled, self.sequence) if module is not None]


def local_slices(value: Tensor) -> list[Slice]:
    """This rank's row blocks of a table's weight or state."""
    local = value.to_local()  # type: ignore[attr-defined]
    # A rank without a shard still names one offset, hence not strict.
    parts = zip(local.local_shards(), local.local_offsets(), strict=False)
    return [Slice(shard, offset[0]) for shard, offset in parts if shard.numel()]


def _shard(
    module: nn.Module,
    sharder: Any,
    placements: Mapping[str, TablePlacement],
    env: ShardingEnv,
    device: torch.device,
) -> Any:
    configs = module.embedding_bag_configs() if hasattr(module, "embedding_bag_configs") else module.embedding_configs()  # type: ignore[operator]
    generators = {}
    for table in configs:
        placement = placements[table.name]
        if placement.sharding == "row_wise":
            generators[table.name] = row_wise(compute_kernel="fused")
        else:
            generators[table.name] = table_wise(rank=placement.rank, compute_kernel="fused")
    plan = construct_module_sharding_plan(
        module,
        generators,
        sharder=sharder,
        local_size=env.world_size,
        world_size=env.world_size,
        device_type=device.type,
    )
    return sharder.shard(module, plan, env, device)
