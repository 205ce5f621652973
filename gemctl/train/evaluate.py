"""Scores all rows of a data set, in order, with a checkpoint and with the baseline regression, in one process.

    evaluate(config, Path("runs/…/checkpoints/step_100.a1"), ["eval.parquet"], out=Path("scores.parquet"))

`gemctl eval` calls this in a separate process (gemctl/torch_call.py).
"""

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor

from gemctl import paths
from gemctl.checkpoint.load import load
from gemctl.cluster.host import this_host
from gemctl.config.schema import Config, DataConfig, LauncherConfig, TopologyConfig
from gemctl.data.batch import Batch
from gemctl.data.columns import disagreements
from gemctl.data.files import DataPath
from gemctl.data.loader import eval_batches, open_source
from gemctl.durable import sync_file
from gemctl.errors import InputError
from gemctl.mesh.topology import resolve
from gemctl.parallel.assemble import ShardedModel, assemble
from gemctl.specs import feature_spec
from gemctl.specs.data import FeatureSpec
from gemctl.train import baseline
from gemctl.train.metrics import TaskMetrics
from gemctl.train.optim import DenseOptimizer

BASELINE_ROWS = 65_536  # rows read at a time


class Evaluator:
    """A checkpoint's model in this process, as a world of one; on a GPU if the run used one and one is available."""

    def __init__(self, config: Config, checkpoint: Path, data: list[str]) -> None:
        self.config = config
        self.spec = feature_spec.load(config.data.spec)
        _check_rows(data, config.data, self.spec)  # before the slow part
        self._data = replace(config.data, eval=data)
        cuda = config.cluster.device == "cuda" and torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        config = replace(config, topology=TopologyConfig(), launcher=LauncherConfig())
        topology = resolve(config.topology, config.launcher)
        self.model: ShardedModel = assemble(config, self.spec, topology, self.device)
        optimizer = DenseOptimizer(self.model.dense, config.optim.dense)
        # Load the whole checkpoint, optimizer state included, so that a mismatch can't go unnoticed.
        load(checkpoint, self.model.state() | optimizer.state())

    def score(self) -> Iterator[tuple[Batch, Tensor]]:
        """(batch, logits float32 [B, T]) over all rows of `data`, in order."""
        rows = self.config.train.global_batch
        for batch in eval_batches(self._data, self.spec, global_batch=rows, rank=0, world=1):
            yield batch, self.model.predict(batch.to(self.device), max(1, len(batch))).cpu()


def _check_rows(url: DataPath, data: DataConfig, spec: FeatureSpec) -> None:
    """InputError if the rows can't be read, or if their ids or times are of other kinds than in the training rows."""
    scored = open_source(url, data, spec)
    scored.close()
    scored.check_memory(this_host(gpus=False).memory)
    try:
        trained = open_source(data.train, data, spec)
    except InputError:
        return  # they may be gone by now; then the baseline's reason says so
    trained.close()
    if problems := disagreements([*trained.columns, *scored.columns]):
        raise InputError(problems)


def evaluate(config: Config, checkpoint: Path, data: list[str], out: Path | None) -> dict[str, Any]:
    """The metrics of model and baseline over the same rows; writes the scores to `out` (Parquet) if given."""
    # TorchRec triggers a torch warning about a function that gemctl does not call.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    torch.set_num_threads(this_host(gpus=False).cores)
    try:
        return _evaluate(config, checkpoint, data, out)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _evaluate(config: Config, checkpoint: Path, data: list[str], out: Path | None) -> dict[str, Any]:
    start = time.perf_counter()
    evaluator = Evaluator(config, checkpoint, data)
    spec = evaluator.spec
    fitted, reason = _fit_baseline(evaluator.config, spec)
    tasks = [label.name for label in spec.labels]
    metrics, baseline_metrics = TaskMetrics(tasks), TaskMetrics(tasks)
    rows = 0
    with ScoreFile(out, tasks) if out is not None else nullcontext() as scores:
        for batch, logits in evaluator.score():
            known = (batch.labels, batch.label_mask, batch.weight, batch.true_probability)
            metrics.update(logits, *known)
            if fitted is not None:
                baseline_metrics.update(fitted.score(batch), *known)
            if scores is not None:
                scores.write(batch, logits)
            rows += len(batch)
    return {
        "rows": rows,
        "seconds": time.perf_counter() - start,
        "tasks": metrics.compute(),
        "baseline": baseline_metrics.compute() if fitted is not None else None,
        "baseline_reason": reason,
    }


def _fit_baseline(config: Config, spec: FeatureSpec) -> tuple[baseline.Baseline | None, str | None]:
    """The regression fitted on the training rows, or the reason why there is none."""
    settings = replace(config.data, eval=config.data.train, histories="empty")
    try:
        return baseline.fit(eval_batches(settings, spec, global_batch=BASELINE_ROWS, rank=0, world=1), spec), None
    except InputError as error:
        return None, f"the training rows can't be read, so kinds of ids and times were not compared either: {error}"


class ScoreFile:
    """Parquet with one row per scored row, in order: `row` (its number in the data set), and for each task
    `label_TASK`, `mask_TASK` (0: the label does not count) and `score_TASK` (the probability that the label is 1).

    The complete file appears when the `with` block ends without an error; otherwise nothing remains."""

    def __init__(self, path: Path, tasks: list[str]) -> None:
        self._path, self._tasks = path, tasks
        self._draft = path.with_name(f".{path.name}.partial")
        fields = [pa.field("row", pa.int64())]
        for task in tasks:
            fields += [pa.field(f"{column}_{task}", pa.float32()) for column in ("label", "mask", "score")]
        with paths.writing(f"--out {path}"):
            self._writer = pq.ParquetWriter(self._draft, pa.schema(fields))

    def write(self, batch: Batch, logits: Tensor) -> None:
        columns = [batch.rows.numpy()]
        for task in range(len(self._tasks)):
            columns += [values[:, task].numpy() for values in (batch.labels, batch.label_mask, logits.sigmoid())]
        self._writer.write_table(pa.table([pa.array(column) for column in columns], schema=self._writer.schema))

    def __enter__(self) -> "ScoreFile":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        with paths.writing(f"--out {self._path}"):
            try:
                self._writer.close()
                if failure is None:
                    sync_file(self._draft)
                    self._draft.replace(self._path)
            finally:
                self._draft.unlink(missing_ok=True)
