"""A GPU's ledger beside a profiler's trace of the same steps: parts, memory, useful FLOPs.

    python -m gemctl.bench.log kunlun_1gpu
    python -m tests.model.gpu_ledger experiment=kunlun_1gpu        # exit 1 where a part is off

The product's own step over batches that are on the GPU already. A part's time in the trace is from its first kernel to
that of the next part. A part agrees if it is within 5% of itself or .5% of a step.
"""

import json
import os
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from gemctl.config.compose import compose
from gemctl.data.loader import Loader
from gemctl.mesh.topology import resolve
from gemctl.parallel.assemble import assemble
from gemctl.ranks.worker import init_world
from gemctl.specs import feature_spec
from gemctl.specs.count import step_flops
from gemctl.train.ledger import Ledger, gpu_memory
from gemctl.train.optim import DenseOptimizer
from gemctl.train.peak import measure_peak
from gemctl.train.step import Flags, Stepper
from tests.kernels.gpu_train import WORLD

BATCHES, WARM, STEPS = 4, 4, 8
MARK = "part: "


class Marked(Stepper):
    """Names its parts in the trace."""

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        with super()._part(name), record_function(MARK + name):
            yield


def in_trace(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by part. A kernel belongs to the part within which the host launched it, from whatever thread."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(MARK))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)
    )
    begins = [begin for begin, _, _ in spans]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in {"cuda_runtime", "cuda_driver"} and "correlation" in event.get("args", {})
    }
    work = [event for event in events if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    first: dict[int, float] = {}
    for event in work:
        at = launched.get(event["args"].get("correlation"))
        index = -1 if at is None else bisect_right(begins, at) - 1
        if index >= 0 and at is not None and at <= spans[index][1]:
            first[index] = min(event["ts"], first.get(index, event["ts"]))
    order = sorted(first, key=lambda index: first[index])
    ends = [first[index] for index in order[1:]] + [max(event["ts"] + event["dur"] for event in work)]
    seconds: dict[str, float] = defaultdict(float)
    for index, end in zip(order, ends, strict=True):
        seconds[spans[index][2]] += (end - first[index]) / 1e6
    return seconds


def main(words: list[str]) -> int:
    os.environ.update(WORLD | {key: os.environ[key] for key in WORLD if key in os.environ})
    config = compose(None, words)
    device = init_world("cuda")
    spec = feature_spec.load(config.data.spec)
    model = assemble(config, spec, resolve(config.topology, config.launcher), device)
    model.initialise(config.run.seed)
    ledger = Ledger()
    stepper = Marked(config, model, DenseOptimizer(model.dense, config.optim.dense), ledger)
    rows = config.train.global_batch
    loader = Loader(config.data, spec, global_batch=rows, seed=0, rank=0, world=1)
    batches = [next(loader)[1] for _ in range(BATCHES)]
    loader.close()
    flops = [
        step_flops(config.model, spec, rows, {n: s.offsets.diff().numpy() for n, s in batch.sequences.items()})
        for batch in batches
    ]
    batches = [batch.to(device) for batch in batches]
    for index in range(WARM):
        stepper.step(index, batches[index % BATCHES], rows, Flags())
    ledger.first_step_done()
    ledger.take()
    start = time.perf_counter()
    for index in range(WARM, WARM + STEPS):
        stepper.step(index, batches[index % BATCHES], rows, Flags())
    plain = ledger.take()
    wall = time.perf_counter() - start
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as traced:
        for index in range(WARM, WARM + STEPS):
            stepper.step(index, batches[index % BATCHES], rows, Flags())
        clocked = ledger.take()
    traced.export_chrome_trace("/tmp/gpu_ledger_trace.json")
    with open("/tmp/gpu_ledger_trace.json", encoding="utf-8") as file:  # noqa: PTH123
        trace = in_trace(json.load(file)["traceEvents"])
    step = clocked["wall"] / STEPS
    off = []
    for name in sorted(trace, key=lambda name: -trace[name]):
        own, want = clocked[name] / STEPS, trace[name] / STEPS
        good = abs(own - want) <= max(0.05 * want, 0.005 * step)
        off += [] if good else [name]
        sys.stdout.write(
            f"{name:22} ledger {own * 1e3:8.2f} ms  trace {want * 1e3:8.2f} ms  {'' if good else 'OFF'}"
            f"  (without profiler {plain[name] / STEPS * 1e3:8.2f} ms)\n"
        )
    mfu = sum(flops) / BATCHES / (wall / STEPS) / measure_peak(device)
    memory = {name: round(size / 2**30, 2) for name, size in gpu_memory().items()}
    sys.stdout.write(
        f"{' '.join(words)}: step {wall / STEPS * 1e3:.1f} ms, "
        f"unaccounted {plain['unaccounted'] / STEPS * 1e3:.2f} ms, "
        f"{sum(flops) / BATCHES / 1e12:.1f} TFLOP, MFU on resident batches {mfu:.1%}, GiB {memory}\n"
    )
    dist.destroy_process_group()
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
