"""The kernel benchmark: gemctl's ops and alternatives (peers), alternating on the same inputs.

    gemctl bench kernels --peer fa2=gemctl.bench.peers:fa2_varlen

Each repeat times all contenders of a case in turn, so that a GPU that slows down slows all of them. FLOP/s count useful
pairs, and the backward as 2.5 forwards, as is usual for kernels; for the two memory-bound ops, bytes/s count every
tensor once. For comparison, an 8192³ matmul and a copy are measured before each case.
"""

import importlib
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median

import torch
from torch import Tensor

from gemctl.bench.cases import MEMORY_BOUND, OPS, SHAPES, SMALL, Case, Shape, make
from gemctl.bench.clock import host_seconds, seconds
from gemctl.bench.results import NOT_DONE, KernelBench, KernelSettings, Timing
from gemctl.errors import InputError
from gemctl.kernels import dispatch

OURS = "gemctl"
SETTINGS = "batch", "heads", "head_dim", "dtype", "repeats", "small"
MATMUL = 8192
COPY = 1 << 30  # elements of two bytes
DIRECTIONS = ("forward", "backward")
BACKWARD = 2.5  # of a forward's FLOPs, as kernel tables count them
Peer = Callable[[Case], Callable[[], Tensor] | None]


def peers(words: list[str]) -> dict[str, Peer]:
    """The functions of NAME=module:function words. InputError for all that cannot be used."""
    found: dict[str, Peer] = {}
    problems = []
    for word in words:
        name, _, path = word.partition("=")
        if not name or name in {OURS, *found}:
            problems.append(f"--peer {word}: the name {name!r} is empty or taken (expected NAME=module:function)")
            continue
        try:
            found[name] = _function(path)
        except Exception as error:  # importing a module can raise anything
            problems.append(f"--peer {word}: {error} (expected NAME=module:function)")
    if problems:
        raise InputError(problems)
    return found


def _function(path: str) -> Peer:
    """The function of `module:function`."""
    module, _, name = path.partition(":")
    function: Peer = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{name} is not a function but {function!r}")
    return function


def run(settings: KernelSettings) -> KernelBench:
    """The whole benchmark, with the same random inputs each time."""
    start = time.monotonic()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        value = measure(settings, peers(settings.peer))
    value.settings |= {
        "seconds": f"{time.monotonic() - start:.0f}",
        "backends": ", ".join(sorted(set(dispatch.used().values()))),
    }
    return value


