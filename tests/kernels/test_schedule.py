"""The tile schedule, interpreted: exactly the tiles that exist, and an order whose greedy dealing is balanced."""

import heapq
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gemctl.kernels.triton_launch import FAR
from gemctl.kernels.visibility import visible
from tests.kernels import cases, interpreted
from tests.support.world import run_world

HEIGHT, BLOCK = 128, 64
MULTIPROCESSORS, HEADS = 132, 4
Tile = tuple[int, int]  # sequence, number of the tile in it


def batches() -> dict[str, tuple[list[int], int]]:
    """(lengths, how far a row sees ahead): several uniform batches, one causal, one where one row has most of it."""
    generator = torch.Generator().manual_seed(0)

    def uniform(rows: int, longest: int) -> list[int]:
        return torch.randint(0, longest + 1, (rows,), generator=generator).tolist()

    return {
        "uniform": (uniform(300, 2048), FAR),
        "short": (uniform(700, 256), FAR),
        "few": (uniform(100, 700), FAR),
        "causal": (uniform(150, 2048), 0),
        "skewed": ([10_000, *uniform(2200, 130)], FAR),
    }


def built(lengths: list[int], other: list[int], height: int, behind: int, ahead: int) -> list[Tile]:
    """The schedule of one batch, from the kernels."""
    interpreted.start()
    from gemctl.kernels import schedule  # noqa: PLC0415

    order = schedule.tiles(cases.offsets(lengths), sum(lengths), height, cases.offsets(other), behind, ahead)
    assert order.shape[0] == sum(lengths) // height + len(lengths)
    return _listed(order)


def _listed(order: Tensor) -> list[Tile]:
    """The tiles of a table; only −1 comes behind them."""
    found = [(item >> 32, item & 0x7FFFFFFF) for item in order.tolist() if item >= 0]
    assert (order[len(found) :] == -1).all()
    return found


def all_built() -> dict[str, list[Tile]]:
    return {name: built(lengths, lengths, HEIGHT, FAR, ahead) for name, (lengths, ahead) in batches().items()}


@pytest.fixture(scope="module")
def orders() -> dict[str, list[Tile]]:
    found: dict[str, list[Tile]] = run_world(1, all_built, timeout=100, gloo=False)[0]
    return found


