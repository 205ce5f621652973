"""The ledger covers every second once, and the log joins four ranks' ledgers."""

import math
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from gemctl.data.batch import Batch
from gemctl.run.files import read_log
from gemctl.specs.data import FeatureSpec, LabelSpec, TableSpec
from gemctl.train.ledger import PARTS, Ledger, peak_rss, process_start
from gemctl.train.log import TrainLog
from gemctl.train.peak import measure_peak
from tests.support.world import run_world

SPEC = FeatureSpec("tiny", tables=[TableSpec("item", 10)], labels=[LabelSpec("click")])


class Clock:
    """Stands for `time.perf_counter`; only `busy` lets time pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def busy(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("gemctl.train.ledger.time.perf_counter", clock)
    return clock


def steady(start: float | None = None) -> Ledger:
    ledger = Ledger(start=time.perf_counter() if start is None else start)
    ledger.first_step_done()
    return ledger


def test_parts_and_unaccounted_add_up_to_wall_and_a_planted_wait_shows(clock: Clock) -> None:
    ledger = steady()
    for _ in range(3):
        with ledger.part("data_wait"):
            clock.busy(5)
        with ledger.part("dense_forward"):
            clock.busy(3)
    clock.busy(30)
    got = ledger.take()
    assert (got["data_wait"], got["dense_forward"], got["unaccounted"], got["wall"]) == (15, 9, 30, 54)
    assert sum(got[name] for name in PARTS) + got["unaccounted"] == got["wall"]
    clock.busy(2)
    assert ledger.take()["wall"] == 2


def test_a_real_sleep_outside_of_all_parts_is_unaccounted() -> None:
    ledger = steady()
    with ledger.part("data_wait"):
        time.sleep(0.01)
    time.sleep(0.05)
    got = ledger.take()
    assert got["data_wait"] >= 0.01 and got["unaccounted"] >= 0.05
    assert sum(got[name] for name in PARTS) + got["unaccounted"] == pytest.approx(got["wall"], abs=1e-9)


def test_a_part_costs_microseconds() -> None:
    def seconds_per_part() -> float:
        ledger = steady()
        for _ in range(500):
            with ledger.part("data_wait"):
                pass
        return ledger.take()["wall"] / 500

    assert min(seconds_per_part() for _ in range(10)) < 5e-6


def test_an_inner_parts_seconds_are_its_own(clock: Clock) -> None:
    ledger = steady()
    with ledger.part("optimizer"):
        clock.busy(4)
        with ledger.part("exposed_communication"):
            clock.busy(10)
        clock.busy(4)
    got = ledger.take()
    assert got["exposed_communication"] == 10 and got["optimizer"] == 8 and got["unaccounted"] == 0


def test_parts_inside_an_evaluation_are_evaluation(clock: Clock) -> None:
    ledger = steady()
    with ledger.part("eval"), ledger.part("data_wait"), ledger.part("tables_forward"):
        clock.busy(5)
    got = ledger.take()
    assert got["eval"] == 5 and got["data_wait"] == got["tables_forward"] == 0


def test_start_up_keeps_its_own_stages_until_the_first_step_is_done(clock: Clock) -> None:
    ledger = Ledger(start=clock.now - 2)
    for _ in range(2):
        with ledger.part("data_wait"):
            clock.busy(3)
        with ledger.part("dense_forward"), ledger.part("flag_wait"):
            clock.busy(4)
        ledger.first_step_done()
    got = ledger.take()
    stages = ("import", "first_batch", "first_step", "data_wait", "flag_wait", "unaccounted")
    assert [got[name] for name in stages] == [2, 3, 4, 3, 4, 0]


def test_a_part_that_raises_still_ends_and_take_splits_an_open_part(clock: Clock) -> None:
    ledger = steady()
    with pytest.raises(ValueError), ledger.part("optimizer"):
        clock.busy(1)
        raise ValueError
    with ledger.part("log"):
        clock.busy(4)
        first = ledger.take()
        clock.busy(2)
        assert ledger.seconds("log") == 6
    second = ledger.take()
    assert first["optimizer"] == 1 and first["log"] == 4 and second["log"] == 2
    assert first["unaccounted"] == second["unaccounted"] == 0 and ledger.seconds("log") == 6
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
    """Runs on each of 4 ranks; rank r has r rows a step, and rank 3 waits for data."""

    rank = dist.get_rank()
    ledger = Ledger()
    log = TrainLog(Path(folder), SPEC, ledger, rank=rank, world=4, peak=1e9)
    log.add(batch(rank), torch.zeros(rank, 1), loss=0.5, flops=1e6)
    ledger.first_step_done()
    log.flush(1, lr=0.1, grad_norm=1.5)
    for loss in (0.25, 0.75):
        with ledger.part("data_wait"):
            time.sleep(0.05 if rank == 3 else 0)
        log.add(batch(rank), torch.zeros(rank, 1), loss=loss, flops=rank * 1e6)
    log.skipped()
    log.flush(3, lr=0.2, grad_norm=math.inf)
    log.evaluated(3, {"click": {"ne": 0.9, "auc": None}}, 1.5)
    log.finish(3)
    log.close()


def test_the_log_joins_four_ranks(tmp_path: Path) -> None:
    run_world(4, log_two_intervals, str(tmp_path))
    first, second, evaluation = read_log(tmp_path / "metrics.jsonl")
    assert first["examples_per_s"] is None and first["loss"] == 0.5 and first["grad_norm"] == 1.5
    assert second["step"] == 3 and second["loss"] == 0.5 and second["lr"] == 0.2 and second["grad_norm"] is None
    assert second["examples"] == 12 and second["unknown_ids"] == {"item": 16} and second["skipped"] == 1
    assert second["flops"] == 12e6 and second["peak"] == 4e9
    assert second["effective_mfu"] == pytest.approx(12e6 / (4e9 * second["seconds"]))
    assert second["examples_per_s"] == pytest.approx(12 / second["seconds"])
    assert second["tasks"]["click"]["logloss"] == pytest.approx(math.log(2))
    assert evaluation["kind"] == "eval" and evaluation["tasks"]["click"]["ne"] == 0.9
    started, waited, last = read_log(tmp_path / "ledger.jsonl")
    least, mean, most, rank = waited["parts"]["data_wait"]
    assert least < mean < most and most >= 0.1 and mean >= 0.025 and rank == 3
    for line in (started, waited, last):
        assert line["ranks"] == 4
        assert sum(part[1] for part in line["parts"].values()) == pytest.approx(line["wall"][1], abs=1e-6)
    assert 0 < started["start_rss"][0] <= started["peak_rss"][2]
    assert any((tmp_path / "tb").iterdir())


def test_tensorboard_holds_the_figures(tmp_path: Path) -> None:

    log = TrainLog(tmp_path, SPEC, steady(), rank=0, world=1)
    log.add(batch(4), torch.zeros(4, 1), loss=0.5, flops=1.0)
    log.flush(7, lr=0.1, grad_norm=None)
    log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (point,) = events.Scalars("train/ne/click")
    assert point.step == 7 and point.value == pytest.approx(1.0)


def test_the_peak_is_a_rate_of_this_machine() -> None:
    assert 1e8 < measure_peak(torch.device("cpu"), budget=0.05) < 1e13


class Stream:
    """A GPU's stream: work is queued at once and done later; the host sees its events when it waits for them."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self) -> "StreamEvent":
        return StreamEvent(self)


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, math.nan

    def record(self) -> None:
        self.at = self.stream.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "StreamEvent") -> float:
        return 1e3 * (end_event.at - self.at)


