"""Task heads: one network a task, one output a domain."""

import torch
from torch import Tensor, nn

from gemctl.model.layers import MLP
from gemctl.specs.data import FeatureSpec


class TaskHeads(nn.Module):
    """[B, inputs] → logits [B, T]: of each task's outputs, the one of the row's domain (one if there are none)."""

    def __init__(self, spec: FeatureSpec, inputs: int, hidden: list[int]) -> None:
        super().__init__()
        domains = spec.domain.count if spec.domain else 1
        self.tasks = nn.ModuleList(MLP(inputs, hidden, domains) for _ in spec.labels)

    def forward(self, x: Tensor, domain: Tensor) -> Tensor:
        return torch.cat([task(x).gather(1, domain[:, None]) for task in self.tasks], dim=1)
