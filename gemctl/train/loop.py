"""The training loop of one rank: batches, steps, evaluations, checkpoints; stops when all ranks agree to stop.

torchrun -m gemctl.ranks.worker RUN      # runs it by hand
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from gemctl.checkpoint.save import Saver
from gemctl.config.schema import Config
from gemctl.data.batch import Batch
from gemctl.data.loader import Loader, eval_batches
from gemctl.parallel.assemble import ShardedModel
from gemctl.run.rank_records import Stage
from gemctl.specs.data import FeatureSpec
from gemctl.train.ledger import Ledger
from gemctl.train.log import TrainLog
from gemctl.train.metrics import TaskMetrics
from gemctl.train.optim import DenseOptimizer
from gemctl.train.peak import measure_peak
from gemctl.train.policy import MAX_SKIPPED, NothingLearned, Spikes, TooManySkipped, nothing_counted
from gemctl.train.step import Flags, Stepper, StepResult
from gemctl.train.stragglers import Stragglers


@dataclass
class Trainer:
    """Everything that one rank trains with. `stage(name, step)` reports where this rank is."""

    config: Config
    spec: FeatureSpec
    model: ShardedModel
    optimizer: DenseOptimizer
    saver: Saver
    log: TrainLog
    ledger: Ledger
    flops: Callable[[Batch], float]
    stage: Callable[[Stage, int | None], None]
    flags: Callable[[], Flags]  # raised by this rank in the step that begins
    stop_requested: Callable[[], bool]  # on any rank, for all
    rank: int
    world: int
    done: int = 0  # completed steps
    skipped: int = 0  # the number of these that were skipped in a row, up to the last one
    counted: set[str] = field(default_factory=set)  # tasks for which any row has counted so far
    spikes: Spikes = field(init=False)
    stragglers: Stragglers = field(init=False)

    def __post_init__(self) -> None:
        self.spikes = Spikes(self.config.train.spike)
        self.stragglers = Stragglers(self.ledger, self.rank, self.world)

    @property
    def padded_rows(self) -> int:
        """Rows to which each lookup is padded: the most that any rank holds of a global batch, at least one."""
        return max(1, -(-self.config.train.global_batch // self.world))

    def state(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint by name."""
        return self.model.state() | self.optimizer.state()

    def run(self, start_step: int, passed_over: Collection[int] = ()) -> bool:
        """Trains from `start_step` to the configured end; True if it got there, False if it was asked to stop.

        `passed_over`: steps whose batches are passed over; they count as done. Raises RollBack if the run has to go
        back to a checkpoint.
        """
        stepper = Stepper(self.config, self.model, self.optimizer, self.ledger, self.spikes, self.stragglers)
        train = self.config.train
        with self.ledger.part("data_wait"):
            loader = Loader(
                self.config.data, self.spec, global_batch=train.global_batch, seed=self.config.run.seed,
                rank=self.rank, world=self.world, start_step=start_step,
            )  # fmt: skip
        self.done = saved = start_step
        try:
            while self.done < train.steps:
                self.saver.check()
                result = self._step(stepper, loader, self.done, passed_over)
                self.done += 1
                saves = self._save_due(result.flags)
                self._flush(result, saves)
                seen = self.done * train.global_batch
                if not self.counted and seen >= loader.epoch_rows and self.optimizer.applied == self.done:
                    raise nothing_counted(self.tasks, f"all {loader.epoch_rows} rows")
                if saves:
                    saved = self.save()
                if result.flags.stop:
                    break
                if train.eval_every and self.done % train.eval_every == 0 and self.done < train.steps:
                    self.evaluate(may_wait=True)
        finally:
            loader.close()
        finished = self.done >= train.steps
        if finished:
            self._check_learned()
        if saved != self.done:
            self.save()
        if finished:
            self.evaluate()
        self.stage("save", self.done)
        with self.ledger.part("checkpoint_stall"):
            self.saver.wait()
        return finished

    def _step(self, stepper: Stepper, loader: Loader, index: int, passed_over: Collection[int]) -> StepResult:
        self.stage("data", index)
        with self.ledger.part("data_wait"):
            step, batch = next(loader)
        if step != index:
            raise RuntimeError(f"the loader returned batch {step} in step {index}")
        if index in passed_over:
            self.log.passed_over()
            return stepper.pass_over(index)
        self.stage("step", index)
        with self.ledger.part("data_wait"):
            batch = batch.to(self.model.device)
        result = stepper.step(index, batch, self.padded_rows, self.flags())
        with self.ledger.part("log"):
            self.log.stragglers(self.stragglers.named())
            if result.skipped:
                self._skipped(index, result.flags)
            else:
                self.skipped = 0
                self.counted.update(task for task, counts in zip(self.tasks, result.counted, strict=True) if counts)
                self.log.add(batch, result.logits, loss=result.loss, flops=self.flops(batch), counted=result.counted)
        if self.log.peak is None:
            self.ledger.first_step_done()
            with self.ledger.part("peak"):
                self.log.peak = measure_peak(self.model.device, self.model.group)
        return result

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return [label.name for label in self.spec.labels]

    def _check_learned(self) -> None:
        """Raises NothingLearned if all steps are done but none was applied, or no row has counted."""
        steps = self.config.train.steps
        if self.optimizer.applied == 0:
            raise NothingLearned(
                f"none of the {steps} steps was applied, as no loss was finite: the model has not changed. "
                "Check the rows of these batches, or lower optim.dense.lr"
            )
        if not self.counted:
            raise nothing_counted(self.tasks, f"the {steps} batches")

    def _skipped(self, index: int, flags: Flags) -> None:
        self.log.skipped(spike=flags.spike)
        self.skipped += 1
        if self.skipped >= MAX_SKIPPED:
            raise TooManySkipped(index)

    def _save_due(self, flags: Flags) -> bool:
        every = self.config.checkpoint.every
        return flags.save or flags.stop or bool(every and self.done % every == 0)

    def _flush(self, result: StepResult, saves: bool) -> None:
        """Ends the logs' interval when due, and at each save, so that an attempt can start with a complete one."""
        train = self.config.train
        if self.done % train.log_every == 0 or self.done == train.steps or saves:
            with self.ledger.part("log"):
                lost = self.stragglers.take()
                self.log.flush(self.done, lr=result.lr, grad_norm=result.grad_norm, stragglers=lost)

    def save(self) -> int:
        """Starts an asynchronous checkpoint of the current state; returns its step."""
        self.stage("save", self.done)
        self._average_tables()
        with self.ledger.part("checkpoint_stall"):
            position = {"step": self.done, "applied_updates": self.optimizer.applied, **self.spikes.position()}
            position["skipped_in_a_row"] = self.skipped  # an attempt that starts here continues the count
            position["counted"] = sorted(self.counted)
            self.saver.save(self.done, self.state(), position)
        return self.done

    def _average_tables(self) -> None:
        """Averages table replicas, which may have diverged since the last average, so that they agree on the state."""
        with self.ledger.part("tables_sync"):
            self.model.tables.average()

    def evaluate(self, *, may_wait: bool = False) -> None:
        """NE and AUC over all eval rows; does nothing if the configuration has none.

        An evaluation that `may_wait` is abandoned when the run is asked to stop: the grace period is short, and the
        next step saves.
        """
        if self.config.data.eval is None:
            return
        self._average_tables()
        metrics = TaskMetrics(self.tasks, self.model.device)
        start = time.perf_counter()
        with self.ledger.part("eval"):
            batches = eval_batches(
                self.config.data, self.spec, global_batch=self.config.train.global_batch,
                rank=self.rank, world=self.world,
            )  # fmt: skip
            for on_host in batches:
                self.stage("eval", self.done)
                if may_wait and self._stop_requested():
                    return
                batch = on_host.to(self.model.device)
                logits = self.model.predict(batch, self.padded_rows)
                metrics.update(logits, batch.labels, batch.label_mask, batch.weight, batch.true_probability)
            metrics.reduce(self.model.group)
            self.log.evaluated(self.done, metrics.compute(), time.perf_counter() - start)

    def _stop_requested(self) -> bool:
        """Whether any rank sees a stop request; the same on every rank."""
        requested = torch.tensor([float(self.stop_requested())], device=self.model.device)
        dist.all_reduce(requested, group=self.model.group)
        return bool(requested.item())
