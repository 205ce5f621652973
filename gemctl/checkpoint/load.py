"""Puts a checkpoint into a state, in place, after its files have been checked.

    load(run.checkpoints / "step_300.a1", state, group)    # on every rank
    load_some(other / "step_9.a1", state, keys, group)     # of another run: the tensors in `keys`, where they fit

DCP reads from each file what this rank's part of the state overlaps, so the world and the sharding may differ from
those of the save. Afterwards the content of every full tensor is summed over the ranks and compared with what the
manifest says of it, so that nothing (optimizer state above all) can have been left out or put in the wrong place.
"""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from gemctl.checkpoint.content import as_text, content_sums
from gemctl.checkpoint.pieces import dtype_name
from gemctl.checkpoint.storage import Reader
from gemctl.errors import GemctlError, InputError, Unreadable
from gemctl.parallel.exchange import all_gather_json
from gemctl.run.manifest import Manifest, StoredObject, check_file, file_faults, read


def load(folder: Path, state: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> Manifest:
    """Fills every tensor of `state` from the checkpoint in `folder`; returns its manifest. Collective over `group`.

    Every rank raises the same InputError if a file is missing or damaged, or if keys, shapes or dtypes are not those
    of the checkpoint; `state` is unchanged then. GemctlError if what arrived is not what was saved.
    """
    manifest = read(folder)
    _refuse(_faulty_files(folder, manifest, group))
    _refuse(_differences(folder, manifest, state, group))
    _fill(folder, manifest, manifest.objects, state, group)
    return manifest


def load_some(
    folder: Path, state: Mapping[str, Tensor], keys: Collection[str], group: dist.ProcessGroup | None = None
) -> Manifest:
    """Fills the tensors of `state` that `keys` names, the same on every rank, and leaves the others; else as `load`."""
    manifest = read(folder)
    _refuse(_faulty_files(folder, manifest, group))
    wanted = {key: value for key, value in state.items() if key in keys}
    chosen = replace(manifest, objects={key: manifest.objects[key] for key in keys if key in manifest.objects})
    _refuse(_differences(folder, chosen, wanted, group))
    _fill(folder, manifest, chosen.objects, wanted, group)
    return chosen


def _fill(
    folder: Path,
    manifest: Manifest,
    objects: Mapping[str, StoredObject],
    state: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """`objects`: those of the manifest that the states of all ranks together have."""
    _read_together(Reader(folder, manifest), state, group)
    arrived = content_sums(state, group)
    saved = {key: stored.content for key, stored in objects.items() if stored.content is not None}
    if wrong := [key for key, content in saved.items() if as_text(arrived.get(key, 0)) != content]:
        raise GemctlError(f"{folder}: loaded, but not what was saved: {', '.join(wrong)}")


def read_object(reader: Reader, key: str, target: Tensor) -> None:
    """Fills `target` with one full tensor of the checkpoint, in this process alone. Raises as `load`."""
    if fault := _read(reader, {key: target}):
        raise GemctlError(f"{reader.folder}: loading failed: {fault}")


def _read_together(reader: Reader, state: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Each rank reads its part by itself; all raise what any has met."""
    faults = all_gather_json(_read(reader, state), group)
    if found := [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]:
        raise GemctlError(f"{reader.folder}: loading failed: " + "; ".join(found))


def _read(reader: Reader, state: Mapping[str, Tensor]) -> str | None:
    """Fills the state in this process alone; what went wrong, or None."""
    reader.read_metadata()  # what it refuses, DCP would wrap in an exception of its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is no process group
        try:
            dcp.load(dict(state), storage_reader=reader, no_dist=True)  # else ranks would send each other pickles
        except dcp.CheckpointException as error:  # no Exception: it would pass everyone who waits for one
            return str(error.failures[0][0])
    return None


def _refuse(faults: list[str]) -> None:
    if faults:
        raise InputError(faults)


def _faulty_files(folder: Path, manifest: Manifest, group: dist.ProcessGroup | None) -> list[str]:
    """Faults that all ranks found; each looks at its share of the files."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mine = dict(sorted(manifest.files.items())[rank::world])
    try:
        faults = file_faults(folder, replace(manifest, files=mine), check_file)
    except Unreadable as error:  # the others wait in the gather
        faults = error.problems
    return sorted(fault for part in all_gather_json(faults, group) for fault in part)


def _differences(
    folder: Path, manifest: Manifest, state: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> list[str]:
    """Where the states of all ranks together and the checkpoint do not match."""
    mine = {key: [list(value.shape), dtype_name(value.dtype)] for key, value in state.items()}
    wanted: dict[str, list[Any]] = {}
    for part in all_gather_json(mine, group):
        wanted |= part
    faults = [f"{folder}: {key} is not in the checkpoint" for key in sorted(wanted.keys() - manifest.objects.keys())]
    unused = sorted(manifest.objects.keys() - wanted.keys())
    faults += [f"{folder}: {key} is in the checkpoint, but the model has no such tensor" for key in unused]
    for key in sorted(wanted.keys() & manifest.objects.keys()):
        stored = manifest.objects[key]
        if wanted[key] != [stored.shape, stored.dtype]:
            shape, dtype = wanted[key]
            faults.append(f"{folder}: {key} is {stored.dtype} {stored.shape}, the model needs {dtype} {shape}")
    return faults
