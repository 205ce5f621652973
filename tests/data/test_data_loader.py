"""Batches: the same for every world, resumable at any step, read ahead by a thread that ends and reports."""

import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from gemctl.config.schema import DataConfig
from gemctl.data import parquet
from gemctl.data.batch import Batch
from gemctl.data.decode import Place
from gemctl.data.loader import Loader, eval_batches
from gemctl.data.rows import RowBlock
from gemctl.errors import InputError
from gemctl.specs.data import FeatureSpec
from tests.data.test_data_reader import columns, set_row, spec, write
from tests.support.world import run_world


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    path = str(write(tmp_path / "rows.parquet", columns()))
    return DataConfig(spec="unused", train=path, eval=path, window=2)


def first(data: DataConfig, steps: int, *, rank: int = 0, world: int = 1, start: int = 0, size: int = 7) -> list[Batch]:
    loader = Loader(data, spec(), global_batch=size, seed=3, rank=rank, world=world, start_step=start)
    try:
        found = [next(loader) for _ in range(steps)]
    finally:
        loader.close()
    assert [step for step, _ in found] == list(range(start, start + steps))
    return [batch for _, batch in found]


def flat(batches: list[Batch]) -> dict[str, list[float]]:
    """Everything in the batches, laid behind each other in order."""
    clicks = [batch.sequences["clicks"] for batch in batches]
    tensors = {
        "rows": [batch.rows for batch in batches],
        "dense": [batch.dense for batch in batches],
        "labels": [batch.labels for batch in batches],
        "label_mask": [batch.label_mask for batch in batches],
        "weight": [batch.weight for batch in batches],
        "domain": [batch.domain for batch in batches],
        "words": [batch.categorical["words"].values for batch in batches],
        "word_counts": [batch.categorical["words"].offsets.diff() for batch in batches],
        "item": [batch.categorical["item"].values for batch in batches],
        "events": [sequence.ids["item"] for sequence in clicks],
        "dwell": [sequence.floats["dwell"] for sequence in clicks],
        "ages": [sequence.ages for sequence in clicks],
        "event_counts": [sequence.offsets.diff() for sequence in clicks],
    }
    return {name: torch.cat(values).tolist() for name, values in tensors.items()}


@pytest.mark.parametrize("order", ["time", "shuffled"])
@pytest.mark.parametrize("size", [3, 7, 200])
def test_ranks_of_any_world_hold_the_batch_of_one_process(data: DataConfig, order: str, size: int) -> None:
    data.order, data.prefetch = order, 0  # type: ignore[assignment]
    steps = 260 // size  # past the end of the first epoch
    alone = first(data, steps, size=size)
    for world in (2, 3, 4):
        ranks = [first(data, steps, rank=rank, world=world, size=size) for rank in range(world)]
        for step, batch in enumerate(alone):
            parts = [batches[step] for batches in ranks]
            assert flat(parts) == flat([batch])
            unknown = {table: sum(part.unknown_ids[table] for part in parts) for table in batch.unknown_ids}
            assert unknown == batch.unknown_ids


def test_unknown_ids_are_counted_by_table(data: DataConfig) -> None:
    rows = columns()
    batch = first(data, 1, size=90)[0]
    items = [*rows["item"], *(item for items in rows["h_item"] for item in items[-4:])]
    assert batch.unknown_ids == {
        "item": sum(item is None or not 0 <= item < 39 for item in items),
        "code": sum(code is None for code in rows["code"]),
        "word": sum(word is None for words in rows["words"] for word in words or []),
    }


def test_a_later_start_goes_on_exactly(data: DataConfig) -> None:
    assert flat(first(data, 15)[9:]) == flat(first(data, 6, start=9))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_reading_ahead_changes_nothing(data: DataConfig, prefetch: int) -> None:
    data.prefetch = 0
    alone = flat(first(data, 20))
    data.prefetch = prefetch
    assert flat(first(data, 20)) == alone


def test_the_thread_ends_with_close(data: DataConfig) -> None:
    before = threading.active_count()
    loader = Loader(data, spec(), global_batch=7, seed=0, rank=0, world=1)
    next(loader)
    assert loader.epoch_rows == 90
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_broken_row_fails_the_step_that_needs_it(data: DataConfig, tmp_path: Path, prefetch: int) -> None:
    rows = columns()
    set_row("click", 65, 7)(rows)
    data.train = str(write(tmp_path / "broken.parquet", rows))
    data.order, data.prefetch = "time", prefetch
    loader = Loader(data, spec(), global_batch=20, seed=0, rank=0, world=1)
    assert [next(loader)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InputError, match="row group 3, row 5: click"):
        next(loader)
    loader.close()


@pytest.mark.parametrize("order", ["time", "shuffled"])
def test_a_row_group_is_decoded_once_an_epoch(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    decoded: list[int] = []
    real = parquet.decode

    def counting(table: Any, spec: FeatureSpec, place: Place, *, histories: bool) -> RowBlock:
        decoded.append(place.group)
        return real(table, spec, place, histories=histories)

    monkeypatch.setattr(parquet, "decode", counting)
    data.train = str(write(tmp_path / "many.parquet", columns(), group=8))  # 12 row groups, the last of 2 rows
    data.order, data.prefetch = order, 0  # type: ignore[assignment]
    first(data, 30, size=3)
    assert sorted(decoded) == list(range(12))


def test_a_data_set_without_rows_is_refused(data: DataConfig, tmp_path: Path) -> None:
    data.train = str(write(tmp_path / "none.parquet", {name: v[:2] for name, v in columns().items()}, group=2))

    pq.write_table(pq.read_table(data.train).slice(0, 0), data.train)
    with pytest.raises(InputError, match="no rows"):
        Loader(data, spec(), global_batch=7, seed=0, rank=0, world=1)


def test_histories_can_be_emptied(data: DataConfig) -> None:
    full, data.histories = first(data, 3), "empty"
    empty = first(data, 3)
    assert [batch.tokens() for batch in empty] == [0, 0, 0]
    assert [batch.labels.tolist() for batch in empty] == [batch.labels.tolist() for batch in full]
    assert empty[0].sequences["clicks"].max_length == 0


def test_evaluation_reads_every_row_once_in_order(data: DataConfig) -> None:
    for world in (1, 2, 4):
        ranks = [list(eval_batches(data, spec(), global_batch=22, rank=r, world=world)) for r in range(world)]
        assert {len(batches) for batches in ranks} == {5}
        parts = [batches[step] for step in range(5) for batches in ranks]
        assert torch.cat([part.rows for part in parts]).tolist() == list(range(90))
    assert len(ranks[3][-1]) == 0  # two rows are left for four ranks


def test_slices_are_the_rows_of_the_batch(data: DataConfig) -> None:
    batch = first(data, 1, size=20)[0]
    assert flat([batch.slice(0, 6), batch.slice(6, 6), batch.slice(6, 20)]) == flat([batch])
    assert batch.slice(0, 6).sequences["clicks"].max_length == int(batch.sequences["clicks"].offsets[:7].diff().max())


def rows_in_a_fork(data: DataConfig, rank_rows: int) -> list[int]:
    return [row for batch in first(data, rank_rows) for row in batch.rows.tolist()]


def test_reads_in_processes_forked_after_a_read(data: DataConfig) -> None:
    here = rows_in_a_fork(data, 4)
    assert run_world(2, rows_in_a_fork, data, 4, gloo=False) == [here, here]
