"""Rows that count for no task are said, and a training that learned nothing has not succeeded."""

import dataclasses
import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from gemctl.config.compose import compose
from gemctl.config.schema import LauncherConfig, TopologyConfig
from gemctl.data.batch import Batch
from gemctl.data.synthetic import ensure
from gemctl.launch.progress import Progress
from gemctl.mesh.topology import resolve
from gemctl.parallel.assemble import assemble
from gemctl.report.report import build
from gemctl.run.attempt import claim
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log
from gemctl.train.ledger import Ledger
from gemctl.train.log import TrainLog
from gemctl.train.loop import Trainer
from gemctl.train.optim import DenseOptimizer
from gemctl.train.policy import NothingLearned, Spikes
from gemctl.train.step import Flags, Stepper
from tests.support.real_run import real_run
from tests.support.saved_run import words
from tests.support.small import SPEC, local_batch, small_config
from tests.support.small_run import Ended
from tests.support.world import run_world

NONE, FIRST = [False, False], [True, False]


def _steps(masked: list[str], accumulate: int) -> list[tuple[float, list[bool], int]]:
    """Of a step for each of `masked`, whose batch has no label ("all"), none of the second task ("second"), or no
    weight ("weight"): loss, what counted, and how many losses spikes are judged by."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = small_config(16, accumulate, len(masked))
    config.train.spike = 3.0
    config.topology = TopologyConfig(dp_replicate=1)
    model = assemble(config, SPEC, resolve(config.topology, LauncherConfig(ranks_per_node=world)), torch.device("cpu"))
    model.initialise(seed=7)
    stepper = Stepper(config, model, DenseOptimizer(model.dense, config.optim.dense), Ledger(), Spikes(3.0))
    found = []
    for index, what in enumerate(masked):
        batch = local_batch(index, 16, rank, world)
        if what == "weight":
            batch = dataclasses.replace(batch, weight=torch.zeros_like(batch.weight))
        elif what:
            batch.label_mask[:, 0 if what == "all" else 1 :] = 0
        result = stepper.step(index, batch, -(-16 // world), Flags())
        assert not result.skipped
        found.append((result.loss, result.counted, len(stepper.spikes.position()["losses"])))
    return found


@pytest.mark.parametrize(
    ("world", "accumulate"),
    [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
def test_a_step_without_a_row_that_counts_has_no_loss(world: int, accumulate: int) -> None:
    steps = run_world(world, _steps, ["", "all", "second", "weight"], accumulate)[0]
    assert [counted for _, counted, _ in steps] == [[True, True], NONE, FIRST, NONE]
    assert [math.isnan(loss) for loss, _, _ in steps] == [False, True, False, True]
    assert steps[2][0] < 1.5, "the other task's loss alone"
    assert [kept for _, _, kept in steps] == [1, 1, 2, 2], "no loss of 0 stands among those that spikes are judged by"


def _log(folder: Path, steps: list[list[bool]], every: int) -> Path:
    """metrics.jsonl of a run whose rows of step s count for the tasks of steps[s]."""
    log = TrainLog(folder, SPEC, Ledger(), rank=0, world=1)
    for index, counted in enumerate(steps):
        batch: Batch = local_batch(index, 16, 0, 1)
        batch.label_mask[:] = torch.tensor(counted).float()
        log.add(batch, torch.zeros(16, 2), loss=1.0 if any(counted) else math.nan, flops=1.0, counted=counted)
        if (index + 1) % every == 0:
            log.flush(index + 1, lr=0.1, grad_norm=1.0)
    log.close()
    return folder / "metrics.jsonl"


def test_the_metrics_count_steps_without_a_row_that_counts(tmp_path: Path) -> None:
    first, second = read_log(_log(tmp_path, [NONE, NONE, FIRST, NONE], 2))
    assert (first["loss"], second["loss"]) == (None, 1.0)
    assert first["uncounted"] == {"click": 2, "like": 2} and second["uncounted"] == {"click": 1, "like": 2}


def test_progress_and_report_say_which_task_no_row_counts_for(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path), "demo", ["gemctl", "train"])
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=1, heartbeat=1.0)
    _log(attempt.path, [FIRST, NONE, FIRST, FIRST], 1)
    out = io.StringIO()
    with Progress(4, out) as progress:
        progress.follow(attempt)
    said = out.getvalue()
    assert said.count("no row counts for task like: its label is null or masked in all, or the weight is 0") == 1
    assert said.count("step 2: no row counts for task click") == 1
    notes = build(run).notes
    why = "no row counted (label null or masked, or weight 0)"
    assert f"task like: {why} in any step, so nothing was learned of it" in notes
    assert f"task click: {why} in 1 of 4 steps" in notes


@pytest.mark.parametrize(
    ("applied", "counted", "expected"),
    [
        (0, {"click"}, "none of the 9 steps was applied, as no loss was finite"),
        (9, set(), r"no row of the 9 batches counts for any task \(click, like\): the labels are null or masked"),
        (1, {"click"}, None),
    ],
)
def test_what_learned_nothing_has_not_finished(applied: int, counted: set[str], expected: str | None) -> None:
    trainer: Any = SimpleNamespace(
        config=small_config(steps=9),
        optimizer=SimpleNamespace(applied=applied),
        counted=counted,
        tasks=["click", "like"],
    )
    if expected is None:
        Trainer._check_learned(trainer)
        return
    with pytest.raises(NothingLearned, match=expected):
        Trainer._check_learned(trainer)


@pytest.mark.slow
def test_runs_that_learn_nothing_fail_once(tmp_path: Path) -> None:
    """All losses not finite; all labels null, at the end of the first epoch. Nothing is saved or tried again."""
    nan = ";".join(f"nan:step={step}" for step in range(3))
    ended = _go(tmp_path / "nan", nan, "train.steps=3")
    assert ended.error == "RunFailed" and "none of the 3 steps was applied" in ended.message
    assert "not tried again: another attempt would see the same rows" in ended.message
    _null_labels(tmp_path / "null")
    ended = _go(tmp_path / "null", "", "train.steps=20")
    assert (
        ended.error == "RunFailed" and "no row of all 300 rows counts for any task (click, conversion)" in ended.message
    )
    assert len(ended.run_dir.attempts()) == 1 and not any(ended.run_dir.checkpoints.iterdir())


def _go(folder: Path, inject: str, *overrides: str) -> Ended:
    asked = ["train.log_every=1", "recover.heartbeat=0.1", *overrides]
    return cast(Ended, run_world(1, real_run, str(folder), 1, inject, asked, gloo=False, timeout=120)[0])


def _null_labels(folder: Path) -> None:
    """The small synthetic log of a run in `folder`, with null for every label."""
    ensure(compose(None, words(folder)).data)
    for name in ("train", "eval"):
        path = folder / f"data/{name}.parquet"
        table = pq.read_table(path)
        for label in ("click", "conversion"):
            nulls = pa.nulls(table.num_rows, pa.float32())
            table = table.set_column(table.schema.names.index(label), label, nulls)
        pq.write_table(table, path)
