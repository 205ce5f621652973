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
from gemctl.plan.dense import UNIT_PARAMETERS


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


def gradient_norm(dense: nn.Module, group: dist.ProcessGroup, replicas: int, others_finite: bool) -> float:
    """Global L2 norm of the dense gradients, the same on every rank; NaN or inf also where one rank's `others_finite`
    is false (the gradients of the tables' outputs, which must not enter the tables). Collective over the world.
    """
    gradients = _local_gradients(dense)
    squares = torch.zeros((), dtype=torch.float64, device=next(dense.parameters()).device)
    if gradients:
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum() / replicas
    if not others_finite:
        squares = squares + float("nan")
    dist.all_reduce(squares, group=group)
    return float(squares.sqrt())


def scale_gradients(dense: nn.Module, factor: float) -> None:
    """Multiplies this rank's gradient shards in place."""
    gradients = _local_gradients(dense)
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _local_gradients(dense: nn.Module) -> list[Tensor]:
    gradients = (parameter.grad for parameter in dense.parameters())
    local = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    return [gradient for gradient in local if gradient.numel()]


def sync_gradients(dense: nn.Module, last: bool) -> None:
    """Whether the next backward reduces gradients over the ranks: only the last micro-batch of a step does."""
    if isinstance(dense, FSDPModule):
        dense.set_requires_gradient_sync(last)
