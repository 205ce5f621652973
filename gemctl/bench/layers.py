"""Each module of the dense part alone, at a run's shapes: forward and backward time, useful FLOPs, local MFU.

    gemctl bench layers experiment=synthetic

A module is called on the inputs that it has in a forward of the whole dense part, over real batches of the run, without
communication; its gradients are those of its parameters and of the inputs that need one. On CPU all ranks of a host
measure at once, as they do in the run and when the peak is measured, so local MFU is what a rank gets out of its share
of the machine. The rows that are summed are the steps of the dense part: tokens, events, each layer, heads and the
loss; they are all of it but a few concatenations. The parts of each layer have rows too.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemctl.bench.batches import Ints, filled, random_batch
from gemctl.bench.clock import Call, between, mark, start_ahead
from gemctl.bench.ranks import on_ranks
from gemctl.config.schema import Config
from gemctl.data.batch import Batch
from gemctl.data.files import find_files, shown
from gemctl.data.loader import Loader
from gemctl.errors import InputError
from gemctl.model.embeddings import Embedded
from gemctl.model.gem import DenseModel
from gemctl.model.init import init_rules
from gemctl.parallel.init import Slice, fill
from gemctl.plan.data_facts import data_facts
from gemctl.report.layers import Layers, LayerTime, subject, worlds
from gemctl.specs.count import module_flops
from gemctl.specs.data import FeatureSpec
from gemctl.train.peak import measure_peak
from gemctl.train.step import task_losses

BATCHES = 3
REPEATS = 5
STEPS = re.compile(r"tokens|events\.[^.]+|merge|layers\.\d+|heads")
INSIDE = re.compile(r"layers\.\d+\.(x_sum|(adapters|summary)\.[^.]+|sequence\.[^.]+\.(ffn|attention)|interaction)")
LOSS = "loss"
TOGETHER = "all together"


@dataclass
class Times:
    """Seconds by module over all batches. `summed`: the modules to add up; `together`: forward and backward at once."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)
    together: float = 0.0


Measured = tuple[Times, float, dict[str, float], tuple[int, int, str]]


def measure(config: Config, spec: FeatureSpec) -> Layers:
    """Forks the ranks; the result has means over them."""
    of = subject(config, spec)
    found = on_ranks(of["ranks"], _measure_rank, config, spec, threads=of["threads"])
    times, peaks, flops, counts = zip(*found, strict=True)
    layers = [
        LayerTime(
            name,
            float(np.mean([_within(own, name) for own in flops])),
            float(np.mean([own.forward[name] for own in times])),
            float(np.mean([own.backward[name] for own in times])),
            inside=name not in times[0].summed,
        )
        for name in times[0].forward
    ]
    result = Layers(
        subject=of, peak=float(np.mean(peaks)), batches=BATCHES, rows=counts[0][0], events=counts[0][1],
        lengths=counts[0][2], together=float(np.mean([own.together for own in times])), layers=layers,
    )  # fmt: skip
    missing = float(np.mean([sum(own.values()) for own in flops])) - result.flops
    if abs(missing) > 1e-6 * result.flops:
        raise RuntimeError(f"{missing:.0f} of the model's FLOPs are in no module that was timed")
    return result


def _measure_rank(config: Config, spec: FeatureSpec) -> Measured:
    """This rank's times, its peak, FLOPs by module, and (rows, events, source of the history lengths)."""
    device = torch.device("cuda", 0) if config.cluster.device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if config.precision.dense == "bf16" else torch.float32
    batches, lengths = _batches(config, spec, dist.get_rank())
    dense = _dense(config, spec).to(device, dtype)
    peaks = [measure_peak(device)]
    times = time_modules(dense, spec, [batch.to(device) for batch in batches], config.model.dim, REPEATS)
    peaks.append(measure_peak(device))
    flops: dict[str, float] = {}
    for batch in batches:
        of_rows = {name: events.offsets.diff().numpy() for name, events in batch.sequences.items()}
        for name, forward in module_flops(config.model, spec, len(batch), of_rows).items():
            flops[name] = flops.get(name, 0.0) + 3.0 * forward
    counts = sum(map(len, batches)), sum(batch.tokens() for batch in batches), lengths
    return times, sum(peaks) / len(peaks), flops, counts


def _dense(config: Config, spec: FeatureSpec) -> DenseModel:
    """The whole dense part with its initial values."""
    dense = DenseModel(config.model, spec)
    rules = init_rules(dense)
    for name, parameter in dense.named_parameters():
        fill(Slice(parameter.detach(), 0), rules[name], config.run.seed, f"dense.{name}")
    return dense


def _within(flops: dict[str, float], name: str) -> float:
    """FLOPs of a module and its submodules."""
    return sum(own for key, own in flops.items() if key == name or key.startswith(f"{name}."))


