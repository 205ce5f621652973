"""A rank's peak on CPU: the rate of an fp32 matmul of 1,024³ while all local ranks run it at once.

    peak = measure_peak()      # FLOP/s of this rank; effective MFU = useful FLOPs / (Σ peaks · seconds)

Ranks that share cores, caches and memory can't have more than they have together, so alone would flatter no one.
"""

import time

import torch
import torch.distributed as dist

SIDE = 1024


def measure_peak(group: dist.ProcessGroup | None = None, budget: float = 0.25) -> float:
    """FLOP/s (2·1024³ a matmul) with every rank of `group` (None: all) at work; takes about `budget` seconds."""
    left, right = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
    out = torch.empty(SIDE, SIDE)
    if dist.is_available() and dist.is_initialized():
        dist.barrier(group=group)
    torch.mm(left, right, out=out)  # threads and caches warm up
    start = time.perf_counter()
    count, elapsed = 0, 0.0
    while elapsed < budget or count < 2:
        torch.mm(left, right, out=out)
        count += 1
        elapsed = time.perf_counter() - start
    return 2 * SIDE**3 * count / elapsed
