"""Saving and loading over real worlds: bit-equal, at the moment of the save, next to training's own collectives."""

from pathlib import Path

import pytest

from gemctl.checkpoint.hash import full_state_hash
from gemctl.checkpoint.load import load
from gemctl.checkpoint.save import Saver
from gemctl.run.manifest import verify
from tests.recovery.checkpoint_world import Trainee, facts, make_run
from tests.world import run_world


def _save_and_go_on(path: Path) -> tuple[str, list[float]]:
    """Two steps, save, and while it uploads two more; returns the hash at the save and the later losses."""
    saver = Saver(make_run(path, 0).checkpoints, 1, 3, facts())
    trainee = Trainee(5)
    for number in range(2):
        trainee.step(number)
    digest = full_state_hash(trainee.state())
    saver.save(2, trainee.state(), {"rows": 64})
    losses = [trainee.step(number) for number in range(2, 4)]
    saver.close()
    return digest, losses


def _load_and_go_on(path: Path) -> tuple[str, list[float]]:
    trainee = Trainee(6)
    trainee.step(0)  # AdamW has state, and other values, before the load
    position = load(path / "checkpoints/step_2.a1", trainee.state()).position
    assert position == {"rows": 64}
    digest = full_state_hash(trainee.state())
    return digest, [trainee.step(number) for number in range(2, 4)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_load_restores_every_bit_and_the_next_steps(world: int, tmp_path: Path) -> None:
    make_run(tmp_path)
    saved = run_world(world, _save_and_go_on, tmp_path)
    loaded = run_world(world, _load_and_go_on, tmp_path)
    assert loaded == saved
    assert len({digest for digest, _ in saved}) == 1
    assert verify(tmp_path / "checkpoints/step_2.a1") == []


def test_a_checkpoint_loads_in_another_world(tmp_path: Path) -> None:
    make_run(tmp_path)
    saved = run_world(4, _save_and_go_on, tmp_path)
    for world in (1, 3):
        assert run_world(world, _load_and_go_on, tmp_path)[0][0] == saved[0][0]