def test_a_stream_that_lags_behind_the_host_is_clocked_by_its_own_time(clock: Clock) -> None:
    stream, ledger = Stream(), Ledger(start=clock())
    with ledger.part("dense_forward"):
        clock.busy(7)  # start-up is the host's
    ledger.first_step_done(stream.event)
    for _ in range(2):
        with ledger.part("dense_backward"):
            clock.busy(1)  # the host only launches
            stream.now += 20
            with ledger.part("exposed_communication"):
                stream.now += 3
        with ledger.part("optimizer"):
            clock.busy(10)  # and here waits for what it has launched
            stream.now += 4
    stream.now += 5
    got = ledger.take()
    assert got["first_step"] == 7
    assert (got["dense_backward"], got["exposed_communication"], got["optimizer"]) == (40, 6, 8)
    assert ledger.totals()["dense_backward"] == 2, "slow ranks are judged by the host's clocks"


def test_a_part_that_is_open_at_the_end_of_an_interval_goes_on_in_the_next_on_the_stream_too(clock: Clock) -> None:
    stream, ledger = Stream(), Ledger(start=clock())
    ledger.first_step_done(stream.event)
    with ledger.part("log"):
        stream.now += 2
        assert ledger.take()["log"] == 2
        stream.now += 3
        with ledger.part("dense_forward"):
            stream.now += 4  # inside a part that counts whole
    stream.now += 1
    assert ledger.take()["log"] == 7
    assert ledger.take()["log"] == 0
