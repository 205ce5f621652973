"""The ops compiled, in CUDA graphs, and what a call costs the host; on a GPU, not collected by itself.

    python -m pytest tests/kernels/gpu_compile.py -rP -n 8

Compiled and captured calls start the same kernels on the same tiles as eager ones, so results are equal bit for bit.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from gemctl.kernels import dispatch
from gemctl.kernels.block_attention.op import block_attention
from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged import every
from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
from gemctl.kernels.pooled_attention.op import pooled_attention

HEADS, DIM = 4, 64
Op = Callable[..., Tensor]  # of q, k, v and offsets
DTYPES = (torch.bfloat16, torch.float32)
# Means on both sides of the length where the tiles change; the same number of tokens and rows in the first two.
BATCHES = [[300, 0, 1, 83], [1, 350, 33, 0], [2000, 900, 1, 2, 700], [64, 64, 64], [5, 0, 3000], [129] * 9]


def flash(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return jagged_flash_attention(q, k, v, rows, rows, 1, 1, causal=True)


def score(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return gdpa(q, k, v, rows, rows, 1, 1, activation="fast_gelu", pre_scale=0.1)


def personal(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Keys of equal lengths, as a personalised feed-forward has them."""
    keys = every(2, rows)
    count = 2 * (rows.shape[0] - 1)
    return gdpa(q, k[:count], v[:count], rows, keys, 1, 2, activation="silu", pre_scale=0.1)


def shared(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return gdpa(q[:3], k, v, None, rows, 1, 1, activation="gelu", pre_scale=0.1, broadcast_q=True)


def block(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return block_attention(q, k, v, rows, 1)


def pooled(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return pooled_attention(q[:4], k, v, rows, 1)


def many_seeds(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return pooled_attention(q[:70], k, v, rows, 1)


OPS: list[Op] = [flash, score, personal, shared, block, pooled, many_seeds]


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0)


def inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    made = torch.randn(3, tokens, HEADS, DIM, generator=generator, device="cuda").to(dtype)
    return [x.clone().requires_grad_() for x in made]


def step(op: Op, x: list[Tensor], rows: Tensor) -> list[Tensor]:
    """Output and gradients."""
    output = op(*x, rows)
    grad = torch.sin(torch.arange(output.numel(), device="cuda")).view(output.shape).to(output.dtype)
    return [output.detach().clone(), *(g.clone() for g in torch.autograd.grad(output, x, grad))]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_compiled_once_for_all_lengths(op: Op, dtype: torch.dtype) -> None:
    compiled = torch.compile(op, fullgraph=True, dynamic=True)
    for lengths in BATCHES:
        x, rows = inputs(sum(lengths), dtype), offsets(lengths)
        assert same(step(compiled, x, rows), step(op, x, rows)), lengths
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("op", OPS)
def test_replays_of_reduce_overhead_follow_the_offsets(op: Op) -> None:
    compiled = torch.compile(op, mode="reduce-overhead", fullgraph=True)
    for turn in range(3):
        for lengths in BATCHES[:2]:
            x, rows = inputs(sum(lengths), torch.bfloat16), offsets(lengths)
            torch.compiler.cudagraph_mark_step_begin()
            assert same(step(compiled, x, rows), step(op, x, rows)), (turn, lengths)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("op", OPS)
def test_replays_of_a_captured_step_follow_the_offsets(op: Op) -> None:
    first, second = BATCHES[:2]
    x, rows = inputs(sum(first), torch.bfloat16), offsets(first)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(op, x, rows)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(op, x, rows)
    for lengths in (second, first):
        rows.copy_(offsets(lengths))
        graph.replay()
        assert same(captured, step(op, x, rows)), lengths


def chain(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """All ops one after another, on keys and values that they share, so that gradients are added up between them."""
    seen = jagged_flash_attention(q * 2, k, v, rows, rows, 1, 1, causal=True)
    scored = gdpa(seen, k, v, rows, rows, 1, 1, activation="gelu_approx", pre_scale=0.1)
    return pooled_attention(q[:2], block_attention(scored, k, v, rows, 1), v, rows, 1)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_compiled_ops_together_are_as_accurate_as_eager_ones(dtype: torch.dtype, most: float) -> None:
    """Against the definitions in float64: Inductor may round the sums between the ops once where eager rounds twice."""
    compiled = torch.compile(chain, fullgraph=True, dynamic=True)
    for lengths in BATCHES[:2]:
        x, rows = inputs(sum(lengths), dtype), offsets(lengths)
        with dispatch.use("reference"):
            wanted = step(chain, [y.detach().double().requires_grad_() for y in x], rows)
        pairs = zip(step(chain, x, rows), step(compiled, x, rows), wanted, strict=True)
        for eager, found, exact in pairs:
            errors = [((y.double() - exact).norm() / exact.norm()).item() for y in (eager, found)]
            report(f"{dtype} {lengths}: eager {errors[0]:.2e}, compiled {errors[1]:.2e}")
            assert errors[1] <= min(most, 1.1 * errors[0] + 1e-7)
    assert counters["stats"]["unique_graphs"] == 1


def microseconds(call: Callable[[], Any], turns: int = 7, calls: int = 100) -> float:
    """Host time of one call, not waiting for the GPU: median of several turns."""
    found = []
    for _ in range(turns):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return median(found)


@pytest.mark.parametrize("op", OPS)
def test_host_time(op: Op) -> None:
    """Small batches, so that the GPU's queue never fills up."""
    x, rows = inputs(sum(BATCHES[0]), torch.bfloat16), offsets(BATCHES[0])
    output = op(*x, rows)
    grad = torch.ones_like(output)
    forward = microseconds(lambda: op(*x, rows))
    backward = microseconds(lambda: torch.autograd.grad(output, x, grad, retain_graph=True, allow_unused=True))
    new = microseconds(lambda: op(*x, rows.clone())) - microseconds(rows.clone)
    report(f"{op.__name__}: forward {forward:.0f} us, backward {backward:.0f} us, with a new schedule {new:.0f} us")


def report(line: str) -> None:
    import sys  # noqa: PLC0415

    sys.stdout.write(line + "\n")