def measure(args: KernelSettings, contenders: dict[str, Peer]) -> KernelBench:
    """All timings."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, shapes = getattr(torch, args.dtype), _shapes(args, device)
    bench = KernelBench(
        device=torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        versions=_versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=[],
        settings={name: str(getattr(args, name)) for name in SETTINGS},
        matmul=[], copy=[], host={}, schedule=0.0, timings=[],
    )  # fmt: skip
    sizes = args.batch, args.heads, args.head_dim, dtype, device
    for op in args.op or OPS:
        for shape in shapes:
            if OPS[op](shape):
                _measure_case(bench, op, shape, sizes, contenders, args.repeats, args.small)
        smallest = make(op, SMALL[0], 4, *sizes[1:])
        bench.host[op] = host_seconds(smallest.call, device)
    if device.type == "cuda":
        bench.schedule = schedule_seconds(make("gdpa", shapes[-1], *sizes))
    return bench


def _shapes(args: KernelSettings, device: torch.device) -> list[Shape]:
    """The shapes to measure. InputError has all problems of the settings."""
    known = SMALL if args.small else SHAPES
    names = [shape.name for shape in known]
    problems = [f"--case {name!r}: unknown (one of {', '.join(names)})" for name in args.case if name not in names]
    for option in ("batch", "heads", "head_dim", "repeats"):
        if getattr(args, option) < 1:
            problems.append(f"--{option.replace('_', '-')} {getattr(args, option)}: must be at least 1")
    if device.type == "cpu" and not args.small:
        problems.append("there is no GPU here: use --small for tiny shapes")
    if problems:
        raise InputError(problems)
    return [shape for shape in known if not args.case or shape.name in args.case]


def _measure_case(
    bench: KernelBench,
    op: str,
    shape: Shape,
    sizes: tuple[int, int, int, torch.dtype, torch.device],
    contenders: dict[str, Peer],
    repeats: int,
    small: bool,
) -> None:
    """Adds the timings of an op and a shape, and the rates of the matmul and the copy before them."""
    case = make(op, shape, *sizes)
    device = case.k.device
    bench.matmul.append(_matmul(case.k.dtype, device, 256 if small else MATMUL))
    bench.copy.append(_copy(device, 1 << 20 if small else COPY))
    prepared = {name: _prepare(case, peer) for name, peer in {OURS: _ours, **contenders}.items()}
    found: dict[tuple[str, str], list[float]] = {(name, way): [] for name in prepared for way in DIRECTIONS}
    for _ in range(repeats):
        for (name, way), times in found.items():
            calls = prepared[name]
            if not isinstance(calls, str):
                times.append(seconds(calls[DIRECTIONS.index(way)], device))
    best = bench.copy[-1] if op in MEMORY_BOUND else bench.matmul[-1]
    for (name, way), times in found.items():
        bench.timings.append(_timing(case, way, name, times, best, prepared[name]))
    _progress(bench.timings[-len(found) :])
    if device.type == "cuda":
        del prepared
        torch.cuda.empty_cache()


def _timing(case: Case, way: str, name: str, times: list[float], best: float, prepared: object) -> Timing:
    bound = case.op in MEMORY_BOUND
    work = case.bytes(way == "backward") if bound else case.flops() * (BACKWARD if way == "backward" else 1)
    rate = work / median(times) if times else None
    return Timing(
        op=case.op,
        case=case.shape.name,
        direction=way,
        contender=name,
        seconds=times,
        median=median(times) if times else None,
        rate=rate,
        unit="B/s" if bound else "FLOP/s",
        share=rate / best if rate else None,
        why_not=prepared if isinstance(prepared, str) else None,
    )


def _progress(timings: list[Timing]) -> None:
    """Writes a case's rates as soon as it is done, as a benchmark takes minutes."""
    rates = [f"{x.contender} {x.direction} {x.rate:.4g}" for x in timings if x.rate is not None]
    sys.stderr.write(f"{timings[0].op}, {timings[0].case}, {timings[0].unit}: {', '.join(rates)}\n")
    sys.stderr.flush()


def _ours(case: Case) -> Callable[[], Tensor]:
    return case.call


def _prepare(case: Case, peer: Peer) -> tuple[Callable[[], object], Callable[[], object]] | str:
    """Calls of the forward and the backward, or the reason why there are none."""
    try:
        forward = peer(case)
        if forward is None:
            return NOT_DONE
        output = forward()
        grad = torch.randn_like(output)
        inputs = case.q, case.k, case.v

        def backward() -> object:
            return torch.autograd.grad(output, inputs, grad, retain_graph=True)

        backward()
        return forward, backward
    except Exception as error:  # a peer can raise anything; a failure is a result
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _matmul(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """FLOP/s of a square matmul."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device)


def _copy(device: torch.device, elements: int) -> float:
    """Bytes/s of a copy, reads and writes."""
    source = torch.ones(elements, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)


def schedule_seconds(case: Case) -> float:
    """Seconds on the GPU to compute a tile schedule, replayed from a CUDA graph."""
    from gemctl.kernels import schedule  # noqa: PLC0415

    def build() -> None:
        schedule.tiles(case.q_offsets, case.q.shape[0], 128, case.k_offsets)

    build()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build()
    return seconds(graph.replay, case.q.device)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    if torch.version.cuda:
        import triton  # noqa: PLC0415

        found |= {"cuda": torch.version.cuda, "triton": triton.__version__}
    return found
