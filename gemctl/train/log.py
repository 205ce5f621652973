"""The logs of a training attempt: attempts/<n>/metrics.jsonl, ledger.jsonl and TensorBoard's tb/.

    log = TrainLog(attempt_dir, spec, ledger, rank=rank, world=world, peak=peak)
    log.add(batch, logits, loss=loss, flops=flops)            # every step, every rank
    log.flush(step, lr=lr, grad_norm=norm)                    # every log_every steps, all ranks together
    log.evaluated(step, metrics.compute(), seconds)           # after an evaluation
    log.finish(step); log.close()

`flush` combines the data of all ranks (metric sums, counters, traffic, each rank's ledger) in one all-reduce; rank 0
writes. Lines are written atomically, so a reader can follow the files while the run continues.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemctl.data.batch import Batch
from gemctl.durable import named
from gemctl.parallel.traffic import AXES, COLLECTIVES, TrafficCounter
from gemctl.run.files import JsonLog
from gemctl.run.rollup import Rollup
from gemctl.specs.data import FeatureSpec
from gemctl.train.ledger import PARTS, Ledger, gpu_memory, peak_rss
from gemctl.train.metrics import Quality, TaskMetrics
from gemctl.train.stragglers import Loss, Straggler

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_MEMORY = ("peak_rss", "start_rss", "gpu_allocated", "gpu_reserved")  # bytes, each the maximum so far
_ROW = (*PARTS, "unaccounted", "wall", *_MEMORY)
_SENT = tuple(product(AXES, COLLECTIVES))
# Parts that throughput and MFU leave out.
_NOT_TRAINING = ("import", "process_group", "build", "load", "first_batch", "first_step", "peak", "eval")


def _finite(value: Any) -> Any:
    """`value` with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TrainLog:
    """One rank's part of the logging; all ranks call every method except `add` at the same step."""

    def __init__(
        self,
        attempt_dir: Path,
        spec: FeatureSpec,
        ledger: Ledger,
        *,
        rank: int,
        world: int,
        peak: float | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        traffic: TrafficCounter | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """`peak`: FLOP/s of this rank (`gemctl.train.peak`); set `log.peak` later if it is measured later. `hosts`: the
        host of each rank, if known."""
        self.peak, self._traffic, self._hosts = peak, traffic, hosts
        self._ledger, self._rank, self._world, self._group = ledger, rank, world, group
        self._tables = [table.name for table in spec.tables]
        self._metrics = TaskMetrics([label.name for label in spec.labels], device, auc=False)
        self._counters = torch.zeros(len(self._tables) + 4, dtype=torch.float64)
        self._losses: list[float] = []
        self._tasks = [label.name for label in spec.labels]
        self._uncounted = Counter[str]()
        self._skipped = Counter[str]()
        self._first = True
        self._files: dict[str, JsonLog] = {}
        self._tb_dir = attempt_dir / "tb"
        self._tb: SummaryWriter | None = None
        if rank == 0:
            self._files = {name: JsonLog(attempt_dir / f"{name}.jsonl") for name in ("metrics", "ledger")}
            self._rollup = Rollup(attempt_dir / "rollup.jsonl")

    def add(
        self, batch: Batch, logits: Tensor, *, loss: float, flops: float, counted: Sequence[bool] | None = None
    ) -> None:
        """Adds one step: this rank's rows and logits [B, T], the global `loss`, this rank's useful FLOPs (forward and
        backward), and for which tasks any row `counted` (None: all). The first step after start-up counts for the
        metrics, but not for the throughput."""
        self._metrics.update(logits.detach(), batch.labels, batch.label_mask, batch.weight, batch.true_probability)
        if not math.isnan(loss):
            self._losses.append(loss)
        if counted is not None:
            self._uncounted.update(task for task, counts in zip(self._tasks, counted, strict=True) if not counts)
        for index, table in enumerate(self._tables):
            self._counters[index] += batch.unknown_ids.get(table, 0)
        if not self._first:
            self._counters[-4] += len(batch)
            self._counters[-3] += batch.tokens()
            self._counters[-2] += flops
        self._first = False

    def skipped(self, *, spike: bool = False) -> None:
        """A step was skipped because its loss was a spike or not finite (known to all ranks)."""
        self._skipped["spikes" if spike else "skipped"] += 1

    def passed_over(self) -> None:
        """A step's batch was passed over because the run had rolled back from it."""
        self._skipped["passed_over"] += 1

    def stragglers(self, detected: Sequence[Straggler]) -> None:
        """Writes newly detected stragglers at once; only rank 0 has any."""
        for one in detected:
            line = {"kind": "straggler", "time": time.time(), **asdict(one), "host": self._host(one.rank)}
            self._write("ledger", line)

    def _host(self, rank: int) -> str | None:
        return self._hosts[rank] if self._hosts else None

    def flush(
        self, step: int, *, lr: float, grad_norm: float | None, stragglers: Sequence[Loss] = ()
    ) -> dict[str, Any] | None:
        """Writes the interval that ends with `step` completed steps; rank 0 returns the line of metrics.jsonl.

        `stragglers`: what each has cost in this interval, on rank 0.
        """
        matrix, counters, traffic = self._gather()
        line = None
        if self._rank == 0:
            now = time.time()
            line = self._metrics_line(step, now, matrix, counters) | {"lr": lr, "grad_norm": grad_norm}
            self._write("metrics", _finite(line))
            lost = [{**asdict(one), "host": self._host(one.rank)} for one in stragglers]
            self._write("ledger", self._ledger_line(step, now, matrix) | {"traffic": traffic, "stragglers": lost})
            self._rollup.interval_done(*(self._files[name].size() for name in ("metrics", "ledger")))
            self._to_tensorboard(step, line)
        self._metrics.reset()
        self._counters.zero_()
        self._losses, self._skipped, self._uncounted = [], Counter(), Counter()
        return line

    def finish(self, step: int) -> None:
        """Writes where the time since the last `flush` went (the last evaluation and save), just before the end."""
        matrix, _, _ = self._gather()
        if self._rank == 0:
            self._files["ledger"].write(self._ledger_line(step, time.time(), matrix))

    def _gather(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """[world, columns] with every rank's row, the summed counters, and the mean traffic per rank; the metrics are
        summed in place."""
        seconds = self._ledger.take()
        memory = {"peak_rss": peak_rss(), "start_rss": self._ledger.start_rss, **gpu_memory()}
        row = torch.zeros(self._world, len(_ROW), dtype=torch.float64)
        row[self._rank] = torch.tensor([(seconds | memory)[name] for name in _ROW], dtype=torch.float64)
        self._counters[-1] = self.peak or 0.0
        device = self._metrics.flat.device
        counts, steps = self._traffic.take() if self._traffic else ({}, 0)
        sent = torch.tensor([counts.get(key, (0, 0)) for key in _SENT], dtype=torch.float64)
        parts = [self._metrics.flat, self._counters.to(device), row.flatten().to(device), sent.flatten().to(device)]
        joined = torch.cat(parts)
        if self._world > 1:
            dist.all_reduce(joined, group=self._group)
        sums, counters, matrix, sent = joined.cpu().split([part.numel() for part in parts])
        self._metrics.flat.copy_(sums)
        means = zip(_SENT, (sent.view(-1, 2) / self._world).tolist(), strict=True)
        traffic = {"steps": steps, "sent": [[*key, *values] for key, values in means if values[0]]}
        return matrix.view_as(row), counters, traffic

    def _metrics_line(self, step: int, now: float, matrix: Tensor, counters: Tensor) -> dict[str, Any]:
        columns = dict(zip(_ROW, matrix.mean(0).tolist(), strict=True))
        seconds = columns["wall"] - sum(columns[name] for name in _NOT_TRAINING)
        *unknown, examples, tokens, flops, peak = counters.tolist()
        tasks = self._metrics.compute()
        return {
            "kind": "train", "step": step, "time": now,
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "tasks": {task: {key: quality[key] for key in ("ne", "base_rate", "logloss", "calibration")}
                      for task, quality in tasks.items()},
            "examples": int(examples), "tokens": int(tokens), "flops": flops, "seconds": seconds, "peak": peak or None,
            "ranks": self._world,
            "examples_per_s": examples / seconds if examples else None,
            "tokens_per_s": tokens / seconds if examples else None,
            "effective_mfu": flops / (peak * seconds) if flops and peak else None,
            "unknown_ids": {table: int(count) for table, count in zip(self._tables, unknown, strict=True)},
            **{name: self._skipped[name] for name in ("skipped", "spikes", "passed_over")},
            "uncounted": dict(self._uncounted),
        }  # fmt: skip

    def _ledger_line(self, step: int, now: float, matrix: Tensor) -> dict[str, Any]:
        """For each column the minimum, mean and maximum over the ranks, and the rank with the maximum."""
        most, rank = matrix.max(0)
        columns = zip(matrix.min(0).values.tolist(), matrix.mean(0).tolist(), most.tolist(), rank.tolist(), strict=True)
        stats = {name: list(column) for name, column in zip(_ROW, columns, strict=True)}
        memory = {name: stats.pop(name) for name in _MEMORY}
        wall = stats.pop("wall")
        return {
            "kind": "interval",
            "step": step,
            "time": now,
            "ranks": self._world,
            "wall": wall,
            "parts": stats,
        } | memory

    def evaluated(self, step: int, tasks: dict[str, Quality], seconds: float) -> None:
        """Writes an evaluation of all eval rows after `step` completed steps."""
        if self._rank == 0:
            line = {"kind": "eval", "step": step, "time": time.time(), "seconds": seconds, "tasks": tasks}
            self._write("metrics", _finite(line))
            self._to_tensorboard(step, line)

    def _write(self, file: str, line: dict[str, Any]) -> None:
        self._files[file].write(line)
        self._rollup.add(file, line)

    def _to_tensorboard(self, step: int, line: dict[str, Any]) -> None:
        if self._tb is None:
            # It takes 0.15 s, which would delay the first step.
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            with named(self._tb_dir):
                self._tb = SummaryWriter(str(self._tb_dir))
        with named(self._tb_dir):  # errors of its writer thread are raised here without a file name
            for tag, value in _scalars(line):
                self._tb.add_scalar(tag, value, step, walltime=line["time"])

    def close(self) -> None:
        """Syncs and closes the files."""
        for file in self._files.values():
            file.sync()
            file.close()
        if self._rank == 0:
            self._rollup.close()
        if self._tb is not None:
            with named(self._tb_dir):
                self._tb.close()


def _scalars(line: dict[str, Any]) -> list[tuple[str, float]]:
    """TensorBoard tags and values: `train/loss`, `eval/ne/click`, ...; undefined ones are left out."""
    kind = line["kind"]
    values = {f"{kind}/{name}": line.get(name) for name in ("loss", "lr", "grad_norm", "skipped", "spikes")}
    values |= {f"throughput/{name}": line.get(name) for name in ("examples_per_s", "tokens_per_s", "effective_mfu")}
    values |= {f"unknown_ids/{table}": count for table, count in line.get("unknown_ids", {}).items()}
    for task, quality in line["tasks"].items():
        values |= {f"{kind}/{name}/{task}": quality.get(name) for name in ("ne", "auc", "calibration", "logloss")}
    return [(tag, value) for tag, value in values.items() if value is not None]
