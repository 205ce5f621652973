"""Experts over `ep`: the exchange and its gradients against one process; where parameters lie, what they begin as."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gemctl.checkpoint.pieces import layout
from gemctl.mesh.topology import Topology
from gemctl.parallel.experts import EpExchange, EpGroup
from gemctl.plan.dense import Unit, cut_dim, units
from tests.parallel.any_layout import Case, drop_groups, made
from tests.support.full_state import full_state_hash
from tests.support.world import run_world

WORLD, TOKENS, EARLY, OUT, DIM = 3, 4, 3, 2, 5


def rows_of(rank: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, TOKENS, DIM, dtype=torch.float64, generator=generator)


def weights() -> Tensor:
    """One matrix [OUT, TOKENS] an expert; a rank holds one expert."""
    generator = torch.Generator().manual_seed(99)
    return torch.randn(WORLD, OUT, TOKENS, dtype=torch.float64, generator=generator)


def expert(weight: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("on,bnd->bod", weight, x.sin())


COUNTS = [[2, 2, 2], [3, 0, 2], [0, 0, 0]]
PREFETCHED = [None, EARLY, TOKENS]  # tokens; None: and the counts are not known


def exchange_all() -> list[tuple[Tensor, Tensor, Tensor]]:
    group = EpGroup(init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",)))
    return [exchange(group, counts, early) for counts in COUNTS for early in PREFETCHED]


def exchange(group: EpGroup, counts: list[int], prefetched: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs of this rank's rows, gradient of its rows, gradient of its expert) of Σ outputs³ over all ranks."""
    rank = dist.get_rank()
    view = EpExchange(group, experts=WORLD, dtype=None)
    assert view.first == rank
    x = rows_of(rank, counts[rank]).requires_grad_()
    weight = weights()[rank].requires_grad_()
    if prefetched is None:
        group.count(len(x))
        assert list(group.rows) == counts
    else:
        group.expect(counts)
        view.prefetch(x[:, :prefetched])
    made_here = view.reduce_scatter(expert(weight, view.gather(x)))
    made_here.pow(3).sum().backward()
    assert x.grad is not None and weight.grad is not None
    return made_here.detach(), x.grad, weight.grad


def test_outputs_and_gradients_are_those_of_one_process() -> None:
    found = iter(zip(*run_world(WORLD, exchange_all), strict=True))
    for counts in COUNTS:
        parts = [rows_of(rank, count) for rank, count in enumerate(counts)]
        x, weight = torch.cat(parts).requires_grad_(), weights().requires_grad_()
        outputs = sum((expert(part, x) for part in weight), torch.zeros(()))
        outputs.pow(3).sum().backward()
        for _ in PREFETCHED:
            made_there, of_rows, of_experts = zip(*next(found), strict=True)
            torch.testing.assert_close(torch.cat(made_there), outputs.detach())
            torch.testing.assert_close(torch.cat(of_rows), x.grad)
            torch.testing.assert_close(torch.stack(of_experts), weight.grad)


def wrong_rows() -> str:
    group = EpGroup(init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    group.expect([2, 2])
    try:
        EpExchange(group, 2, None).gather(torch.zeros(3, 1, 1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_rows_that_were_not_announced_are_an_error() -> None:
    assert all("holds 3 rows" in message for message in run_world(2, wrong_rows))


TOPOLOGIES = [
    Topology(6, 1, 6, 2, 1, 6, 6),  # two experts over three shards: cut along dim 1, or dim 0 unevenly
    Topology(6, 3, 2, 2, 2, 3, 6),
    Topology(6, 1, 6, 1, 1, 6, 6),
]


def initial(topologies: list[Topology]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The full state's hash after init, and the experts' placements, by topology."""
    found = []
    for topology in topologies:
        model = made(Case(topology)).model
        placed = [
            (name, layout(p))
            for name, p in model.dense.named_parameters()
            if ".interaction.members.0." in name and isinstance(p, DTensor)
        ]
        found.append((full_state_hash(model.state()), placed))
        drop_groups()
    return found


def test_initial_state_is_bit_equal_for_every_ep_and_lies_where_it_should() -> None:
    ((expected, _),) = run_world(1, initial, [Topology(1, 1, 1, 1, 1, 1, 1)])[0]
    found = run_world(6, initial, TOPOLOGIES)[0]
    assert [state for state, _ in found] == [expected] * len(TOPOLOGIES)
    spread, replicated, whole = (dict(placed) for _, placed in found)
    assert len(spread) == 8 and all(place.endswith("ep=2:S(0)") for place in spread.values())
    assert {place.rpartition(" ep=")[0] for place in spread.values()} == {
        "expert_shard=3:S(1)",
        "expert_shard=3:_S(0, 2)",
    }
    assert all(place.startswith("dp_replicate=3:R ") and place.endswith("ep=2:S(0)") for place in replicated.values())
    assert all("ep=" not in place for place in whole.values())


def test_stacked_parameters_are_cut_where_every_shard_has_a_part() -> None:
    assert [cut_dim(shape, shards) for shape, shards in [((4, 6, 2), 2), ((4, 6, 2), 3), ((4, 5), 3), ((4,), 8)]] == [
        0, 1, 0, 0,
    ]  # fmt: skip
    parameters = [("heads.weight", (7, 3)), ("layers.0.interaction.members.0.merge", (4, 6, 5))]
    root, experts = units(parameters, Topology(12, 1, 12, 4, 1, 12, 12), ["layers.0.interaction.members.0"])
    assert (root.shapes, root.shards, root.padded) == (((7, 3),), 12, 3)
    assert experts == Unit("layers.0.interaction.members.0", ((1, 6, 5),), (1,), 3, 4)
    assert (experts.numel, experts.parameters, experts.padded) == (30, 120, 10)
    assert root.held().tolist() == [3] * 7 + [0] * 5 and experts.held().tolist() == [10] * 12
