"""AdamW over the dense part, whose state exists from the start, and the warm-up of both learning rates."""

from typing import Any

import torch
from torch import Tensor, nn

from gemctl.config.schema import DenseOptimConfig


class DenseOptimizer:
    """AdamW on sharded parameters; `applied` counts the steps that changed them (a skipped step does not)."""

    def __init__(self, dense: nn.Module, config: DenseOptimConfig) -> None:
        self.config = config
        self.names = {parameter: f"dense.{name}" for name, parameter in dense.named_parameters()}
        self.adamw = torch.optim.AdamW(
            _by_mesh(dense),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )
        for parameter in self.names:
            self.adamw.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @property
    def applied(self) -> int:
        """Updates applied so far."""
        return int(next(iter(self.adamw.state.values()))["step"])

    @applied.setter
    def applied(self, count: int) -> None:
        for slots in self.adamw.state.values():
            slots["step"].fill_(float(count))

    def step(self, factor: float) -> None:
        """One update at `factor` × the configured learning rate."""
        for group in self.adamw.param_groups:
            group["lr"] = self.config.lr * factor
        self.adamw.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """First and second moments, by parameter name."""
        return {
            f"optim.{name}.{slot}": self.adamw.state[parameter][slot].detach()
            for parameter, name in self.names.items()
            for slot in ("exp_avg", "exp_avg_sq")
        }


def _by_mesh(dense: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Parameter groups of one mesh each, as one fused update can't take tensors of two."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in dense.parameters():
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": parameters} for parameters in found.values()]


def warmup_factor(step: int, warmup: int) -> float:
    """What step `step` (from 0) multiplies both learning rates by: linear from 1/warmup to 1, then 1."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0
