"""A rank's peak FLOP/s. On CPU: the rate of a 1,024³ fp32 matmul while all ranks of the host run it at once.

    peak = measure_peak(device)      # FLOP/s of this rank; effective MFU = useful FLOPs / (Σ peaks · seconds)

Ranks share cores, caches and memory bandwidth, so measuring one rank alone would overstate the peak. On a GPU it is the
dense bfloat16 rate of the data sheet, or of such a matmul if `cluster.hardware` does not list the GPU.
"""

import time

import torch
import torch.distributed as dist

from gemctl.cluster.hardware import find

SIDE = 1024


def measure_peak(device: torch.device, group: dist.ProcessGroup | None = None, budget: float = 0.25) -> float:
    """FLOP/s, measured in about `budget` seconds while every rank of `group` (None: all) runs it."""
    cuda = device.type == "cuda"
    known = find(torch.cuda.get_device_name(device)) if cuda else None
    if known is not None:
        return known.bf16
    side, dtype = (8 * SIDE, torch.bfloat16) if cuda else (SIDE, torch.float32)
    left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    if dist.is_available() and dist.is_initialized():
        dist.barrier(group=group)
    torch.mm(left, right, out=out)  # warm-up of threads and caches
    start = time.perf_counter()
    count, elapsed = 0, 0.0
    while elapsed < budget or count < 2:
        torch.mm(left, right, out=out)
        if cuda:
            torch.cuda.synchronize(device)
        count += 1
        elapsed = time.perf_counter() - start
    return 2 * side**3 * count / elapsed
