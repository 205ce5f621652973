"""One training step over a global batch: look up, dense part in micro-batches, agree, update dense part and tables.

A step can be skipped as long as nothing has entered the tables, which are updated inside their own backward. So the
order is: look up the tables once · for each micro-batch forward, agree on the flags, backward to the looked-up
embeddings · agree on the gradient norm · update the dense part · backward through the tables · average their replicas.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gemctl.config.schema import Config
from gemctl.data.batch import Batch
from gemctl.data.order import local_slice
from gemctl.failpoints import planted
from gemctl.parallel.assemble import ShardedModel
from gemctl.parallel.dense import gradient_norm, sync_gradients
from gemctl.parallel.tables import LookedUp
from gemctl.parallel.traffic import Side
from gemctl.run.base import RolledBack
from gemctl.train.ledger import Ledger
from gemctl.train.optim import DenseOptimizer, warmup_factor
from gemctl.train.policy import NanStop, RollBack, Spikes
from gemctl.train.stragglers import Stragglers


@dataclass
class Flags:
    """What ranks agree on between forward and backward: a flag that any rank raises holds for all."""

    nonfinite: bool = False
    stop: bool = False
    save: bool = False
    spike: bool = False  # in the global loss, so no rank raises it by itself

    def with_those_of(self, other: "Flags") -> "Flags":
        """The flags that either has raised; `spike` is not exchanged."""
        return Flags(self.nonfinite or other.nonfinite, self.stop or other.stop, self.save or other.save)


@dataclass
class StepResult:
    """`loss`: global, summed over the tasks, each divided by its own weight; NaN if no row counts for any task.
    `logits` [B, T] of this rank's rows. `counted`: for each task, whether any rank has a row that counts for it."""

    loss: float
    logits: Tensor
    skipped: bool
    grad_norm: float | None
    lr: float
    flags: Flags = field(default_factory=Flags)
    counted: list[bool] = field(default_factory=list)


LEAST = 1e-12  # divides a task's loss where no row counts for it


@dataclass
class _Agreed:
    """What the ranks have agreed on in a micro-batch: the flags that any rank has raised in this step so far; the
    tasks' weights over all ranks, [T] float64 on the device and on the host; the ranks' clocks; the micro-batch's loss.
    """

    flags: Flags
    weights: Tensor
    tasks: list[float]
    clocks: Tensor
    loss: float = math.nan


