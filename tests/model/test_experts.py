"""The stacked experts: against one expert after the other in float64, spread over a group, their counts and rules."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gemctl.model.experts import Exchange, WukongExperts
from gemctl.model.init import InitRule, init_rules
from gemctl.specs.interaction import WukongExpertsSpec

DIM = 6
CASES = {  # (experts, inputs): parts of 3 tokens, the last ones starting over; of 2; of 1, more experts than tokens
    "starting over": (WukongExpertsSpec(experts=4, tokens=5, fm_tokens=2, lc_tokens=3, rank=3, hidden=[7]), 10),
    "shortcut": (WukongExpertsSpec(experts=2, tokens=3, fm_tokens=1, lc_tokens=1, rank=2, hidden=[]), 4),
    "few tokens": (WukongExpertsSpec(experts=6, tokens=2, fm_tokens=2, lc_tokens=1, rank=2, hidden=[4, 5]), 4),
}
each_case = pytest.mark.parametrize(("spec", "inputs"), CASES.values(), ids=CASES.keys())


def made(spec: WukongExpertsSpec, inputs: int) -> WukongExperts:
    draw = torch.Generator().manual_seed(1)
    module = WukongExperts(spec, inputs, DIM).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return module


def tokens(rows: int, inputs: int) -> Tensor:
    return torch.randn(rows, inputs, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-6)


def one_by_one(module: WukongExperts, spec: WukongExpertsSpec, x: Tensor) -> Tensor:
    """The formulas of the module's docstring, a row and an expert at a time."""
    state, (rows, n, dim) = dict(module.named_parameters()), x.shape
    width = math.ceil(n / spec.experts)
    output = torch.zeros(rows, spec.tokens, dim, dtype=x.dtype)
    for b in range(rows):
        for e in range(spec.experts):
            own = torch.stack([x[b, (e * width + j) % n] for j in range(width)])
            h = norm((own @ own.T @ state["fm_columns"][e]).reshape(-1))
            for number in range(len(spec.hidden) + 1):
                h = h if number == 0 else h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
                h = state[f"fm_mlp.{number}.weight"][e] @ h + state[f"fm_mlp.{number}.bias"][e]
            together = torch.cat([h.reshape(spec.fm_tokens, dim), state["compression"][e] @ own])
            shortcut = state["residual"][e] @ own if "residual" in state else own
            output[b] = output[b] + state["merge"][e] @ norm(together + shortcut)
    return output


@each_case
def test_stacked_is_one_by_one(spec: WukongExpertsSpec, inputs: int) -> None:
    module, x = made(spec, inputs), tokens(3, inputs).requires_grad_()
    found, wanted = module(x), one_by_one(module, spec, x)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    leaves = [x, *module.parameters()]
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), leaves) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        assert b.any()


class OneRankOfTwo(Exchange):
    """Both ranks of a group in one process: gathers the other's rows, and keeps what it would send it."""

    def __init__(self, first: int, others: Tensor) -> None:
        self.first, self.others, self.sent = first, others, others[:0]

    def prefetch(self, x: Tensor) -> None:
        """Nothing is on its way here."""

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.others])

    def reduce_scatter(self, y: Tensor) -> Tensor:
        self.sent = y[-len(self.others) :]
        return y[: -len(self.others)]


@each_case
def test_held_experts_add_up_to_all(spec: WukongExpertsSpec, inputs: int) -> None:
    whole, x = made(spec, inputs), tokens(5, inputs)
    half = spec.experts // 2
    mine, others = x[:2], x[2:]
    parts = []
    for first in (0, half):
        rank = made(spec, inputs)
        rank.exchange = OneRankOfTwo(first, others)
        for module in rank.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(parameter.detach()[first : first + half]))
        parts.append(torch.cat([rank(mine), rank.exchange.sent]))
    torch.testing.assert_close(parts[0] + parts[1], whole(x), rtol=1e-11, atol=1e-11)


@each_case
def test_no_row_gives_no_row_and_zero_gradients(spec: WukongExpertsSpec, inputs: int) -> None:
    module = made(spec, inputs)
    output = module(tokens(0, inputs))
    assert output.shape == (0, spec.tokens, DIM)
    output.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in module.parameters())


@each_case
def test_counts_and_rules_are_the_modules(spec: WukongExpertsSpec, inputs: int) -> None:
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in WukongExperts(spec, inputs, DIM).named_parameters()}
    counted = spec.weights(inputs, DIM)
    assert {weight.name: weight.shape for weight in counted} == shapes
    assert all(shape[0] == spec.experts for shape in shapes.values())
    with FlopCounterMode(display=False) as found:
        made(spec, inputs)(tokens(3, inputs))
    assert found.get_total_flops() == 3 * sum(weight.flops for weight in counted)

    def fan_in(name: str) -> int:
        experts, rows, columns = shapes[name]
        return {"fm_columns": rows, "merge": experts * columns}.get(name, columns)

    assert init_rules(made(spec, inputs)) == {
        name: InitRule("zeros") if name.endswith("bias") else InitRule("uniform", fan_in(name) ** -0.5)
        for name in shapes
    }
