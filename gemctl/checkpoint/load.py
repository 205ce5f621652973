"""Loads a checkpoint into a state, in place, after checking its files.

    load(run.checkpoints / "step_300.a1", state, group)    # on every rank
    load_some(other / "step_9.a1", state, keys, group)     # from another run: only the tensors in `keys`

DCP reads the parts of each file that overlap this rank's part of the state, so world size and sharding may differ from
those of the save. Afterwards the content of every full tensor is summed over the ranks and compared with the manifest,
so that nothing (optimizer state above all) can have been omitted or put in the wrong place.
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

    Every rank raises the same InputError if a file is missing or damaged, or if keys, shapes or dtypes differ from
    those of the checkpoint; `state` is unchanged then. GemctlError if the loaded values are not the saved ones.
    """
    manifest = read(folder)
    _refuse(_faulty_files(folder, manifest, group))
    _refuse(_differences(folder, manifest, state, group))
    _fill(folder, manifest, manifest.objects, state, group)
    return manifest


def load_some(
    folder: Path, state: Mapping[str, Tensor], keys: Collection[str], group: dist.ProcessGroup | None = None
) -> Manifest:
    """Like `load`, but fills only the tensors in `keys`, which must be the same on every rank."""
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
    """`objects`: the manifest's objects that the states of all ranks together contain."""
    _read_together(Reader(folder, manifest), state, group)
    arrived = content_sums(state, group)
    saved = {key: stored.content for key, stored in objects.items() if stored.content is not None}
    if wrong := [key for key, content in saved.items() if as_text(arrived.get(key, 0)) != content]:
        raise GemctlError(f"{folder}: the loaded values are not those that were saved: {', '.join(wrong)}")


def read_object(reader: Reader, key: str, target: Tensor) -> None:
    """Fills `target` with one full tensor of the checkpoint, in this process only. Raises as `load`."""
    if fault := _read(reader, {key: target}):
        raise GemctlError(f"{reader.folder}: loading failed: {fault}")


def _read_together(reader: Reader, state: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Each rank reads its own part; if any of them fails, all raise the same error."""
    every = all_gather_json(_read(reader, state), group)
    if faults := [f"rank {rank}: {fault}" for rank, fault in enumerate(every) if fault]:
        raise GemctlError(f"{reader.folder}: loading failed: " + "; ".join(faults))


def _read(reader: Reader, state: Mapping[str, Tensor]) -> str | None:
    """Fills the state in this process only; returns what went wrong, or None."""
    reader.read_metadata()  # DCP would wrap its InputError in an exception of its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is no process group
        try:
            dcp.load(dict(state), storage_reader=reader, no_dist=True)  # otherwise ranks would exchange pickles
        except dcp.CheckpointException as error:  # a BaseException, which no caller catches
            return str(error.failures[0][0])
    return None


def _refuse(faults: list[str]) -> None:
    if faults:
        raise InputError(faults)


def _faulty_files(folder: Path, manifest: Manifest, group: dist.ProcessGroup | None) -> list[str]:
    """Faults found by all ranks together; each checks its share of the files."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mine = dict(sorted(manifest.files.items())[rank::world])
    try:
        faults = file_faults(folder, replace(manifest, files=mine), check_file)
    except Unreadable as error:  # other ranks wait in the gather
        faults = error.problems
    return sorted(fault for part in all_gather_json(faults, group) for fault in part)


def _differences(
    folder: Path, manifest: Manifest, state: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> list[str]:
    """Differences between the checkpoint and the states of all ranks together."""
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
