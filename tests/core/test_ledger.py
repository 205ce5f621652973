"""The ledger covers every second once, and the log joins four ranks' ledgers."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gemctl.data.batch import Batch
from gemctl.specs.data import FeatureSpec, LabelSpec, TableSpec
from gemctl.train.ledger import PARTS, Ledger, peak_rss, process_start
from gemctl.train.peak import measure_peak
from gemctl.train.writers import JsonLines, TrainLog
from tests.world import run_world

SPEC = FeatureSpec("tiny", tables=[TableSpec("item", 10)], labels=[LabelSpec("click")])


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def steady() -> Ledger:
    ledger = Ledger(start=time.perf_counter())
    ledger.first_step_done()
    return ledger


def test_parts_and_unaccounted_add_up_to_wall_and_a_planted_sleep_shows() -> None:
    ledger = steady()
    for _ in range(3):
        with ledger.part("data_wait"):
            busy(0.005)
        with ledger.part("dense_forward"):
            busy(0.003)
    time.sleep(0.03)
    got = ledger.take()
    assert sum(got[name] for name in PARTS) + got["unaccounted"] == pytest.approx(got["wall"], abs=1e-9)
    assert got["data_wait"] == pytest.approx(0.015, abs=0.004)
    assert got["dense_forward"] == pytest.approx(0.009, abs=0.004)
    assert 0.03 <= got["unaccounted"] < 0.045


def test_without_a_gap_nothing_to_speak_of_is_unaccounted() -> None:
    ledger = steady()
    for _ in range(2000):
        for name in ("data_wait", "tables_forward", "dense_forward", "optimizer"):
            with ledger.part(name):
                pass
    got = ledger.take()
    # 8,000 parts; the time between two of them is what a part costs.
    assert got["unaccounted"] / 8000 < 5e-6


def test_an_inner_parts_seconds_are_its_own() -> None:
    ledger = steady()
    with ledger.part("optimizer"):
        busy(0.004)
        with ledger.part("exposed_communication"):
            busy(0.01)
        busy(0.004)
    got = ledger.take()
    assert got["exposed_communication"] == pytest.approx(0.01, abs=0.003)
    assert got["optimizer"] == pytest.approx(0.008, abs=0.003)


def test_parts_inside_an_evaluation_are_evaluation() -> None:
    ledger = steady()
    with ledger.part("eval"), ledger.part("data_wait"), ledger.part("tables_forward"):
        busy(0.005)
    got = ledger.take()
    assert got["eval"] >= 0.005 and got["data_wait"] == got["tables_forward"] == 0


def test_start_up_keeps_its_own_stages_until_the_first_step_is_done() -> None:
    ledger = Ledger(start=time.perf_counter() - 2)
    for _ in range(2):
        with ledger.part("data_wait"):
            busy(0.002)
        with ledger.part("dense_forward"), ledger.part("flag_wait"):
            busy(0.004)
        ledger.first_step_done()
    got = ledger.take()
    assert got["import"] == pytest.approx(2, abs=0.05)
    assert got["first_batch"] == pytest.approx(got["data_wait"], abs=0.002) and got["data_wait"] >= 0.002
    assert got["first_step"] >= 0.004 and got["flag_wait"] >= 0.004


def test_a_part_that_raises_still_ends_and_take_splits_an_open_part() -> None:
    ledger = steady()
    with pytest.raises(ValueError), ledger.part("optimizer"):
        raise ValueError
    with ledger.part("log"):
        busy(0.004)
        first = ledger.take()
        busy(0.002)
        assert ledger.seconds("log") == pytest.approx(0.006, abs=0.002)
    second = ledger.take()
    assert first["log"] >= 0.004 and 0.002 <= second["log"] < 0.004
    assert second["unaccounted"] < 0.001
    with pytest.raises(KeyError):
        ledger.part("otpimizer")


def test_process_start_is_before_now_and_memory_is_real() -> None:
    age = time.perf_counter() - process_start()
    assert 0.1 < age < 3600
    assert peak_rss() > 50 * 2**20


def batch(rows: int) -> Batch:
    ones = torch.ones(rows)
    return Batch(
        rows=torch.arange(rows), categorical={}, dense=torch.zeros(rows, 0), sequences={},
        labels=(torch.arange(rows) % 2).float()[:, None], label_mask=ones[:, None], weight=ones,
        domain=torch.zeros(rows, dtype=torch.int64), true_probability=torch.full((rows,), math.nan),
        unknown_ids={"item": 2},
    )  # fmt: skip


def log_two_intervals(folder: str) -> None:
    """Runs on each of 4 ranks; rank r has r rows a step and waits r·10 ms for data in the second interval."""
    import torch.distributed as dist

    rank = dist.get_rank()
    ledger = Ledger()
    log = TrainLog(Path(folder), SPEC, ledger, rank=rank, world=4, peak=1e9)
    log.add(batch(rank), torch.zeros(rank, 1), loss=0.5, flops=1e6)
    ledger.first_step_done()
    log.flush(1, lr=0.1, grad_norm=1.5)
    for loss in (0.25, 0.75):
        with ledger.part("data_wait"):
            busy(rank * 0.01)
        log.add(batch(rank), torch.zeros(rank, 1), loss=loss, flops=rank * 1e6)
    log.skipped()
    log.flush(3, lr=0.2, grad_norm=math.inf)
    log.evaluated(3, {"click": {"ne": 0.9, "auc": None}}, 1.5)
    log.finish(3)
    log.close()


def test_the_log_joins_four_ranks(tmp_path: Path) -> None:
    run_world(4, log_two_intervals, str(tmp_path))
    first, second, evaluation = read(tmp_path / "metrics.jsonl")
    assert first["examples_per_s"] is None and first["loss"] == 0.5 and first["grad_norm"] == 1.5
    assert second["step"] == 3 and second["loss"] == 0.5 and second["lr"] == 0.2 and second["grad_norm"] is None
    assert second["examples"] == 12 and second["unknown_ids"] == {"item": 16} and second["skipped"] == 1
    assert second["flops"] == 12e6 and second["peak"] == 4e9
    assert second["effective_mfu"] == pytest.approx(12e6 / (4e9 * second["seconds"]))
    assert second["examples_per_s"] == pytest.approx(12 / second["seconds"])
    assert second["tasks"]["click"]["logloss"] == pytest.approx(math.log(2))
    assert evaluation["kind"] == "eval" and evaluation["tasks"]["click"]["ne"] == 0.9
    started, waited, last = read(tmp_path / "ledger.jsonl")
    least, mean, most, rank = waited["parts"]["data_wait"]
    assert least < 0.005 and mean == pytest.approx(0.03, abs=0.01) and most >= 0.06 and rank == 3
    for line in (started, waited, last):
        assert line["ranks"] == 4
        assert sum(part[1] for part in line["parts"].values()) == pytest.approx(line["wall"][1], abs=1e-6)
    assert 0 < started["start_rss"][0] <= started["peak_rss"][2]
    assert any((tmp_path / "tb").iterdir())


def test_tensorboard_holds_the_figures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    log = TrainLog(tmp_path, SPEC, steady(), rank=0, world=1)
    log.add(batch(4), torch.zeros(4, 1), loss=0.5, flops=1.0)
    log.flush(7, lr=0.1, grad_norm=None)
    log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (point,) = events.Scalars("train/ne/click")
    assert point.step == 7 and point.value == pytest.approx(1.0)


def test_json_lines_hold_no_nan(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.write({"a": math.nan, "b": [1.0, math.inf], "c": {"d": -math.inf}})
    lines.close()
    assert read(tmp_path / "x.jsonl") == [{"format": 1, "a": None, "b": [1.0, None], "c": {"d": None}}]


def test_the_peak_is_a_rate_of_this_machine() -> None:
    assert 1e8 < measure_peak(budget=0.05) < 1e13


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
