"""The dense part under FSDP2: HSDP over dp_replicate × dp_shard, values by global index, one global gradient norm."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from gemctl.config.schema import PrecisionConfig
from gemctl.model.init import InitRule
from gemctl.parallel.init import Slice, fill

# A block below this many parameters costs more as a collective of its own than it saves in memory.
UNIT_PARAMETERS = 1 << 20


def shard_dense(dense: nn.Module, mesh: DeviceMesh, precision: PrecisionConfig, device: torch.device) -> None:
    """Shards `dense` (on the meta device) in place and gives it storage; its values are not set yet.

    `mesh` is 1D (dp_shard) or 2D (dp_replicate, dp_shard). Blocks of ≥ `UNIT_PARAMETERS` are gathered alone.
    """
    policy = MixedPrecisionPolicy()
    if precision.dense == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for child in dense.children():
        for block in child if isinstance(child, nn.ModuleList) else [child]:
            if sum(parameter.numel() for parameter in block.parameters()) >= UNIT_PARAMETERS:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(dense, mesh=mesh, mp_policy=policy)
    dense.to_empty(device=device)


def initialise_dense(dense: nn.Module, rules: Mapping[str, InitRule], seed: int) -> None:
    """Fills this rank's shards as a function of (seed, name, global index). Names are those of the whole model."""
    for name, parameter in dense.named_parameters():
        full_name = f"dense.{name}"
        fill(local_slice(parameter), rules[full_name], seed, full_name)


def local_slice(value: Tensor) -> Slice:
    """This rank's rows of an FSDP2 parameter: dim 0 in chunks of ⌈rows/shards⌉, the last ones short or empty."""
    assert isinstance(value, DTensor)
    first_row = 0
    for axis, placement in enumerate(value.placements):
        if isinstance(placement, Shard):
            shards = value.device_mesh.size(axis)
            chunk = -(-value.shape[0] // shards)
            first_row = min(chunk * value.device_mesh.get_local_rank(axis), value.shape[0])
    return Slice(value.to_local(), first_row)


def clip_gradients(dense: nn.Module, shard_group: dist.ProcessGroup, max_norm: float | None) -> Tensor:
    """Global L2 norm of the dense gradients (float64 scalar); scales them in place to at most `max_norm`. Collective."""
    gradients = [parameter.grad.to_local() for parameter in dense.parameters() if parameter.grad is not None]  # type: ignore[attr-defined]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if gradients:
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    else:
        squares = torch.zeros((), dtype=torch.float64, device=next(dense.parameters()).device)
    dist.all_reduce(squares, group=shard_group)
    norm = squares.sqrt()
    if max_norm is not None and gradients and float(norm) > max_norm:
        torch._foreach_mul_(gradients, max_norm / float(norm))
    return norm


def sync_gradients(dense: nn.Module, last: bool) -> None:
    """Whether the next backward reduces gradients over the ranks: only the last micro-batch of a step does."""
    if isinstance(dense, FSDPModule):
        dense.set_requires_gradient_sync(last)
