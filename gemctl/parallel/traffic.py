"""Bytes that a rank sends in its training steps by mesh axis, counted where the collectives are called.

    traffic = TrafficCounter(axes)                        # axes: which axes a process group serves
    with traffic.step(), traffic.on(Side.DENSE): ...
    counts, steps = traffic.take()                        # {("dp_shard", "all-gather"): (calls, bytes)}, 1

FSDP2, TorchRec and gemctl all call collectives as `torch.distributed.NAME(…)`, so wrappers under these names, in place
while a step runs, see every call, in forward and in backward threads, at a few microseconds per call. Bytes are those
of ring algorithms, as in `gemctl.plan.traffic`: an all-gather or reduce-scatter over n ranks sends n − 1 shards, an
all-reduce 2 (n − 1)/n of its tensor, an all-to-all everything but the rank's own part.

    gemctl report RUN        # "Traffic": counted beside planned
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch.distributed as dist

from gemctl.mesh.topology import EXPERT_SHARD, WORLD, Axis

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
"""Their names in this version of torch; newer versions warn about the older names."""

AXES = (*(axis.value for axis in Axis), EXPERT_SHARD, WORLD)
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
Count = tuple[int, int]  # calls, bytes sent


class Side(StrEnum):
    """The part of a step that is running: groups of the same ranks serve axes of several sides."""

    DENSE = "dense"
    TABLES = "tables"
    WORLD = "world"


_SIDES = {
    Side.DENSE: (Axis.DP_SHARD.value, Axis.DP_REPLICATE.value, EXPERT_SHARD, Axis.EP.value),
    Side.WORLD: (WORLD,),
}


_caller = threading.local()


@contextmanager
def along(axis: str) -> Iterator[None]:
    """Attributes this thread's collectives inside to `axis`, for groups that serve two axes of one side."""
    _caller.axis = axis
    try:
        yield
    finally:
        _caller.axis = None


class TrafficCounter:
    """Counts inside steps only. `axes`: the axes of the dense part's groups and of the world's."""

    def __init__(self, axes: Mapping[dist.ProcessGroup, Sequence[str]]) -> None:
        self._axes = axes
        self._side = Side.WORLD
        self._thread = threading.get_ident()
        self.clock: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered while this thread is inside a collective of the dense part: on CPU until the others have answered."""
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Counts the collectives inside as one training step."""
        self._steps += 1
        originals = {name: getattr(dist, name) for name in _KINDS if hasattr(dist, name)}
        for name, call in originals.items():
            setattr(dist, name, self._wrap(call, _KINDS[name]))
        try:
            yield
        finally:
            for name, call in originals.items():
                setattr(dist, name, call)

    @contextmanager
    def on(self, side: Side) -> Iterator[None]:
        """Attributes the collectives inside, on any thread, to a side."""
        before, self._side = self._side, side
        try:
            yield
        finally:
            self._side = before

    def take(self) -> tuple[dict[tuple[str, str], Count], int]:
        """(calls, bytes) by (axis, collective) since the last `take`, and the number of steps."""
        counts = {key: (calls, size) for key, (calls, size) in self._counts.items()}
        steps, self._steps, self._counts = self._steps, 0, {}
        return counts, steps

    def _wrap(self, call: Callable[..., Any], kind: "_Kind") -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._add(kind, dict(zip(kind.parameters, args, strict=False)) | kwargs)
            dense = self._side is Side.DENSE and threading.get_ident() == self._thread
            with self.clock() if dense else nullcontext():
                return call(*args, **kwargs)

        return counted

    def _add(self, kind: "_Kind", given: dict[str, Any]) -> None:
        group = given.get("group") or dist.group.WORLD
        axis = self._axis(group, kind.collective)
        if axis is not None:
            found = self._counts.setdefault((axis, kind.collective), [0, 0])
            found[0] += 1
            found[1] += kind.sent(given, dist.get_world_size(group), dist.get_rank(group))

    def _axis(self, group: dist.ProcessGroup | None, collective: str) -> str | None:
        caller: str | None = getattr(_caller, "axis", None)
        if caller is not None or group is None:
            return caller
        if self._side is Side.TABLES:  # TorchRec's groups are its own; replicas are averaged by all-reduces
            return (Axis.MP_REPLICATE if collective == "all-reduce" else Axis.MP_SHARD).value
        axes = self._axes.get(group, ())
        return next((axis for axis in _SIDES[self._side] if axis in axes), None)


@dataclass(frozen=True)
class _Kind:
    """A function of `torch.distributed`: its first parameters, and the bytes sent by (arguments, group size, rank)."""

    collective: str
    parameters: tuple[str, ...]
    sent: Callable[[dict[str, Any], int, int], int]


def _all_to_all(given: dict[str, Any], size: int, rank: int) -> int:
    sent, splits = given["input"], given.get("input_split_sizes")
    own = splits[rank] * (sent.nbytes // max(1, len(sent))) if splits else sent.nbytes // size
    return int(sent.nbytes - own)


def _shards(name: str) -> Callable[[dict[str, Any], int, int], int]:
    """All shards but one, each of the size of argument `name`."""
    return lambda given, size, rank: (size - 1) * int(given[name].nbytes)


_GATHERED = ("output_tensor", "input_tensor", "group")
_SCATTERED = ("output", "input", "op", "group")
_KINDS = {
    "all_reduce": _Kind(
        "all-reduce",
        ("tensor", "op", "group"),
        lambda given, size, rank: 2 * (size - 1) * int(given["tensor"].nbytes) // size,
    ),
    "all_gather": _Kind("all-gather", ("tensor_list", "tensor", "group"), _shards("tensor")),
    "all_gather_into_tensor": _Kind("all-gather", _GATHERED, _shards("input_tensor")),
    "all_gather_single": _Kind("all-gather", _GATHERED, _shards("input_tensor")),
    "reduce_scatter": _Kind(
        "reduce-scatter",
        ("output", "input_list", "op", "group"),
        lambda given, size, rank: sum(part.nbytes for part in given["input_list"]) - given["input_list"][rank].nbytes,
    ),
    "reduce_scatter_tensor": _Kind("reduce-scatter", _SCATTERED, _shards("output")),
    "reduce_scatter_single": _Kind("reduce-scatter", _SCATTERED, _shards("output")),
    "all_to_all_single": _Kind(
        "all-to-all", ("output", "input", "output_split_sizes", "input_split_sizes", "group"), _all_to_all
    ),
}
