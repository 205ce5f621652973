"""A slow rank is named within 20 steps, with what it costs; a busy machine or one slow step names nobody."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gemctl.config.schema import LauncherConfig, TopologyConfig
from gemctl.mesh.topology import CLOCKS, resolve
from gemctl.parallel.assemble import assemble
from gemctl.report.report import build
from gemctl.run.files import read_log
from gemctl.train.ledger import Ledger
from gemctl.train.optim import DenseOptimizer
from gemctl.train.step import Flags, Stepper
from gemctl.train.stragglers import COLUMNS, EVERY, FORGET, Stragglers, losses
from tests.report.test_report import text
from tests.support.real_run import real_run, train_ahead
from tests.support.small import SPEC, local_batch, small_config
from tests.support.world import run_world


def rows(*ranks: dict[str, float]) -> torch.Tensor:
    return torch.tensor([[rank.get(name, 0.0) for name in COLUMNS] for rank in ranks], dtype=torch.float64)


FAST = {"dense_forward": 1.0, "dense_backward": 2.0, "flag_wait": 5.0, "tables_forward": 1.5}
SLOW = {"dense_forward": 3.0, "dense_backward": 6.0, "tables_forward": 0.5}


def test_the_plan_counts_what_ranks_tell() -> None:
    assert len(COLUMNS) == CLOCKS


class Clocks(Ledger):
    """A ledger past start-up whose every clock shows `now`, and the first one a second more."""

    now = 10.0

    @property
    def is_steady(self) -> bool:
        return True

    def totals(self) -> dict[str, float]:
        return dict.fromkeys(COLUMNS, self.now) | {COLUMNS[0]: self.now + 1}


def test_a_rank_tells_how_far_its_clocks_went_in_the_window() -> None:
    ledger = Clocks()
    stragglers = Stragglers(ledger, rank=1, world=2)
    assert [stragglers.due().numel() for _ in range(2 * EVERY - 1)] == [0] * (2 * EVERY - 1), "a window has two ends"
    ledger.now = 12.5
    assert stragglers.due().view(2, -1).tolist() == [[0.0] * len(COLUMNS), [2.5] * len(COLUMNS)]


def test_what_a_slow_rank_costs_is_what_the_others_wait() -> None:
    (found,) = losses(rows(FAST, SLOW, FAST, FAST))
    assert (found.rank, found.part) == (1, "dense_backward")
    assert (found.own, found.others) == (9.0, 3.0)
    assert found.lost == 3 * 6.0, "5 s at the flag, and 1 s beyond the straggler's own lookup"
    (found,) = losses(rows(FAST | {"flag_wait": 50.0}, SLOW))
    assert found.lost == 6.0, "no more than it takes longer: something else is waited for too"


def test_several_slow_ranks_share_it_and_half_of_them_may_be_slow() -> None:
    slower = SLOW | {"dense_backward": 12.0}
    two = {loss.rank: loss.lost for loss in losses(rows(FAST, SLOW, FAST, slower))}
    assert two.keys() == {1, 3} and two[1] * 2 == pytest.approx(two[3])
    assert sum(two.values()) == pytest.approx(2 * 5.0 + 2 * 1.0)


def test_nobody_is_slow_who_costs_nothing() -> None:
    assert losses(rows(FAST, FAST)) == []
    assert losses(rows({"dense_forward": 1.0, "flag_wait": 0.4}, {"dense_forward": 1.4})) == []
    unhindered = {"dense_forward": 1.0, "optimizer": 100.0}
    assert losses(rows(unhindered, unhindered | {"dense_forward": 3.0})) == [], "2 of 200 s"


def test_one_window_names_nobody_and_a_named_rank_is_named_again_only_after_a_pause() -> None:
    judge = Stragglers(Ledger(), 0, 2)
    slow, even = rows(FAST, SLOW).flatten(), rows(FAST, FAST).flatten()
    judge.judge(5, slow)
    judge.judge(10, even)
    assert judge.named() == [] and judge.take() == []
    for step in (15, 20, 25):
        judge.judge(step, slow)
    (found,) = judge.named()
    assert (found.rank, found.step, found.ratio, found.part) == (1, 20, 3.0, "dense_backward")
    assert found.share == pytest.approx(6 / 19)
    (loss,) = judge.take()
    assert (loss.rank, loss.lost, loss.steps) == (1, 18.0, 3 * EVERY) and judge.take() == []
    judge.judge(30, even)
    for step in (35, 40):
        judge.judge(step, slow)
    assert judge.named() == []
    for step in range(FORGET):
        judge.judge(45 + 5 * step, even)
    for step in (90, 95):
        judge.judge(step, slow)
    assert len(judge.named()) == 1


def _late_data(slow: int, from_step: int, steps: int) -> list[Any]:
    """From a step on rank `slow` waits for its data twice as long as a step takes; what rank 0 names."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = small_config()
    topology = resolve(TopologyConfig(), LauncherConfig(ranks_per_node=world))
    model = assemble(config, SPEC, topology, torch.device("cpu"))
    model.initialise(seed=7)
    ledger = Ledger()
    ledger.first_step_done()
    stepper = Stepper(config, model, DenseOptimizer(model.dense, config.optim.dense), ledger)
    named, took = [], 0.0
    for step in range(steps):
        batch = local_batch(step, 16, rank, world)
        with ledger.part("data_wait"):
            time.sleep(2 * took if rank == slow and step >= from_step else 0)
        start = time.perf_counter()
        stepper.step(step, batch, 16 // world, Flags())
        took = time.perf_counter() - start
        named += stepper.stragglers.named()
    return named


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_whose_data_come_late_is_named_within_20_steps(world: int) -> None:
    """Its lateness shows where the others meet it first, at the tables' lookup, and not at the flags."""
    first, *others = run_world(world, _late_data, 1, 7, 27)
    assert others == [[]] * (world - 1)
    found = [one for one in first if one.rank == 1]
    assert found and 7 < found[0].step <= 27 and found[0].part == "data_wait"
    assert found[0].ratio > 1.5 and 0.1 < found[0].share < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_slowed_threefold_is_named_in_ledger_progress_and_report(ranks: int, tmp_path: Path) -> None:
    overrides = ["train.steps=40", "train.log_every=20", "train.global_batch=256"]
    # The injector counts work in seconds on a core; ranks that share one take longer, all of them.
    factor = 1 + 2 * max(1, round(ranks / (os.cpu_count() or 1)))
    asked = (str(tmp_path), ranks, f"slow:rank=1,factor={factor}", overrides, train_ahead)
    ended = run_world(1, real_run, *asked, gloo=False, timeout=200)[0]
    assert ended.error is None, ended.message
    run = ended.run_dir
    named = [line for line in read_log(run.attempt(1).ledger) if line["kind"] == "straggler"]
    assert named[0]["rank"] == 1 and named[0]["step"] <= 20, named
    assert named[0]["host"] == run.attempt(1).claim().host
    report = build(run)
    worst = report.stragglers[0]
    assert worst.rank == 1 and worst.steps >= 20 and worst.ratio > 1.5 and 0.1 < worst.share < 0.75
    assert "Stragglers" in text(report)