class Stepper:
    """Runs the steps of one rank. Every method is collective over the world."""

    def __init__(
        self,
        config: Config,
        model: ShardedModel,
        optimizer: DenseOptimizer,
        ledger: Ledger,
        spikes: Spikes | None = None,
        stragglers: Stragglers | None = None,
    ) -> None:
        self.config, self.model, self.optimizer, self.ledger = config, model, optimizer, ledger
        self.spikes = spikes or Spikes(config.train.spike)
        self.world = dist.get_world_size(model.group)
        self.stragglers = stragglers or Stragglers(ledger, dist.get_rank(model.group), self.world)
        model.traffic.clock = partial(ledger.part, "exposed_communication")

    def step(self, index: int, batch: Batch, padded_rows: int, raised: Flags) -> StepResult:
        """Trains on this rank's rows of global batch `index`. `padded_rows`: to which lookups are padded, the same on
        every rank; `raised`: the flags that this rank raises."""
        with self.model.traffic.step():
            return self._step(index, batch, padded_rows, raised)

    def _step(self, index: int, batch: Batch, padded_rows: int, raised: Flags) -> StepResult:
        factor = warmup_factor(index, self.config.optim.dense.warmup)
        with self._part("tables_forward"):
            self.model.tables.scale_lr(factor)
            looked_up = self.model.tables(batch, padded_rows)
        loss, logits, flags, counted = self._micro_batches(index, batch, looked_up, raised)
        if not any(counted) and not flags.nonfinite:
            loss = math.nan
        result = StepResult(loss, logits, flags.nonfinite or flags.spike, None, self._lr(factor), flags, counted)
        if flags.nonfinite:
            self._not_finite(index, looked_up)
        elif not flags.spike:
            result.grad_norm = self._update(index, looked_up, factor)
            if any(counted):
                self.spikes.add(loss)
        with self._part("tables_sync"):
            self.model.tables.sync(index)
        self.optimizer.zero_grad()
        return result

    def pass_over(self, index: int) -> StepResult:
        """A step whose batch is passed over: does only what is due at this step number."""
        with self.model.traffic.step(), self._part("tables_sync"):
            self.model.tables.sync(index)
        factor = warmup_factor(index, self.config.optim.dense.warmup)
        return StepResult(math.nan, torch.empty(0), True, None, self._lr(factor))

    def _lr(self, factor: float) -> float:
        return self.config.optim.dense.lr * factor

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Seconds inside count as this part in the ledger, bytes as traffic of the part's side."""
        side = Side.WORLD if name in ("flag_wait", "optimizer") else Side(name.partition("_")[0])
        with self.ledger.part(name), self.model.traffic.on(side):
            yield

    def _micro_batches(
        self, index: int, batch: Batch, looked_up: LookedUp, raised: Flags
    ) -> tuple[float, Tensor, Flags, list[bool]]:
        """Forward and backward of the dense part; stops before backward at a non-finite loss or a spike.

        A spike is judged by the loss of the whole step, so it is only known at the last micro-batch.
        """
        count = self.config.train.accumulate
        rows = len(batch)
        if planted("grad_nan"):
            looked_up.leaves.tensors()[0].register_hook(lambda gradient: gradient * math.nan)
        logits, total, weights = [], 0.0, _task_weights(batch)
        agreed: _Agreed | None = None
        for micro in range(count):
            start, stop = micro * rows // count, (micro + 1) * rows // count
            part = batch if count == 1 else batch.slice(start, stop)
            embedded = looked_up.leaves if count == 1 else looked_up.leaves.slice(batch, start, stop)
            with self._part("dense_forward"):
                scores = self.model.logits(part, embedded, partial(self._rows, micro))
                losses = task_losses(scores, part)
                if planted("nan"):
                    losses = losses * math.nan
            with self._part("flag_wait"):
                agreed = self._agree(losses.detach(), weights, raised, agreed)
            self.stragglers.judge(index + 1, agreed.clocks)
            logits.append(scores.detach())
            total += agreed.loss
            last = micro == count - 1
            agreed.flags.spike = last and not agreed.flags.nonfinite and self.spikes.is_spike(total)
            if agreed.flags.nonfinite or agreed.flags.spike:
                if micro > 0:
                    self._drop_gradients(batch, looked_up)
                break
            with self._part("dense_backward"):
                sync_gradients(self.model.dense, last=last)
                # Both FSDP2 and TorchRec average over the ranks, hence × world.
                (losses / agreed.weights.clamp(min=LEAST).to(losses.dtype)).sum().mul(self.world).backward()
        assert agreed is not None  # there is a micro-batch
        return total, torch.cat(logits), agreed.flags, [weight > 0 for weight in agreed.tasks]

    def _drop_gradients(self, batch: Batch, looked_up: LookedUp) -> None:
        """Drops the gradients that FSDP2 has accumulated: a backward over no rows reduces them for `zero_grad`."""
        sync_gradients(self.model.dense, last=True)
        nothing = looked_up.leaves.slice(batch, 0, 0)
        self.model.logits(batch.slice(0, 0), nothing, lambda rank: 0).sum().backward()

    def _rows(self, micro: int, rank: int) -> int:
        """Rows of a rank's micro-batch; depends only on the global batch and the world size."""
        start, stop = local_slice(self.config.train.global_batch, rank, self.world)
        first, last = (number * (stop - start) // self.config.train.accumulate for number in (micro, micro + 1))
        return last - first

    def _agree(self, losses: Tensor, weights: Tensor, mine: Flags, before: "_Agreed | None") -> "_Agreed":
        """One sum over the ranks, for which the host waits. `weights` [T]: the tasks' weights on this rank; they are
        summed once per step, as are the clocks that stragglers are found by. `before`: of the previous micro-batch.
        """
        count = losses.numel()
        clocks = self.stragglers.due() if before is None else torch.empty(0, dtype=torch.float64)
        asked = torch.tensor([mine.nonfinite, mine.stop, mine.save, *clocks.tolist()], dtype=torch.float64)
        own = weights if before is None else torch.zeros_like(weights)
        message = torch.cat([losses.double(), own, _sent(asked, losses.device)])
        message[2 * count] += losses.isfinite().all().logical_not()
        if self.world > 1:
            dist.all_reduce(message, group=self.model.group)
        values: list[float] = message.tolist()
        sums, tasks, raised = values[:count], values[count : 2 * count], values[2 * count :]
        flags = Flags(nonfinite=raised[0] > 0, stop=raised[1] > 0, save=raised[2] > 0)
        heard = torch.tensor(raised[3:], dtype=torch.float64)
        if before is None:
            agreed = _Agreed(flags, message[count : 2 * count], tasks, heard)
        else:
            agreed = replace(before, flags=before.flags.with_those_of(flags), clocks=heard)
        agreed.loss = math.fsum(part / max(weight, LEAST) for part, weight in zip(sums, agreed.tasks, strict=True))
        return agreed

    def _update(self, index: int, looked_up: LookedUp, factor: float) -> float:
        with self._part("optimizer"):
            leaves = [leaf.grad for leaf in looked_up.leaves.tensors() if leaf.grad is not None]
            replicas = self.model.topology.dp_replicate
            norm = gradient_norm(self.model.dense, self.model.group, replicas, leaves)
            if not math.isfinite(norm):
                self._not_finite_gradient(index, all(bool(gradient.isfinite().all()) for gradient in leaves))
            bound = self.config.optim.dense.clip_norm
            clip = bound / norm if bound is not None and norm > bound else 1.0
            self.optimizer.step(factor, clip)
        with self._part("tables_backward"):
            self.model.tables.backward(looked_up)
        return norm

    def _not_finite_gradient(self, index: int, finite: bool) -> None:
        """Ends the attempt before anything is updated. `finite`: whether the gradients of this rank's lookups are."""
        cause = RolledBack(index, "gradient", self._ranks_where(not finite))
        raise RollBack(cause) if self.config.train.nan == "skip" else NanStop(f"{cause.text()} (train.nan=stop)")

    def _not_finite(self, index: int, looked_up: LookedUp) -> None:
        """Returns if the batch is to blame and can be skipped; raises otherwise."""
        if self.config.train.nan == "stop":
            raise NanStop(
                f"step {index}: the loss is not finite and train.nan=stop; nothing was updated. train.nan=skip skips "
                "such batches"
            )
        values = [*looked_up.leaves.tensors(), *(weight.detach() for weight in self.model.dense.parameters())]
        parts = [value.to_local() if isinstance(value, DTensor) else value for value in values]
        if ranks := self._ranks_where(not all(bool(part.isfinite().all()) for part in parts)):
            raise RollBack(RolledBack(index, "state", ranks))

    def _ranks_where(self, here: bool) -> list[int]:
        """The ranks on which `here` is true. Collective; for rare cases."""
        flags = torch.zeros(self.world, device=self.model.device)
        flags[dist.get_rank(self.model.group)] = here
        if self.world > 1:
            dist.all_reduce(flags, group=self.model.group)
        return [rank for rank, flag in enumerate(flags.tolist()) if flag]


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """A small host tensor, copied to `device` without waiting for it."""
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def task_losses(logits: Tensor, batch: Batch) -> Tensor:
    """Sum over the rows of weight · mask · binary cross-entropy, by task [T]; 0 without rows."""
    counts = batch.label_mask * batch.weight[:, None]
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
    return (each * counts).sum(0)


def _task_weights(batch: Batch) -> Tensor:
    return (batch.label_mask * batch.weight[:, None]).double().sum(0)
