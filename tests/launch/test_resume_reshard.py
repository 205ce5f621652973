"""A checkpoint of any world, topology and table sharding loads in any other: every bit of the full state, experts and
optimizer state included, and the loss of the step after it."""

from pathlib import Path

import pytest
import torch

from tests.checkpoint.checkpoint_world import make_run
from tests.checkpoint.resharding import Layout, load_all, save_trained, step_of_tables
from tests.support.world import run_world

LAYOUTS = [
    Layout(1),
    Layout(2),
    Layout(2, dp_replicate=2, mp_replicate=2),
    Layout(3, tables="table_wise"),
    Layout(4, dp_replicate=2, ep=2, mp_replicate=2, tables="mixed"),
    Layout(4, ep=4, tables="table_wise"),
    Layout(6, dp_replicate=2, mp_replicate=2, tables="table_wise"),
    Layout(6, dp_replicate=3, ep=2, tables="mixed"),
]


def test_a_checkpoint_of_four_ranks_loads_on_three(tmp_path: Path) -> None:
    """Tables row-wise and table-wise in two replicas, then all of them table-wise in one."""
    path = make_run(tmp_path).path
    digest, loss = run_world(4, save_trained, path, LAYOUTS[4])[0]
    loaded, next_loss = run_world(3, load_all, [path], LAYOUTS[3])[0][0]
    assert loaded == digest
    assert next_loss == pytest.approx(loss, rel=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, tuple[str, float]]]:
    """A run for each layout, with the hash of the full state that it saved and its next loss."""
    found = []
    for layout in LAYOUTS:
        path = make_run(tmp_path_factory.mktemp("runs")).path
        results = run_world(layout.world, save_trained, path, layout)
        assert results == [results[0]] * layout.world
        found.append((path, results[0]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_checkpoint_loads_on_every_layout(saved: list[tuple[Path, tuple[str, float]]], layout: Layout) -> None:
    """The hashes are equal; the loss is within 1e-6 of it, as other worlds add the rows' losses in another order."""
    paths = [path for path, _ in saved]
    for results in run_world(layout.world, load_all, paths, layout):
        for (digest, loss), (other, (expected, next_loss)) in zip(results, saved, strict=True):
            assert digest == expected, other
            assert loss == pytest.approx(next_loss, rel=1e-6), other
    assert len({digest for _, (digest, _) in saved}) > 1  # replicas of tables train in a way of their own


@pytest.mark.slow
def test_table_replicas_keep_their_step_size(tmp_path: Path) -> None:
    """Saved with two replicas, loaded with one and four. The AdaGrad state is 1 by then, so that the new gradients
    hardly count in it; a state that grew with the replicas would change the step by √2."""
    path = make_run(tmp_path).path
    run_world(2, save_trained, path, Layout(2, mp_replicate=2), True)
    moves = [
        run_world(layout.world, step_of_tables, path, layout)[0]
        for layout in (Layout(2, mp_replicate=2), Layout(1), Layout(4, mp_replicate=4), Layout(4, mp_replicate=2))
    ]
    for move in moves[1:]:
        for key, expected in moves[0].items():
            assert torch.linalg.norm(expected) > 0
            assert torch.linalg.norm(move[key] - expected) < 0.01 * torch.linalg.norm(expected), key
