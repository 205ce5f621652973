"""Tables in 2D against float64 oracles: exchange in a replica, local updates, averages, kinds, ranks without rows."""

import itertools
from functools import cache

import pytest
import torch

from tests.parallel import table_runs as runs
from tests.parallel import table_scenes as scenes
from tests.parallel.table_runs import Case, Oracle, Trained, train_all
from tests.support.world import run_world

MIXED = ("row_wise", "table_wise", "row_wise")
ON_HOST = ("table_row_wise", "row_wise", "table_wise")
FEW = (5, 2, 3)  # rows: four ranks are too many for each of these tables
FOUR = {
    "SGD, 2 × 2": Case(2, 2, optimizer="sgd"),
    "SGD, replicas alone": Case(4, 1, MIXED, optimizer="sgd"),
    "SGD, ranks without rows": Case(1, 4, optimizer="sgd", rows=FEW),
    "mixed, 2 × 2": Case(2, 2, MIXED),
    "replicas alone": Case(4, 1),
    "ranks without rows": Case(1, 4, rows=FEW),
    "a table on one of two hosts": Case(1, 4, ON_HOST, hosts=2, rows=(2, 41, 7)),
    "a replica on each host": Case(2, 2, ("table_row_wise", "table_wise", "table_row_wise"), hosts=2),
    "an average every 3 steps": Case(2, 2, MIXED, sync_every=3, steps=4),
    "fewer rows than ranks": Case(2, 2, global_batch=3),
    "ranks without a table": Case(2, 2, ("table_wise",) * 3, rows=(2, 90, 2)),
}


@cache
def trained() -> list[dict[str, Trained]]:
    """By rank, then by case."""
    ranks = run_world(4, train_all, list(FOUR.values()), timeout=120)
    return [dict(zip(FOUR, found, strict=True)) for found in ranks]


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """1e-6 of a tensor's largest value (of 1 for small weights): float32 beside float64."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        bound = 1e-6 * max(1.0, float(value.abs().max()))
        assert float((found[key].double() - value).abs().max()) <= bound, key


@pytest.mark.parametrize("name", FOUR)
def test_tables_follow_the_oracle(name: str) -> None:
    """Local step, then average: weights, and sums of squares divided by the number of replicas."""
    found = trained()[0][name]
    assert_close(found.state, Oracle.of(FOUR[name], found.start).run())


def test_sgd_is_exact_to_the_global_batch() -> None:
    """The replicas' average is the step that one process makes with all rows."""
    for name in ("SGD, 2 × 2", "SGD, replicas alone"):
        found = trained()[0][name]
        assert_close(found.state, Oracle.of(Case(1, 1, optimizer="sgd"), found.start).run())


def test_initial_values_do_not_depend_on_the_layout() -> None:
    sizes = list({case.rows for case in FOUR.values()})
    alone = run_world(1, train_all, [Case(1, 1, rows=rows, steps=0) for rows in sizes])[0]
    start = {rows: found.start for rows, found in zip(sizes, alone, strict=True)}
    for name, found in trained()[0].items():
        wanted = start[FOUR[name].rows]
        assert all(torch.equal(value, wanted[key]) for key, value in found.start.items() if key in wanted), name


def test_replicas_are_bit_equal_after_an_average_and_only_then() -> None:
    for name, case in FOUR.items():
        due = case.steps % case.sync_every == 0
        for shard in range(case.shards):
            ranks = [trained()[replica * case.shards + shard][name] for replica in range(case.replicas)]
            assert _all_equal([found.after for found in ranks]), name
            assert _all_equal([found.before for found in ranks]) == (due or not ranks[0].before), name


def _all_equal(parts: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for other in parts[1:] for a, b in zip(parts[0], other, strict=True))


def test_each_replica_saves_its_part() -> None:
    """Every element once, and of a replicated shard no rank more than its share (rounded up to a row a tensor)."""
    for name, case in FOUR.items():
        ranks = [found[name] for found in trained()]
        assert sum(found.saved for found in ranks) == sum(value.numel() for value in ranks[0].state.values()), name
        for found in ranks:
            held = sum(value.numel() for value in found.after)
            assert found.saved <= held / case.replicas + len(found.after) * runs.DIM, name


