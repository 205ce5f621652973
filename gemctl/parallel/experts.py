"""Expert parallelism: each rank of an `ep` group holds 1/ep of the experts and runs them on the whole group's rows.

Tokens are not routed: activations are gathered over `ep`, local experts compute their part of the output, and a
reduce-scatter sums the parts and gives every rank its own rows back. Backward is the mirror image: gradients of the
outputs are gathered, gradients of the inputs reduce-scattered.

    gemctl train topology=fsdp 'model.layers=[{interaction: {kind: wukong_experts, experts: 4}}]' topology.ep=2

An expert module holds stacked parameters `[E, …]` and an attribute `exchange` (`gemctl.model.experts.Exchange`). Here
dim 0 is cut over `ep` and the rest is sharded by FSDP2 over dp_replicate × expert_shard, so a parameter is a DTensor
of its full shape whatever `ep` is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from gemctl.mesh.topology import EXPERT_SHARD, Axis, Topology
from gemctl.parallel.traffic import ALL_GATHER, REDUCE_SCATTER, along
from gemctl.plan.dense import cut_dim


@dataclass
class _Gathered:
    """A running all-gather: `padded` [ep, most, …] is valid after `wait`."""

    padded: Tensor
    work: dist.Work | None

    def wait(self, rows: Sequence[int]) -> Tensor:
        """[Σ rows, …]: the rows of all ranks, in their order."""
        if self.work is not None:
            self.work.wait()
        if len(set(rows)) == 1:
            return self.padded.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(self.padded, rows, strict=True)])


class EpGroup:
    """The collectives of one rank over its `ep` group, for batches whose row counts may differ from rank to rank.

    Rows are padded to the group's maximum inside the collectives only. Set the counts before each forward: by `expect`
    if they are known, else by `count`, which exchanges them.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh` has an axis `ep`."""
        self.mesh = mesh
        self.group = mesh.get_group(Axis.EP.value)
        self.rank, self.ep = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.rows: Sequence[int] = ()

    def expect(self, rows: Sequence[int]) -> None:
        """Sets the next forward's row counts, by rank of the group."""
        self.rows = rows

    def count(self, own: int) -> None:
        """Exchanges the next forward's row counts over the group. Collective."""
        counts = torch.empty(self.ep, dtype=torch.int64, device=_device(self.group))
        getattr(dist, ALL_GATHER)(counts, counts.new_tensor([own]), group=self.group)
        self.expect(counts.tolist())

    def start(self, x: Tensor, rows: Sequence[int]) -> _Gathered:
        """Starts the all-gather of [B, …]. Collective."""
        if len(x) != rows[self.rank]:
            raise RuntimeError(f"rank {self.rank} of an ep group holds {len(x)} rows, but {rows} were expected")
        most = max(rows)
        own = x.detach().contiguous()
        if len(own) < most:
            own = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
        padded = own.new_empty(self.ep, *own.shape)
        work = None
        if padded.numel():
            with along(Axis.EP.value):
                work = getattr(dist, ALL_GATHER)(padded.flatten(0, 1), own, group=self.group, async_op=True)
        return _Gathered(padded, work)

    def sum_rows(self, y: Tensor, rows: Sequence[int]) -> Tensor:
        """[B_group, …] → [B, …]: the sum over the group of its own rows. Collective."""
        most = max(rows)
        if len(set(rows)) == 1:
            padded = y.contiguous()
        else:
            padded = y.new_zeros(self.ep, most, *y.shape[1:])
            for part, own in zip(padded, y.split(list(rows)), strict=True):
                part[: len(own)] = own
            padded = padded.flatten(0, 1)
        reduced = y.new_empty(most, *y.shape[1:])
        if reduced.numel():
            with along(Axis.EP.value):
                getattr(dist, REDUCE_SCATTER)(reduced, padded, group=self.group)
        return reduced[: rows[self.rank]]


class EpExchange:
    """The ep group as one module of experts uses it (`gemctl.model.experts.Exchange`)."""

    def __init__(self, group: EpGroup, experts: int, dtype: torch.dtype | None) -> None:
        """`experts`: of the whole module; each rank of the group holds experts / ep. `dtype`: its compute format."""
        self.group, self.dtype = group, dtype
        self.first = group.rank * (experts // group.ep)
        self._early: tuple[int, _Gathered] | None = None

    def prefetch(self, x_BND: Tensor) -> None:
        """Starts the all-gather of the leading tokens of the next `gather`'s input. Collective."""
        x_BND = x_BND.to(self.dtype or x_BND.dtype)
        self._early = x_BND.shape[1], self.group.start(x_BND, self.group.rows)

    def gather(self, x_BND: Tensor) -> Tensor:
        """[B, n, D] → [B_group, n, D]. Collective."""
        early, self._early = self._early, None
        gathered: Tensor = _Gather.apply(x_BND, self.group, tuple(self.group.rows), early)
        return gathered

    def reduce_scatter(self, y: Tensor) -> Tensor:
        """[B_group, …] → [B, …]: the sum over the group of its own rows. Collective."""
        reduced: Tensor = _ReduceScatter.apply(y, self.group, tuple(self.group.rows))
        return reduced


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x_BND: Tensor,
        group: EpGroup,
        rows: tuple[int, ...],
        early: tuple[int, _Gathered] | None,
    ) -> Tensor:
        ctx.group, ctx.rows = group, rows  # type: ignore[attr-defined]
        if early is None:
            return group.start(x_BND, rows).wait(rows)
        tokens, leading = early
        if tokens == x_BND.shape[1]:
            return leading.wait(rows)
        late = group.start(x_BND[:, tokens:], rows)
        return torch.cat([leading.wait(rows), late.wait(rows)], dim=1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.sum_rows(gradients[0], ctx.rows), None, None, None  # type: ignore[attr-defined]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, y: Tensor, group: EpGroup, rows: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.rows = group, rows  # type: ignore[attr-defined]
        return group.sum_rows(y, rows)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows = ctx.rows  # type: ignore[attr-defined]
        return ctx.group.start(gradients[0], rows).wait(rows), None, None  # type: ignore[attr-defined]


def _device(group: dist.ProcessGroup) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )


def expert_modules(dense: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are stacked by expert."""
    return [module for module in dense.modules() if hasattr(module, "exchange")]


def shard_experts(
    modules: Sequence[nn.Module], topology: Topology, policy: MixedPrecisionPolicy, device: torch.device
) -> EpGroup:
    """Spreads stacked parameters (on the meta device) over `ep`, shards the rest, and sets the modules' exchange.

    Collective. Every module becomes an FSDP2 unit. Its gradients are already sums over the ep group's rows, so they
    are divided by the world size, not by the number of ranks that reduce them.
    """
    mesh = _expert_mesh(topology, device)
    names = mesh.mesh_dim_names or ()
    data_axes = tuple(name for name in names if name != Axis.EP.value)
    group = EpGroup(mesh)
    for module in modules:
        experts = next(module.parameters()).shape[0]
        _spread(module, mesh[Axis.EP.value])
        fully_shard(
            module, mesh=mesh[data_axes], mp_policy=policy,
            shard_placement_fn=lambda parameter: placement(parameter, topology),
        )  # fmt: skip
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(float(topology.world_size))
        if device.type == "cpu" and topology.expert_shard > 1:
            # gloo has no scaled sum. (With one shard FSDP2 reduces nothing, and this would divide twice.)
            module.set_force_sum_reduction_for_comms(True)
        module.exchange = EpExchange(group, experts, policy.param_dtype)  # type: ignore[assignment]
    return group


def placement(stacked: Tensor, topology: Topology) -> Shard:
    """The dimension of a stacked parameter that FSDP2 shards."""
    local = stacked.to_local() if isinstance(stacked, DTensor) else stacked
    return Shard(cut_dim(tuple(local.shape), topology.expert_shard))


def _expert_mesh(topology: Topology, device: torch.device) -> DeviceMesh:
    """dp_replicate × expert_shard × ep, without axes of degree 1; FSDP2 needs expert_shard at any degree."""
    degrees = {Axis.DP_REPLICATE.value: topology.dp_replicate, EXPERT_SHARD: topology.expert_shard}
    axes = {name: degree for name, degree in degrees.items() if degree > 1 or name == EXPERT_SHARD}
    axes[Axis.EP.value] = topology.ep
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _spread(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces each parameter [E, …] by the DTensor of this rank's E / ep experts."""
    for name, parameter in list(module.named_parameters()):
        owner = module.get_submodule(name.rpartition(".")[0])
        local = torch.empty(parameter.shape[0] // mesh.size(), *parameter.shape[1:], device="meta")
        spread = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(spread))
