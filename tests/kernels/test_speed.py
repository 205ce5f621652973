"""The CPU backend against `scaled_dot_product_attention` on batches padded to their longest row, one thread.

python -m pytest tests/kernels/test_speed.py -m slow -s
"""

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention

HEADS, HEAD_DIM = 2, 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def uniform(rows: int, shortest: int, longest: int) -> Tensor:
    return torch.randint(shortest, longest + 1, (rows,))


def filled(rows: int, longest: int, fill: float) -> Tensor:
    """Lengths up to `longest` (reached once) whose mean is about fill · longest."""
    lengths = (torch.rand(rows) ** (1 / fill - 1) * longest).round().long()
    lengths[0] = longest
    return lengths


def fastest(calls: list[Callable[[], None]], repeats: int) -> list[float]:
    """Least CPU seconds of each call, taken in turn, so that a busy machine slows all of them alike."""
    seconds = [float("inf")] * len(calls)
    for repeat in range(repeats + 2):
        for i, call in enumerate(calls):
            start = time.process_time()
            call()
            if repeat >= 2:
                seconds[i] = min(seconds[i], time.process_time() - start)
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "least"), [("main job", 1.0), ("longest 512, fill .3", 2.0), ("longest 64, fill .3", 1.0)]
)
def test_examples_per_second_against_padding(kind: str, least: float) -> None:
    torch.manual_seed(0)
    lengths = {
        "main job": uniform(1024, 5, 60),
        "longest 512, fill .3": filled(64, 512, 0.3),
        "longest 64, fill .3": filled(64, 64, 0.3),
    }[kind]
    rows, longest = len(lengths), int(lengths.max())
    offsets = functional.pad(lengths.cumsum(0), (1, 0))
    q, k, v = (torch.randn(int(offsets[-1]), HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    wide_q, wide_k, wide_v = (torch.randn(rows, HEADS, longest, HEAD_DIM, requires_grad=True) for _ in range(3))
    grad, wide_grad = torch.randn_like(q), torch.randn_like(wide_q)
    hidden = torch.arange(longest) >= lengths[:, None, None, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -1e9)

    def jagged() -> None:
        jagged_flash_attention(q, k, v, offsets, offsets, longest, longest).backward(grad)

    def padded() -> None:
        functional.scaled_dot_product_attention(wide_q, wide_k, wide_v, mask).backward(wide_grad)

    jagged_seconds, padded_seconds = fastest([jagged, padded], 10)
    ratio = padded_seconds / jagged_seconds
    assert ratio >= least, (
        f"{kind}: {1e3 * jagged_seconds:.1f} ms, padded {1e3 * padded_seconds:.1f} ms, ratio {ratio:.2f}"
    )
