"""The synthetic click log: hard enough to need the model, by its true probabilities alone; and what is written."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gemctl.commands.data import synthesise
from gemctl.config.schema import DataConfig, SyntheticConfig
from gemctl.data import synthetic
from gemctl.data.loader import eval_batches
from gemctl.data.parquet import ParquetSource
from gemctl.data.synthetic_world import MAX_EVENTS, MIN_EVENTS, ClickWorld, Events
from gemctl.errors import InputError
from gemctl.specs.feature_spec import load, parse

ROWS = 100_000
SMALL = SyntheticConfig(users=50, items=300, rows=2500, eval_rows=500, seed=3)


def entropy(truth: np.ndarray, guess: np.ndarray) -> float:
    """Expected logloss of `guess` where clicks have probability `truth`."""
    return float(-(truth * np.log(guess) + (1 - truth) * np.log1p(-guess)).mean())


def averaged(draws: int, probability: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.mean([probability(generator) for _ in range(draws)], axis=0)


def shuffled_events(events: Events, generator: np.random.Generator) -> Events:
    """The same events in another order: what was done changes places, the times stay."""
    order = np.argsort(generator.random(events.item.shape) + events.present() * 2, axis=1)
    names = ("item", "action", "dwell")
    return replace(events, **{name: np.take_along_axis(getattr(events, name), order, axis=1) for name in names})


def test_the_log_needs_history_user_and_order() -> None:
    world = ClickWorld(5000, 20_000, 0)
    rows = world.impressions(np.arange(ROWS))
    events = world.histories(rows)
    interest = world.interest(rows, events)
    truth = world.click_probability(rows, interest)
    base, best = entropy(truth, np.full(ROWS, truth.mean())), entropy(truth, truth)

    def gap_closed(guess: np.ndarray) -> float:
        return (base - entropy(truth, guess)) / (base - best)

    def other_history(generator: np.random.Generator) -> np.ndarray:
        return world.click_probability(rows, np.roll(interest, generator.integers(ROWS), axis=0))

    def other_user(generator: np.random.Generator) -> np.ndarray:
        return world.click_probability(replace(rows, user=np.roll(rows.user, generator.integers(ROWS))), interest)

    def other_order(generator: np.random.Generator) -> np.ndarray:
        return world.click_probability(rows, world.interest(rows, shuffled_events(events, generator)))

    assert events.length.min() == MIN_EVENTS
    assert 0.75 <= best / base <= 0.85
    assert gap_closed(truth) == pytest.approx(1)
    assert 0.3 <= gap_closed(averaged(20, other_history)) <= 0.60
    assert 0.3 <= gap_closed(averaged(20, other_user)) <= 0.75
    assert 0.3 <= gap_closed(averaged(8, other_order)) <= 0.90


def test_items_follow_zipf() -> None:
    item = ClickWorld(5000, 20_000, 1).impressions(np.arange(ROWS)).item
    expected = np.arange(1, 20_001) ** -1.1
    expected *= ROWS / expected.sum()
    counts = np.bincount(item, minlength=20_000)
    assert np.abs(counts - expected)[:100].max() < 5 * np.sqrt(expected[0])
    assert abs(counts[:1000].sum() - expected[:1000].sum()) < 5 * np.sqrt(ROWS)
    assert np.count_nonzero(counts) > 10_000


def test_a_row_depends_on_nothing_but_seed_and_number() -> None:
    world, numbers = ClickWorld(50, 300, 3), np.array([7, 100_007, 7_000_000])
    rows = world.impressions(np.arange(200))
    alone = world.impressions(numbers[:1])
    some = world.impressions(numbers)
    for wide, place in ((rows, 7), (some, 0)):
        for field in fields(alone):
            assert getattr(wide, field.name)[place] == getattr(alone, field.name)[0]
        for field in fields(Events):
            found = getattr(world.histories(wide), field.name)[place]
            assert np.array_equal(found, getattr(world.histories(alone), field.name)[0])
    assert not np.array_equal(ClickWorld(50, 300, 4).impressions(np.arange(200)).item, rows.item)


def test_events_are_earlier_and_in_order() -> None:
    world = ClickWorld(50, 300, 0)
    rows = world.impressions(np.arange(0, 1_000_000, 997))
    events = world.histories(rows)
    assert (events.time < rows.time[:, None]).all()
    assert (np.diff(events.time, axis=1) > 0).all()
    assert (events.length.min(), events.length.max()) == (MIN_EVENTS, MAX_EVENTS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("synthetic")
    data = DataConfig(
        spec=str(folder / "spec.yaml"),
        train=str(folder / "train.parquet"),
        eval=str(folder / "eval.parquet"),
        synthetic=SMALL,
    )
    assert synthetic.ensure(data)
    return data


def test_the_files_hold_what_the_world_says(written: DataConfig) -> None:
    world, spec = ClickWorld(50, 300, 3), load(written.spec)
    assert written.eval
    rows = world.impressions(np.arange(2500, 3000))
    events = world.histories(rows)
    block = ParquetSource(written.eval, spec).read(np.arange(500))
    probability = world.click_probability(rows, world.interest(rows, events))
    assert np.array_equal(block.fixed["true_probability"], probability.astype(np.float32))
    assert np.array_equal(block.fixed["labels"][:, 0], world.clicks(rows, probability))
    assert np.array_equal(block.fixed["label_mask"][:, 1], block.fixed["labels"][:, 0])
    assert np.array_equal(block.fixed["categorical/item"], rows.item)
    history = block.jagged["sequence/history"]
    assert np.array_equal(history.lengths(), events.length)
    assert np.array_equal(history.values["ids/item"], events.item[events.present()])
    assert np.array_equal(history.values["ids/category"], world.item_category[events.item[events.present()]])
    assert np.allclose(history.values["floats/dwell"], np.log1p(events.dwell[events.present()]))
    ages = (rows.time[:, None] - events.time)[events.present()]
    assert np.array_equal(history.values["ages"], ages)


def test_evaluation_is_later_and_knows_every_id(written: DataConfig) -> None:
    assert written.eval
    train, late = (pq.read_table(path, columns=["time"])["time"].to_numpy() for path in (written.train, written.eval))
    assert (train.size, late.size) == (2500, 500)
    assert train.max() <= late.min()
    assert (np.diff(train) >= 0).all()
    for batch in eval_batches(written, load(written.spec), global_batch=500, rank=0, world=1):
        assert set(batch.unknown_ids.values()) == {0}
        assert 0 < batch.labels[:, 1].sum() < batch.labels[:, 0].sum() < 500


def test_clicks_come_with_their_probability() -> None:
    world = ClickWorld(5000, 20_000, 0)
    rows = world.impressions(np.arange(40_000))
    probability = world.click_probability(rows, world.interest(rows, world.histories(rows)))
    clicks = world.clicks(rows, probability)
    for part in np.array_split(np.argsort(probability), 8):
        sigma = np.sqrt((probability[part] * (1 - probability[part])).sum())
        assert abs(clicks[part].sum() - probability[part].sum()) < 4 * sigma


def test_files_are_made_once(written: DataConfig) -> None:
    made = Path(str(written.train)).stat().st_mtime_ns
    assert not synthetic.ensure(written)
    assert Path(str(written.train)).stat().st_mtime_ns == made


def test_other_settings_are_refused_by_name(written: DataConfig) -> None:
    other = replace(written, synthetic=replace(SMALL, rows=10, seed=4))
    with pytest.raises(InputError) as error:
        synthetic.ensure(other)
    assert error.value.problems == [
        f"{path}: was written with rows 2500, not 10, seed 3, not 4: delete it, or set data.synthetic=null to "
        "train on it"
        for path in (written.train, written.eval)
    ]


def test_a_file_of_the_users_own_is_never_overwritten(tmp_path: Path, written: DataConfig) -> None:
    own = tmp_path / "own.parquet"
    pq.write_table(pq.read_table(written.train).replace_schema_metadata(None), own)
    with pytest.raises(InputError, match="exists and is not a synthetic log"):
        synthetic.ensure(replace(written, train=str(own)))


def test_sizes_from_the_command_line_are_checked_and_used(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        synthesise(str(tmp_path), {"rows": 0, "users": -1})
    assert [problem.split(":")[0] for problem in error.value.problems] == ["--users", "--rows"]
    log = synthesise(str(tmp_path), {"rows": 30, "eval_rows": 5, "users": 9, "items": 99, "seed": 1})
    assert pq.read_metadata(log.files["train"]).num_rows == 30
    assert log.settings == {"users": 9, "items": 99, "rows": 30, "eval_rows": 5, "seed": 1}


def test_the_default_log_has_the_size_that_the_design_asks_for() -> None:
    config = SyntheticConfig()
    assert (config.users >= 5000, config.items >= 20_000) == (True, True)
    tables = {table.name: table.rows for table in parse(synthetic.spec_text(config), "spec").tables}
    assert (tables["user"], tables["item"]) == (config.users + 1, config.items + 1)
