"""A seed is a scenario, always the same, and the seeds of a whole run cover every kind of fault there is."""

import random

import pytest

from tests.chaos.damage import FILES, PAIRS
from tests.chaos.deeds import DEEDS
from tests.chaos.layouts import LAYOUTS
from tests.chaos.scenario import KINDS, POINTS, draw
from tests.chaos.suite import COUNT, main


def test_a_seed_is_always_the_same_scenario() -> None:
    state = random.getstate()
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert random.getstate() == state  # and nothing else is drawn from
    assert draw(1).text().startswith("seed 1: kill in a save, checkpoint.keep=1\n  train on ")


def test_a_whole_run_covers_every_kind_of_fault() -> None:
    scenarios = [draw(seed) for seed in range(COUNT)]
    commands = [command for scenario in scenarios for command in scenario.commands]
    plants = [plant for command in commands for plant in command.plants]
    deeds = [deed for command in commands for deed in command.deeds]
    assert COUNT >= 200 and {scenario.kind for scenario in scenarios} == set(KINDS)
    assert {scenario.layout.name for scenario in scenarios} == set(LAYOUTS)
    assert {plant.kind for plant in plants} == {"raise", "hang", "kill", "stop", "disk_full"}
    assert {plant.point for plant in plants if plant.kind == "stop"} == set(POINTS)
    assert {deed.what for deed in deeds} == set(DEEDS)
    assert {one.what for command in commands for one in command.damage} == FILES.keys() | PAIRS.keys()
    assert any(scenario.changed for scenario in scenarios)
    for command in commands:
        ranks = [plant.rank for plant in command.plants] + [deed.rank for deed in command.deeds]
        assert all(rank < LAYOUTS[command.layout].world for rank in ranks)


def test_an_unknown_argument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--seeds", "1"])
    assert "unrecognized arguments" in capsys.readouterr().err
