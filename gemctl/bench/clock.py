"""Timing of calls: on a GPU by events on its stream, on CPU by the clock.

python -c "import torch, gemctl.bench.clock as c; print(c.seconds(lambda: torch.ones(9), torch.device('cpu')))"
"""

import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

TARGET = 0.03  # seconds of one measurement, which repeats shorter calls
MOST = 20  # calls per measurement
CACHE = 256 << 20  # bytes written between calls, more than any L2 cache holds
MILLISECOND = 2_000_000  # GPU cycles, about

Call = Callable[[], Any]


def seconds(call: Call, device: torch.device) -> float:
    """Median seconds of several calls with a cold L2 cache, after two warm-up calls."""
    call()
    measure = _on_gpu if device.type == "cuda" else _on_cpu
    once = measure(call, 1)
    return measure(call, max(3, min(MOST, int(TARGET / once))))


def host_seconds(call: Call, device: torch.device, calls: int = 50) -> float:
    """Median seconds until a call returns, which on a GPU is before its work is done."""
    call()
    times = []
    for _ in range(calls):
        _synchronize(device)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    _synchronize(device)
    return median(times)


def start_ahead(device: torch.device, milliseconds: int) -> None:
    """Keeps a GPU busy while the host launches what follows, so that launches are not timed. Nothing on CPU."""
    if device.type == "cuda":
        torch.cuda._sleep(milliseconds * MILLISECOND)


def mark(device: torch.device) -> Any:
    """A point in time, on a GPU of its stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    """Seconds between two marks; waits for the second."""
    if isinstance(first, float):
        return float(second) - first
    second.synchronize()
    return float(first.elapsed_time(second)) / 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_gpu(call: Call, calls: int) -> float:
    device, marks = torch.device("cuda"), []
    for _ in range(calls):
        _flush().zero_()
        start_ahead(device, 1)
        first = mark(device)
        call()
        marks.append((first, mark(device)))
    return median(between(*pair) for pair in marks)


@cache
def _flush() -> Tensor:
    return torch.empty(CACHE, dtype=torch.uint8, device="cuda")


def _on_cpu(call: Call, calls: int) -> float:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)
