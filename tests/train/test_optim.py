"""The schedule of the learning rates, and a dense optimizer whose state is there before the first step."""

import torch

from gemctl.config.schema import DenseOptimConfig
from gemctl.train.optim import DenseOptimizer, warmup_factor


def test_warmup_then_constant() -> None:
    assert [warmup_factor(step, 4) for step in (0, 1, 3, 4, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert warmup_factor(0, 0) == 1.0


def test_state_made_before_the_first_step_changes_nothing() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizer = DenseOptimizer(ours, DenseOptimConfig(lr=0.1, weight_decay=0.02))
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.02)
    assert optimizer.applied == 0
    for _ in range(3):
        for module in (ours, theirs):
            module.zero_grad()
            module(torch.ones(4, 3)).square().sum().backward()
        optimizer.step(1.0)
        plain.step()
    assert optimizer.applied == 3
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, reference)