def _batches(config: Config, spec: FeatureSpec, rank: int) -> tuple[list[Batch], str]:
    """The first micro-batches of a rank, and the source of the history lengths."""
    world, _ = worlds(config)
    data = config.data
    rows = subject(config, spec)["rows"]
    try:
        find_files(data.train)
    except InputError:  # not written yet
        facts = data_facts(data, spec)

        def lengths(seed: int) -> dict[str, Ints]:
            return {s.name: _lengths(rows, facts.mean_events[s.name], s.max_length, seed) for s in spec.sequences}

        return [random_batch(spec, lengths(seed), seed) for seed in range(BATCHES)], facts.source
    loader = Loader(data, spec, global_batch=config.train.global_batch, seed=config.run.seed, rank=rank, world=world)
    try:
        return [next(loader)[1].slice(0, rows) for _ in range(BATCHES)], shown(data.train)
    finally:
        loader.close()


def _lengths(rows: int, mean: float, longest: int, seed: int) -> Ints:
    """Lengths with the plan's mean; all equal if that is 0 or the longest."""
    if not 0 < mean < longest:
        return np.full(rows, round(mean), np.int64)
    return filled(rows, longest, mean / longest, seed)


def time_modules(dense: DenseModel, spec: FeatureSpec, batches: list[Batch], dim: int, repeats: int) -> Times:
    """The median of `repeats` turns for each batch, after a warm-up turn. The ranks of the default process group start
    every turn together.
    """
    times = Times()
    for batch in batches:
        calls = _calls(dense, spec, batch, dim)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(repeats + 1):
            for name, call in calls.items():
                dist.barrier()
                found[name].append(_timed(dense, call, batch.dense.device))
        for name, both in found.items():
            forward, backward = (median(seconds[1:]) for seconds in zip(*both, strict=True))
            if name == TOGETHER:
                times.together += forward + backward
                continue
            times.forward[name] = times.forward.get(name, 0.0) + forward
            times.backward[name] = times.backward.get(name, 0.0) + backward
    times.summed = [name for name in times.forward if STEPS.fullmatch(name) or name == LOSS]
    return times


def _timed(dense: nn.Module, call: Call, device: torch.device) -> tuple[float, float]:
    """Seconds of a forward and of its backward; on a GPU without waits for launches."""
    dense.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_ahead(device, 20)
    marks = [mark(device)]
    outputs = [tensor for tensor in _tensors(call()) if tensor.requires_grad]
    ones = [torch.ones_like(tensor) for tensor in outputs]
    marks.append(mark(device))
    torch.autograd.backward(outputs, ones)
    marks.append(mark(device))
    forward, backward = (between(first, second) for first, second in pairwise(marks))
    return forward, backward


def _calls(dense: DenseModel, spec: FeatureSpec, batch: Batch, dim: int) -> dict[str, Call]:
    """Calls of each module on its inputs, of the loss, and of the whole dense part with its loss."""
    dtype = next(dense.parameters()).dtype
    embedded = _embedded(spec, batch, dim, dtype)
    given: dict[str, Any] = {}
    hooks = []
    modules = {
        name: module for name, module in dense.named_modules() if STEPS.fullmatch(name) or INSIDE.fullmatch(name)
    }
    for name, module in modules.items():
        hooks.append(module.register_forward_pre_hook(partial(_keep, given, name)))
    cast = replace(batch, dense=batch.dense.to(dtype))
    logits = dense(cast, embedded)
    for hook in hooks:
        hook.remove()
    calls: dict[str, Call] = {
        name: partial(_call, module, given[name]) for name, module in modules.items() if name in given
    }
    calls[LOSS] = partial(_call, _loss, (_leaves(logits), batch))
    calls[TOGETHER] = partial(_call, partial(_whole, dense), (cast, embedded))
    return calls


def _keep(given: dict[str, Any], name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    given[name] = _leaves(inputs)


def _call(module: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Calls the module on fresh leaves, so that each call has its own graph and gradients."""
    return module(*_leaves(inputs))


def _loss(logits: Tensor, batch: Batch) -> Tensor:
    return task_losses(logits, batch).sum()


def _whole(dense: DenseModel, batch: Batch, embedded: Embedded) -> Tensor:
    return _loss(dense(batch, embedded), batch)


def _embedded(spec: FeatureSpec, batch: Batch, dim: int, dtype: torch.dtype) -> Embedded:
    """Random leaves instead of looked-up embeddings."""

    def rows(count: int) -> Tensor:
        made = torch.rand(count, dim, device=batch.dense.device).sub_(0.5).mul_(2 * dim**-0.5)
        return made.to(dtype).requires_grad_()

    events = {f"{s.name}.{f.name}": rows(len(batch.sequences[s.name].ages)) for s in spec.sequences for f in s.ids}
    return Embedded({feature.name: rows(len(batch)) for feature in spec.categorical}, events)


def _leaves(value: Any) -> Any:
    """The value with every tensor detached; tensors that required a gradient still do."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _leaves(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_leaves, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{part.name: _leaves(getattr(value, part.name)) for part in fields(value)})
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _tensors(getattr(value, part.name))