def test_one_replica_is_torchrecs_1d_bit_for_bit() -> None:
    """The same steps by TorchRec's sharded modules alone, in one group."""
    for same in run_world(4, scenes.beside_torchrec):
        assert same


def test_exchange_stays_within_a_replica_and_averages_between_them() -> None:
    for rank, (exchanged, averaged) in enumerate(run_world(4, scenes.groups_of_a_step, Case(2, 2, MIXED))):
        group = (0, 1) if rank < 2 else (2, 3)
        assert exchanged == {group}
        assert averaged == {(rank % 2, rank % 2 + 2)}
    for exchanged, averaged in run_world(4, scenes.groups_of_a_step, Case(1, 4)):
        assert (exchanged, averaged) == ({(0, 1, 2, 3)}, set())


@pytest.mark.slow
def test_moment_scaling_lets_four_replicas_track_one() -> None:
    """Mean distance of the loss curves over 60 steps of a learnable task; without the scaling AdaGrad's sums grow four
    times too fast and the steps are too short.
    """
    one, scaled, unscaled = run_world(4, scenes.loss_curves, timeout=120)[0]
    assert one[-1] < 0.85 * one[0]
    assert _distance(one, scaled) < 0.02
    assert _distance(one, unscaled) > 2 * _distance(one, scaled)


def _distance(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def test_the_stored_state_keeps_the_step_size_for_any_number_of_replicas() -> None:
    """With the same sums of squares, large beside a step's gradients, a global batch moves every row alike."""
    one, *others = run_world(4, scenes.moves_from_equal_sums)[0]
    for other in others:
        for key, move in one.items():
            assert float(move.abs().max()) > 1e-5
            assert bool(((other[key] - move).abs() <= 0.01 * move.abs() + 1e-7).all()), key


def test_a_run_that_averages_every_3_steps_resumes_on_its_course() -> None:
    """A save averages first, in the run that goes on too; so both take the same steps from there."""
    for same, moved in run_world(4, scenes.resume_between_averages, Case(2, 2, MIXED, sync_every=3, steps=5)):
        assert same and moved


def test_saving_and_evaluating_average_replicas_that_have_diverged() -> None:
    for equal_before, equal_after in run_world(4, scenes.save_between_averages):
        assert not equal_before and equal_after


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_mixes_of_kinds_and_rows_follow_the_oracle() -> None:
    """Every kind for every table, with tables that fill the ranks and that do not, on one and two replicas."""
    kinds = itertools.product(
        ("row_wise", "table_wise", "table_row_wise"),
        ("row_wise", "table_wise"),
        ("row_wise", "table_wise", "table_row_wise"),
    )
    sizes = [(23, 5, 9), (5, 23, 7), (23, 41, 2), (2, 3, 23), (2, 2, 2)]
    cases = [
        Case(replicas, 4, kind, optimizer, rows, hosts=2 * replicas, steps=2)
        for kind in kinds
        for rows in sizes
        for replicas, optimizer in ((1, "rowwise_adagrad"), (2, "rowwise_adagrad"), (1, "sgd"))
    ]
    _follow_the_oracle(cases)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_shapes_of_the_table_mesh_follow_the_oracle() -> None:
    """Every M × N of worlds 2 to 8, averages each step and every second one, batches of fewer rows than ranks."""
    _follow_the_oracle(
        [
            Case(world // shards, shards, kinds, sync_every=every, steps=3, global_batch=rows)
            for world in range(2, 9)
            for shards in range(1, world + 1)
            if world % shards == 0
            for kinds in (("row_wise",) * 3, ("table_wise",) * 3, MIXED)
            for every in (1, 2)
            for rows in (13, 3)
        ]
    )


def _follow_the_oracle(cases: list[Case]) -> None:
    """In batches of 30, world by world."""
    for world, group in itertools.groupby(sorted(cases, key=lambda case: case.world), key=lambda case: case.world):
        waiting = list(group)
        while waiting:
            chosen, waiting = waiting[:30], waiting[30:]
            found = run_world(world, train_all, chosen, timeout=300)[0]
            for case, run in zip(chosen, found, strict=True):
                assert_close(run.state, Oracle.of(case, run.start).run())
