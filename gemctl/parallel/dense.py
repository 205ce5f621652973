"""The dense part under FSDP2: HSDP over dp_replicate × dp_shard, values by global index, one global gradient norm."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from gemctl.config.schema import PrecisionConfig
from gemctl.mesh.topology import Axis, Topology
from gemctl.model.init import InitRule
from gemctl.parallel.experts import EpGroup, expert_modules, placement, shard_experts
from gemctl.parallel.init import Slice, fill
from gemctl.plan.dense import CONTAINERS, UNIT_PARAMETERS


def shard_dense(
    dense: nn.Module,
    topology: Topology,
    precision: PrecisionConfig,
    device: torch.device,
    recompute: Literal["none", "layers"] = "none",
) -> tuple[DeviceMesh, EpGroup | None]:
    """Shards `dense` (on the meta device) in place and allocates its storage, without setting values. Collective.

    Returns its mesh, and the group of its experts if ep > 1. Blocks of ≥ `UNIT_PARAMETERS` are units of their own, and
    with ep > 1 so are modules of experts (`gemctl.parallel.experts`). A unit is prefetched during the one before.
    """
    policy = MixedPrecisionPolicy()
    if precision.dense == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [block for child in dense.children() if isinstance(child, nn.ModuleList) for block in child]
    again = layers if recompute == "layers" else []
    for block in again:
        recompute_in_backward(block)
    modules = expert_modules(dense)
    stacked = {parameter for module in modules for parameter in module.parameters()}
    group = None
    if topology.ep > 1:
        group = shard_experts(modules, topology, policy, device)
        stacked = set()  # of no unit below
    mesh = _mesh(topology, device)

    def cut(parameter: nn.Parameter) -> Shard:
        return placement(parameter, topology) if parameter in stacked else Shard(0)

    for name, child in dense.named_children():
        for block in child.children() if name in CONTAINERS else [child]:
            own = (parameter for parameter in block.parameters() if not isinstance(parameter, DTensor))
            if sum(parameter.numel() for parameter in own) >= UNIT_PARAMETERS:
                fully_shard(block, mesh=mesh, mp_policy=policy, shard_placement_fn=cut)
    fully_shard(dense, mesh=mesh, mp_policy=policy, shard_placement_fn=cut)
    sharded = [module for module in dense.modules() if isinstance(module, FSDPModule)]
    inner = {module for block in again for module in block.modules() if module is not block}
    for unit, following in pairwise(sharded):
        if unit not in inner:  # it would prefetch in backward too, when it is recomputed
            unit.set_modules_to_forward_prefetch([following])
    dense.to_empty(device=device)
    return mesh, group


def recompute_in_backward(block: nn.Module) -> None:
    """Makes `block` keep only its inputs; its backward runs the forward again, collectives included.

    Hooks stay outside, so FSDP2 gathers the weights once for both. Models draw no random numbers.
    """
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def _mesh(topology: Topology, device: torch.device) -> DeviceMesh:
    """dp_replicate × dp_shard without a replicate axis of degree 1; FSDP2 needs dp_shard at any degree."""
    degrees = {Axis.DP_REPLICATE.value: topology.dp_replicate, Axis.DP_SHARD.value: topology.dp_shard}
    axes = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == Axis.DP_SHARD.value}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def initialise_dense(dense: nn.Module, rules: Mapping[str, InitRule], seed: int) -> None:
    """Fills this rank's shards as a function of (seed, name, global index). Rules are named as in the whole model."""
    for name, parameter in dense.named_parameters():
        full_name = f"dense.{name}"
        for part in local_slices(parameter):
            fill(part, rules[full_name], seed, full_name)


def local_slices(value: Tensor) -> list[Slice]:
    """This rank's part of an FSDP2 parameter as slices that are contiguous in the full tensor.

    One slice of rows, or one per expert where FSDP2 cuts dim 1 of stacked experts.
    """
    assert isinstance(value, DTensor)
    local = value.to_local()
    if local.numel() == 0:
        return []
    (box,) = value.__create_chunk_list__()  # DCP's protocol: the part's offsets
    first, *others = box.offsets
    if local.shape[1:] == value.shape[1:]:
        return [Slice(local, first)]
    return [Slice(expert, (first + i) * value.shape[1] + others[0]) for i, expert in enumerate(local)]


def gradient_norm(dense: nn.Module, group: dist.ProcessGroup, replicas: int, others: Sequence[Tensor]) -> float:
    """Global L2 norm of the dense gradients, experts' too, the same on every rank; NaN also if a value of `others` is
    not finite on any rank (the gradients of the tables' outputs, which must not enter the tables). Collective over
    the world; the host waits for its device once. `replicas`: ranks that hold each gradient shard, on either mesh.
    """
    gradients = _local_gradients(dense)
    squares = torch.zeros((), dtype=torch.float64, device=next(dense.parameters()).device)
    if gradients:
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum() / replicas
    for gradient in others:
        squares = torch.where(gradient.isfinite().all(), squares, torch.nan)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(squares, group=group)
    return float(squares.sqrt())


def _local_gradients(dense: nn.Module) -> list[Tensor]:
    gradients = (parameter.grad for parameter in dense.parameters())
    local = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    return [gradient for gradient in local if gradient.numel()]


def sync_gradients(dense: nn.Module, last: bool) -> None:
    """Whether the next backward reduces gradients over the ranks: only the last micro-batch of a step does."""
    if isinstance(dense, FSDPModule):
        dense.set_requires_gradient_sync(last)
