"""Examples/s of a whole training step of gem_tiny against the same model on padded batches, in one run.

python -m pytest tests/bench/test_bench_model.py -m slow
"""

from dataclasses import asdict, replace

import pytest

from gemctl.bench import model
from gemctl.bench.results import ModelBench, Race
from gemctl.config.compose import compose, from_yaml, to_yaml
from gemctl.plan.job import spec_of
from tests.support.world import run_world


def measure(text: str, race: Race) -> dict[str, object]:
    """In the preloaded process, which has opened no OpenMP region yet."""
    config = from_yaml(text, "config.yaml")
    return asdict(model.measure(config, spec_of(config), race))


def raced(ranks: int, race: Race, preset: str = "gem_tiny") -> ModelBench:
    topology = ["topology.dp_replicate=1", "topology.dp_shard=auto", f"launcher.ranks_per_node={ranks}"]
    words = [f"model={preset}", *topology, f"train.global_batch={race.rows}"]
    found = run_world(1, measure, to_yaml(compose(None, words, None)), race, gloo=False, timeout=500)[0]
    return ModelBench(**{**found, "race": race})


def test_both_contenders_are_measured_on_two_ranks() -> None:
    found = raced(2, Race(rows=8, longest=9, fill=0.3, threads=1, repeats=2), "gem_nano")
    assert found.ranks == 2 and [len(turns) for turns in found.seconds.values()] == [2, 2]
    assert found.apart < 1e-4 and 0 < found.mfu("padded") < 1
    # Of each rank's two steps' rows the first is the longest.
    assert 2 * 9 <= found.events <= 8 * 9
    assert found.ratio == pytest.approx(found.examples_per_s("jagged") / found.examples_per_s("padded"), rel=0.9)
    for parts in found.parts.values():
        assert parts["dense_forward"] > 0 and parts["tables_backward"] > 0 and parts["optimizer"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "longest", "least"), [(1, 512, 2.0), (2, 512, 2.0), (1, 64, 1.0), (2, 64, 1.0)], ids=str
)
def test_examples_per_second_against_padding(ranks: int, longest: int, least: float) -> None:
    race = Race(rows=64, longest=longest, fill=0.3, threads=2 // ranks, repeats=5)
    found = raced(ranks, race)
    if found.ratio < least:  # other programs on the machine can spoil a race, not two
        found = raced(ranks, replace(race, repeats=9))
    assert found.ratio >= least, f"{found.seconds}"
