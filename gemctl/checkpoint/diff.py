"""Compares two checkpoints tensor by tensor: keys, shapes, dtypes, every bit of every value, and the position.

    compare(Path("runs/…/checkpoints/step_100.a1"), Path("runs/…/checkpoints/step_100.a2"))

`gemctl checkpoint diff` calls this in a separate process (gemctl/torch_call.py). Objects are read whole and one at a
time, so the largest one must fit in memory twice. World sizes and shardings may differ.
"""

from pathlib import Path

import torch
from torch import Tensor

from gemctl.checkpoint.load import read_object
from gemctl.checkpoint.storage import Reader, open_checkpoint
from gemctl.run.checkpoints import Comparison, Difference
from gemctl.run.manifest import Manifest, StoredObject

BLOCK = 1 << 22  # elements compared at a time: bounds the float64 copies


def compare(a: Path, b: Path) -> Comparison:
    """Every `Difference` between the checkpoints in folders `a` and `b`."""
    (first, own), (second, other) = open_checkpoint(a), open_checkpoint(b)
    keys = sorted(first.objects.keys() | second.objects.keys())
    differences, compared = _positions(first, second), 0
    for key in keys:
        difference = _described(key, first.objects.get(key), second.objects.get(key))
        if difference is None:
            compared += 1
            shape, dtype = first.objects[key].shape, getattr(torch, first.objects[key].dtype)
            left, right = (_read(reader, key, shape, dtype) for reader in (own, other))
            difference = compare_values(key, left, right)
        if difference is not None:
            differences.append(difference)
    return Comparison(str(a), str(b), first.step, second.step, len(keys), compared, differences)


def _positions(first: Manifest, second: Manifest) -> list[Difference]:
    a = {"step": first.step, "seed": first.facts.seed, **first.position}
    b = {"step": second.step, "seed": second.facts.seed, **second.position}
    missing = object()
    return [
        Difference(f"position.{key}", "value", str(a.get(key, "–")), str(b.get(key, "–")))
        for key in sorted(a.keys() | b.keys())
        if a.get(key, missing) != b.get(key, missing)
    ]


def _described(key: str, a: StoredObject | None, b: StoredObject | None) -> Difference | None:
    if a is None or b is None:
        return Difference(key, "missing in A" if a is None else "missing in B")
    if a.shape != b.shape:
        return Difference(key, "shape", str(a.shape), str(b.shape))
    if a.dtype != b.dtype:
        return Difference(key, "dtype", a.dtype, b.dtype)
    return None


def _read(reader: Reader, key: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    target = torch.empty(shape, dtype=dtype)
    read_object(reader, key, target)
    return target


def compare_values(key: str, a: Tensor, b: Tensor) -> Difference | None:
    """None if the two contiguous tensors, of the same shape and dtype, are equal bit for bit."""
    elements, distance, size = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for left, right in zip(a.view(-1).split(BLOCK), b.view(-1).split(BLOCK), strict=True):
        unequal = (_bits(left) != _bits(right)).any(1)
        elements += int(unequal.sum())
        # Only where bits differ, since inf − inf is NaN.
        distance = torch.maximum(distance, _largest(left[unequal].double() - right[unequal].double()))
        size = torch.maximum(size, _largest(left.double()))
    if elements == 0:
        return None
    relative = distance / size if size > 0 else torch.where(distance > 0, torch.inf, distance)
    return Difference(key, "value", elements=elements, max_abs=float(distance), max_rel=float(relative))


def _bits(values: Tensor) -> Tensor:
    return values.view(-1, 1).view(torch.uint8)


def _largest(values: Tensor) -> Tensor:
    return values.abs().max() if values.numel() else torch.zeros((), dtype=torch.float64)