def blocks(lengths: list[int], tile: Tile, ahead: int) -> int:
    """Blocks of keys that a tile of a self-attention batch visits."""
    length = lengths[tile[0]]
    last = min(length, (tile[1] + 1) * HEIGHT)
    return -(-(last if ahead == 0 else length) // BLOCK)


def greedy(loads: list[int]) -> list[int]:
    """Loads of the multiprocessors when whichever is free takes the next tile, all heads of it one after another."""
    heap = [0] * MULTIPROCESSORS
    for load in loads:
        for _ in range(HEADS):
            heapq.heapreplace(heap, heap[0] + load)
    return heap


def zigzag(loads: list[int]) -> list[int]:
    """The same, dealt out in advance to and fro."""
    dealt = [0] * MULTIPROCESSORS
    for index, load in enumerate(load for load in loads for _ in range(HEADS)):
        cycle, place = divmod(index, MULTIPROCESSORS)
        dealt[place if cycle % 2 == 0 else MULTIPROCESSORS - 1 - place] += load
    return dealt


@pytest.mark.parametrize("name", batches())
def test_lists_every_tile_once_longest_first(name: str, orders: dict[str, list[Tile]]) -> None:
    lengths, ahead = batches()[name]
    every = {(b, m) for b, length in enumerate(lengths) for m in range(-(-length // HEIGHT))}
    assert len(orders[name]) == len(every)
    assert set(orders[name]) == every
    loads = [blocks(lengths, tile, ahead) for tile in orders[name]]
    # Lengths are sorted by class: exactly up to 32 blocks, to a sixteenth above.
    assert all(b <= a if a <= 32 else b <= a * 17 / 16 for a, b in pairwise(loads))


@pytest.mark.parametrize("name", batches())
def test_balance(name: str, orders: dict[str, list[Tile]]) -> None:
    lengths, ahead = batches()[name]
    loads = [blocks(lengths, tile, ahead) for tile in orders[name]]
    dealt, ideal = greedy(loads), greedy(sorted(loads, reverse=True))
    assert max(dealt) <= 1.01 * max(ideal)
    if len(loads) * HEADS >= 24 * MULTIPROCESSORS:
        assert max(dealt) <= 1.02 * sum(dealt) / MULTIPROCESSORS


def test_zigzag_is_as_good_on_some_batches_and_worse_on_others(orders: dict[str, list[Tile]]) -> None:
    """Why tiles are not dealt out in advance."""
    worse = {}
    for name, (lengths, ahead) in batches().items():
        loads = [blocks(lengths, tile, ahead) for tile in orders[name]]
        worse[name] = max(zigzag(loads)) / max(greedy(loads))
    assert worse["uniform"] <= 1.01
    assert worse["causal"] > 1.01
    assert worse["skewed"] >= 1.1


def small_orders() -> list[list[Tile]]:
    """Other sides and reaches, and the keys' side, in the order of `test_reach`."""
    found = []
    for behind, ahead in ((FAR, FAR), (3, 3), (FAR, 0), (0, 0), (5, 0)):
        found.append(built([3, 0, 40, 7, 33], [8, 4, 20, 0, 33], 16, behind, ahead))
    return found


def test_reach() -> None:
    """Tiles that see nothing come last but are there: their output has to be written."""
    lengths, other = [3, 0, 40, 7, 33], [8, 4, 20, 0, 33]
    (orders,) = run_world(1, small_orders, gloo=False)
    reaches: list[dict[str, object]] = [
        {},
        {"window": 3},
        {"causal": True},
        {"window": 0},
        {"window": 5, "causal": True},
    ]
    for order, options in zip(orders, reaches, strict=True):
        assert sorted(order) == [(0, 0), (2, 0), (2, 1), (2, 2), (3, 0), (4, 0), (4, 1), (4, 2)]
        sees = [
            bool(visible(lengths[b], other[b], **options)[m * 16 : (m + 1) * 16].any())  # type: ignore[arg-type]
            for b, m in order
        ]
        assert sees == sorted(sees, reverse=True), options


def several() -> list[list[Tile]]:
    """Three tables made together: of queries in two heights, of keys."""
    interpreted.start()
    from gemctl.kernels import schedule  # noqa: PLC0415
    from gemctl.kernels.tables import Table  # noqa: PLC0415

    tables = Table(False, 4, 4, FAR, FAR), Table(False, 8, 16, FAR, 0), Table(True, 2, 4, 0, FAR)
    q_offsets, k_offsets = cases.offsets(SIDES[0]), cases.offsets(SIDES[1])
    orders = schedule.build(tables, q_offsets, k_offsets, sum(SIDES[0]), sum(SIDES[1]))
    assert [len(order) for order in orders] == [
        table.length(sum(SIDES[0]), sum(SIDES[1]), len(SIDES[0])) for table in tables
    ]
    return [_listed(order[: len(order) - 1]) for order in orders]


SIDES = [3, 0, 900, 7], [8, 4, 600, 0]


def test_several_tables_at_once() -> None:
    """Each has its own tiles, in its own order, although two launches make all."""
    (orders,) = run_world(1, several, gloo=False)
    for order, lengths, height in zip(orders, (SIDES[0], SIDES[0], SIDES[1]), (4, 8, 2), strict=True):
        assert sorted(order) == [(b, m) for b, length in enumerate(lengths) for m in range(-(-length // height))]
    causal, keys = orders[1].index, orders[2].index
    assert orders[0][0] == (2, 0)
    assert causal((2, 112)) < causal((2, 60)) < causal((2, 0))  # later queries see more keys
    assert keys((2, 0)) < keys((2, 150)) < keys((2, 299))  # later keys are seen by fewer queries
