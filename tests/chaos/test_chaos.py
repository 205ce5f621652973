"""Forty scenarios of `make chaos`, covering every kind, and proofs that the suite detects what is wrong."""

import re
import sys
from pathlib import Path

import pytest

from tests.chaos import proofs, suite
from tests.chaos.layouts import STEPS
from tests.chaos.scenario import KINDS, draw
from tests.support.world import run_world

SEEDS = range(40)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the states of undisturbed runs."""
    path = tmp_path_factory.mktemp("chaos")
    run_world(1, proofs.references, path, gloo=False, timeout=200)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_run_comes_to_its_state(kind: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = [seed for seed in SEEDS if draw(seed).kind == kind]
    outcomes: list[suite.Outcome] = run_world(1, proofs.outcomes, root, seeds, gloo=False, timeout=450)[0]
    with capsys.disabled():
        sys.stdout.write("".join(f"\n{outcome.report()}" for outcome in outcomes))
    assert {outcome.seed for outcome in outcomes} == set(seeds)
    assert not [outcome.report() for outcome in outcomes if outcome.end == suite.BAD]


def test_the_suite_objects_to_what_is_wrong(root: Path) -> None:
    said: dict[str, list[str]] = run_world(1, proofs.objections, root, gloo=False, timeout=300)[0]
    assert said["nothing"] == []
    assert said["another state"] and all(" of its norm" in line for line in said["another state"])
    assert "the position is" in said["an earlier state"][0]
    assert any("outlived its command" in line for line in said["an orphan"])
    (lost,) = said["a lost checkpoint"]  # of the first attempt, if it was killed late
    assert re.fullmatch(rf"step_{STEPS - 2}\.a[12] was published and is gone", lost)
    assert any(
        re.search("from step 2, though step [46] was published", line) for line in said["a passed over checkpoint"]
    )
    assert any(re.search("from zero, though .* had been published", line) for line in said["a start from zero"])
    assert any("ran for more than 4 s" in line for line in said["a hang"])
    assert any("ended with a traceback: ValueError: planted" in line for line in said["a traceback"])


def test_what_was_found_stays_right(root: Path) -> None:
    said: dict[str, list[str]] = run_world(1, proofs.replay, root, gloo=False, timeout=300)[0]
    assert said == {name: [] for name in proofs.FOUND}
