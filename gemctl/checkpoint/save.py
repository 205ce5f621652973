"""Saves the state while training goes on: copy, upload in the background, manifest last.

    saver = Saver(run.checkpoints, attempt=1, keep=3, facts=facts)    # on every rank
    stall = saver.save(step, state, position)                         # seconds that training was blocked
    saver.check()                                                     # at each step: raises what the upload met
    saver.wait()                                                      # at the end

`torch.distributed.checkpoint.async_save` writes each rank's pieces from a thread, over a gloo group of its own, so
training may use any other group meanwhile. When it is done the same thread hashes the rank's files and sends the hashes
to rank 0, which publishes the manifest and deletes what retention does not keep. Whatever fails on one rank fails the
save on all, and without a manifest there is no checkpoint.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, Metadata, TensorStorageMetadata, async_save

from gemctl.checkpoint.pieces import layout, state_pieces
from gemctl.checkpoint.retention import prune, remove_strays
from gemctl.checkpoint.staging import Stager
from gemctl.checkpoint.storage import PIECES, PiecePlanner, Writer, rank_files
from gemctl.errors import GemctlError
from gemctl.run.directory import RunDir
from gemctl.run.manifest import Manifest, RunFacts, StoredFile, StoredObject, describe_file, folder_name, publish

# A rank's files, the layout of each of its tensors, and what went wrong there.
RankPart = tuple[dict[str, StoredFile], dict[str, str], str | None]


class SaveError(GemctlError):
    """A checkpoint could not be written; the message names step, rank, file and errno."""


class Saver:
    """Writes the checkpoints of one attempt; at most one save is under way. Made, and called, by every rank alike."""

    def __init__(self, checkpoints_dir: Path, attempt: int, keep: int, facts: RunFacts) -> None:
        self._run = RunDir(checkpoints_dir.parent)
        self._attempt = self._run.attempt(attempt)
        self._keep, self._facts = keep, facts
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self._rank = dist.get_rank(self._group)
        self._stager = Stager()
        self._idle = Event()
        self._idle.set()
        self._error: GemctlError | None = None
        self._step = -1
        if self._rank == 0:
            remove_strays(self._run, self._attempt)

    def save(self, step: int, state: Mapping[str, Tensor], position: dict[str, Any]) -> float:
        """Starts saving `state` as it is now; returns the seconds that it blocked. Collective.

        Waits for the save before it, and raises what that one met. The same step again does nothing. `position` is
        JSON and must be a function of the step alone, as `gemctl checkpoint diff` compares it.
        """
        start = time.perf_counter()
        self.wait()
        if step != self._step:
            self._start(step, state, position)
        self._step = step
        return time.perf_counter() - start

    def check(self) -> None:
        """Raises SaveError if a save has failed; never blocks."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Blocks until the save under way is published; SaveError if it failed."""
        self._idle.wait()
        self.check()

    def close(self) -> None:
        """Waits, then gives the staging memory back."""
        try:
            self.wait()
        finally:
            self._stager.close()

    def _start(self, step: int, state: Mapping[str, Tensor], position: dict[str, Any]) -> None:
        folder = self._run.checkpoints / folder_name(step, self._attempt.number)
        pieces, layouts = state_pieces(state), {key: layout(value) for key, value in state.items()}
        writer, planner = Writer(folder, self._rank), PiecePlanner()
        # From here on the upload's thread competes for the interpreter: as little as possible comes after.
        upload = async_save(
            {PIECES: pieces},
            storage_writer=writer,
            planner=planner,
            process_group=self._group,
            async_stager=self._stager,
        )
        self._idle.clear()
        cast(Future[Metadata], upload).add_done_callback(
            lambda done: self._finish(done, folder, step, layouts, position)
        )

    def _finish(
        self, upload: Future[Metadata], folder: Path, step: int, layouts: dict[str, str], position: dict[str, Any]
    ) -> None:
        try:
            metadata = upload.result()
            parts = self._gather(folder, layouts)
            outcome = [None if parts is None else self._publish(folder, step, metadata, parts, position)]
            dist.broadcast_object_list(outcome, src=0, group=self._group)
            if outcome[0] is not None:
                self._error = SaveError(f"saving step {step} failed: {outcome[0]}")
        except CheckpointException as error:
            faults = [f"rank {rank}: {_text(fault)}" for rank, (fault, _) in sorted(error.failures.items())]
            self._error = SaveError(f"saving step {step} failed: " + "; ".join(faults))
        except Exception as error:
            self._error = SaveError(f"saving step {step} failed on rank {self._rank}: {_text(error)}")
        finally:
            self._idle.set()

    def _gather(self, folder: Path, layouts: dict[str, str]) -> list[RankPart] | None:
        """Every rank's part on rank 0, None elsewhere."""
        try:
            files = {name: describe_file(folder / name) for name in rank_files(folder, self._rank)}
            part: RankPart = (files, layouts, None)
        except OSError as error:
            part = ({}, {}, f"rank {self._rank}: {_text(error)}")
        parts: list[Any] | None = [None] * dist.get_world_size(self._group) if self._rank == 0 else None
        dist.gather_object(part, parts, group=self._group)
        return parts

    def _publish(
        self, folder: Path, step: int, metadata: Metadata, parts: list[RankPart], position: dict[str, Any]
    ) -> str | None:
        """Writes the manifest and prunes; returns what went wrong, as the other ranks must hear of it."""
        faults = [fault for _, _, fault in parts if fault]
        if faults:
            return "; ".join(faults)
        files = {name: file for part in parts for name, file in part[0].items()}
        layouts = {key: text for part in parts for key, text in part[1].items()}
        objects = {
            key: _stored(entry, layouts[key])
            for key, entry in sorted(metadata.state_dict_metadata.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        manifest = Manifest(step, self._attempt.number, self._facts, position, objects, files)
        try:
            publish(folder, manifest)
            prune(self._run, self._attempt, self._keep)
        except (OSError, ValueError, TypeError) as error:  # ValueError, TypeError: `position` is not JSON
            return f"rank 0: {_text(error)}"
        return None


def _stored(entry: TensorStorageMetadata, text: str) -> StoredObject:
    dtype = entry.properties.dtype
    return StoredObject(
        shape=list(entry.size),
        dtype=str(dtype).removeprefix("torch."),
        bytes=entry.size.numel() * dtype.itemsize,
        layout=text,
        pieces=len(entry.chunks),
    )


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"
