"""Modules of a dense part timed one by one, forward and backward, on the inputs that they have in a whole forward.

    times = time_modules(dense, spec, batches, dim=32, repeats=5)
    times.forward["layers.0"], times.backward["layers.0"]      # seconds, summed over the batches

Which modules: the dense part's own steps (`Times.summed`), which make up all of it but a few concatenations, and the
parts of each layer. A module's gradients are those of its parameters and of the inputs that had one.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemctl.data.batch import Batch
from gemctl.model.embeddings import Embedded
from gemctl.model.gem import DenseModel
from gemctl.specs.data import FeatureSpec
from gemctl.train.step import task_losses

STEPS = re.compile(r"tokens|events\.[^.]+|merge|layers\.\d+|heads")
INSIDE = re.compile(r"layers\.\d+\.(x_sum|(adapters|summary)\.[^.]+|sequence\.[^.]+\.(ffn|attention)|interaction)")
LOSS = "loss"
TOGETHER = "all together"
AHEAD = 40_000_000  # cycles, about 20 ms, that a GPU sleeps before each turn while the host launches
Call = Callable[[], Any]


@dataclass
class Times:
    """Seconds by module, over all batches. `together`: forward and backward of the whole with its loss."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)
    together: float = 0.0


def time_modules(dense: DenseModel, spec: FeatureSpec, batches: list[Batch], dim: int, repeats: int) -> Times:
    """Median over `repeats` turns for each batch, after one that is not counted. The ranks of the default process group
    start every turn together.
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
    """Seconds of a forward and of its backward; on a GPU those of its stream, without waits for launches."""
    dense.zero_grad(set_to_none=True)
    mark = _event if device.type == "cuda" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda._sleep(AHEAD)
    marks = [mark()]
    made = [tensor for tensor in _tensors(call()) if tensor.requires_grad]
    ones = [torch.ones_like(tensor) for tensor in made]
    marks.append(mark())
    torch.autograd.backward(made, ones)
    marks.append(mark())
    forward, backward = (_between(first, second) for first, second in pairwise(marks))
    return forward, backward


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    if isinstance(first, float):
        return float(second) - first
    second.synchronize()
    return float(first.elapsed_time(second)) / 1e3


def _calls(dense: DenseModel, spec: FeatureSpec, batch: Batch, dim: int) -> dict[str, Call]:
    """A forward of each module on its inputs, of the loss, and of all together."""
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
    """On fresh leaves, so that each call has a graph and gradients of its own."""
    return module(*_leaves(inputs))


def _loss(logits: Tensor, batch: Batch) -> Tensor:
    return task_losses(logits, batch).sum()


def _whole(dense: DenseModel, batch: Batch, embedded: Embedded) -> Tensor:
    return _loss(dense(batch, embedded), batch)


def _embedded(spec: FeatureSpec, batch: Batch, dim: int, dtype: torch.dtype) -> Embedded:
    """Leaves in place of looked-up embeddings."""

    def rows(count: int) -> Tensor:
        made = torch.rand(count, dim, device=batch.dense.device).sub_(0.5).mul_(2 * dim**-0.5)
        return made.to(dtype).requires_grad_()

    events = {f"{s.name}.{f.name}": rows(len(batch.sequences[s.name].ages)) for s in spec.sequences for f in s.ids}
    return Embedded({feature.name: rows(len(batch)) for feature in spec.categorical}, events)


def _leaves(value: Any) -> Any:
    """The same value with every tensor cut off its graph; those that had a gradient collect one of their own."""
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
