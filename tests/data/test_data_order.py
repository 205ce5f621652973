"""The order of rows: the same for every world, every row once an epoch, few row groups at a time."""

import itertools
import random

import numpy as np
import pytest

from gemctl.data.order import RowOrder, local_counts, local_slice

GROUPS = [20, 20, 20, 20, 20, 3]


@pytest.mark.parametrize("global_batch", [3, 7, 64, 500])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_share_a_batch_equally_and_in_order(global_batch: int, world: int) -> None:
    counts = local_counts(global_batch, world)
    assert sum(counts) == global_batch
    assert max(counts) - min(counts) <= 1
    edges = [0, *np.cumsum(counts)]
    assert [local_slice(global_batch, rank, world) for rank in range(world)] == list(itertools.pairwise(edges))


@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
def test_every_row_comes_once_an_epoch(window: int | None) -> None:
    order = RowOrder(GROUPS, 5, window)
    rows = order.rows(0, 3 * order.epoch_rows)
    for epoch in np.split(rows, 3):
        assert sorted(epoch) == list(range(103))


def test_time_order_is_the_files_order() -> None:
    assert list(RowOrder([2, 3], 0, None).rows(3, 9)) == [3, 4, 0, 1, 2, 3]


def test_the_order_has_no_state() -> None:
    order = RowOrder(GROUPS, 1, 2)
    whole = order.rows(0, 400)
    cuts = [0, 7, 7, 90, 106, 299, 400]
    fresh = [RowOrder(GROUPS, 1, 2).rows(a, b) for a, b in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(fresh), whole)
    assert np.array_equal(order.rows(50, 60), whole[50:60])


def test_seed_and_epoch_change_the_order() -> None:
    first, second = RowOrder(GROUPS, 1, 2).rows(0, 206)[:103], RowOrder(GROUPS, 1, 2).rows(0, 206)[103:]
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, RowOrder(GROUPS, 2, 2).rows(0, 103))


def test_the_order_never_changes_between_versions() -> None:
    # saved runs go on from a step: these numbers may change only with a new format of the position
    assert list(RowOrder([4, 4, 2], 7, 1).rows(0, 12)) == [8, 1, 9, 2, 0, 3, 7, 6, 4, 5, 3, 1]


def test_a_batch_touches_at_most_two_windows() -> None:
    draw = random.Random(0)
    for _ in range(200):
        groups = [draw.choice([1, 5, 20, 20, 20]) for _ in range(draw.randint(1, 30))]
        window = draw.randint(1, 6)
        order = RowOrder(groups, draw.randint(0, 9), window)
        largest = min(order.epoch_rows, window * order.epoch_rows // len(groups))
        starts = [draw.randrange(3 * order.epoch_rows) for _ in range(20)]
        assert all(len(order.windows(start, start + largest)) <= 2 for start in starts)


def test_a_window_holds_few_row_groups() -> None:
    order = RowOrder([20] * 50 + [3], 0, 4)
    touched = {int(row) // 20 for row in order.rows(0, 80)}
    assert len(touched) <= 5
    assert order.groups_of_window(0) == len(touched)


def test_a_window_ends_with_the_row_group_that_fills_it() -> None:
    order = RowOrder([4] * 6, 3, 2)
    assert order.windows(0, 8) == [(0, 0)]
    assert order.windows(7, 9) == [(0, 0), (0, 1)]
    assert order.windows(8, 17) == [(0, 1), (0, 2)]
    assert order.windows(23, 25) == [(0, 2), (1, 0)]
    assert [order.groups_of_window(position) for position in (7, 8, 16, 23)] == [2, 2, 2, 2]
    assert RowOrder([4] * 5, 3, 2).windows(0, 20) == [(0, 0), (0, 1)], "the rest joins the last window"


def test_a_rank_reads_the_rows_of_its_window_alone() -> None:
    order = RowOrder([4] * 6, 3, 2)
    for window in range(3):
        rows = order.rows(8 * window, 8 * (window + 1))
        assert len(set(rows // 4)) == 2
        assert sorted(rows) == sorted(row for group in set(rows // 4) for row in range(4 * group, 4 * group + 4))
