"""Seconds of a call, on a GPU by events and with a cold L2 cache, on CPU by the clock.

python -c "import torch, gemctl.bench.clock as c; print(c.seconds(lambda: torch.ones(9), torch.device('cpu')))"
"""

import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

TARGET = 0.03  # seconds that one measurement takes, if a call is shorter
MOST = 20  # calls of one measurement
AHEAD = 2_000_000  # cycles that a GPU idles before each call, a millisecond, so that the host's launches are not timed
CACHE = 256 << 20  # bytes written between calls, more than any L2 cache holds

Call = Callable[[], Any]


def seconds(call: Call, device: torch.device) -> float:
    """Median seconds of several calls, after two that are not counted."""
    call()
    measure = _on_gpu if device.type == "cuda" else _on_cpu
    once = measure(call, 1)
    return measure(call, max(3, min(MOST, int(TARGET / once))))


def host_seconds(call: Call, device: torch.device, calls: int = 50) -> float:
    """Median seconds until a call returns, which on a GPU is before its work is done."""
    call()
    found = []
    for _ in range(calls):
        _wait(device)
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    _wait(device)
    return median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_gpu(call: Call, calls: int) -> float:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for start, end in events:
        _flush().zero_()
        torch.cuda._sleep(AHEAD)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events) / 1e3


@cache
def _flush() -> Tensor:
    return torch.empty(CACHE, dtype=torch.uint8, device="cuda")


def _on_cpu(call: Call, calls: int) -> float:
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return median(found)
