"""AdamW for the dense part, with its state allocated from the start, and the warm-up of both learning rates."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from gemctl.config.schema import DenseOptimConfig


class DenseOptimizer:
    """AdamW on sharded parameters; `applied` counts the updates (skipped steps make none).

    The update is elementwise, so it runs on each rank's own shards as plain tensors: parameters of several meshes fit
    into one fused call, which never waits for the device, and no step waits for DTensor to derive placements (0.4 s in
    the first one).
    """

    def __init__(self, dense: nn.Module, config: DenseOptimConfig) -> None:
        self.config = config
        self.names = {parameter: f"dense.{name}" for name, parameter in dense.named_parameters()}
        self.moments = {
            slot: [torch.zeros_like(parameter) for parameter in self.names] for slot in ("exp_avg", "exp_avg_sq")
        }
        self.steps = [torch.zeros((), device=parameter.device) for parameter in self.names]
        self._applied = 0

    @property
    def applied(self) -> int:
        """Updates applied so far."""
        return self._applied

    @applied.setter
    def applied(self, count: int) -> None:
        self._applied = count
        torch._foreach_zero_(self.steps)
        torch._foreach_add_(self.steps, float(count))

    @torch.no_grad()
    def step(self, factor: float, gradient_scale: float = 1.0) -> None:
        """One update at `factor` × the configured learning rate, with gradients × `gradient_scale`."""
        config = self.config
        columns = zip(self.names, *self.moments.values(), self.steps, strict=True)
        used = [(p, p.grad, mean, square, step) for p, mean, square, step in columns if p.grad is not None]
        *sharded, steps = (list(column) for column in zip(*used, strict=True))
        parameters, gradients, means, squares = map(_shards, sharded)
        if gradient_scale != 1.0:
            torch._foreach_mul_(gradients, gradient_scale)
        self._applied += 1
        adamw(
            parameters, gradients, means, squares, [], steps,
            fused=True, amsgrad=False, beta1=config.betas[0], beta2=config.betas[1], lr=config.lr * factor,
            weight_decay=config.weight_decay, eps=config.eps, maximize=False,
        )  # fmt: skip

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for parameter in self.names:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """First and second moments, by parameter name."""
        return {
            f"optim.{name}.{slot}": moment.detach()
            for slot, moments in self.moments.items()
            for name, moment in zip(self.names.values(), moments, strict=True)
        }


def _shards(values: list[Tensor]) -> list[Tensor]:
    """This rank's shards, as plain tensors that share their memory."""
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def warmup_factor(step: int, warmup: int) -> float:
    """Factor on both learning rates in step `step` (from 0): linear from 1/warmup to 1, then 1."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0
