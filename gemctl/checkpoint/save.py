"""Saves the state while training goes on: copy, upload in the background, manifest last.

    saver = Saver(run.checkpoints, 1, config.checkpoint, facts)       # on every rank
    stall = saver.save(step, state, position)                         # seconds that training was blocked
    saver.check()                                                     # at each step: raises once saving has failed
    saver.wait()                                                      # at the end: the last save must be there

A thread of each rank writes its pieces by `torch.distributed.checkpoint.save`, over a gloo group of its own, so
training may use any other group meanwhile. Then it hashes its file and sends the hashes to rank 0, which publishes the
manifest and deletes what retention does not keep. Whatever fails on one rank fails the save on all, and without a
manifest there is no checkpoint.

A save that the storage refused is tried again `checkpoint.retries` times from the same copy; then training goes on
without it, but for the last one and for more than `checkpoint.tolerate` in a row. An attempt that does not own the run
any more publishes nothing. Rank 0 says what became of each save in attempts/<n>/saves.jsonl.
"""

import contextlib
import functools
import os
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, Metadata, TensorStorageMetadata

from gemctl.checkpoint.content import add_up, as_text, content_sum
from gemctl.checkpoint.pieces import layout, state_pieces
from gemctl.checkpoint.retention import prune, remove_strays
from gemctl.checkpoint.staging import Stager
from gemctl.checkpoint.storage import PIECES, PiecePlanner, Writer, rank_files
from gemctl.config.schema import CheckpointConfig
from gemctl.durable import sync_file, sync_folder
from gemctl.errors import GemctlError
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog
from gemctl.run.inject import Point, maybe_inject
from gemctl.run.manifest import Manifest, RunFacts, StoredFile, StoredObject, describe_file, folder_name, publish

NICE = 10  # of the thread that uploads
RETRY_PAUSE = 1.0  # seconds; what is busy or full for a moment may be free then


class SaveError(GemctlError):
    """A checkpoint could not be written; the message names step, rank, file and errno."""


@dataclass
class _Job:
    """One save: what was staged, and what all ranks know of it."""

    step: int
    folder: Path
    staged: dict[str, Any]
    layouts: dict[str, str]
    position: dict[str, Any]
    start: float
    stall: float = 0.0


@dataclass(frozen=True)
class _Part:
    """A rank's files, the layout of each of its tensors, the content of the pieces it wrote, and what went wrong."""

    files: dict[str, StoredFile] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)
    fault: "_Fault | None" = None


@dataclass(frozen=True)
class _Fault:
    """Why a save failed. `storage`: the storage refused it, so that another try or another save may do better."""

    text: str
    storage: bool


class Saver:
    """Writes the checkpoints of one attempt; at most one save is under way. Made, and called, by every rank alike."""

    def __init__(self, checkpoints_dir: Path, attempt: int, config: CheckpointConfig, facts: RunFacts) -> None:
        self._run = RunDir(checkpoints_dir.parent)
        self._attempt = self._run.attempt(attempt)
        self._config, self._facts = config, facts
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self._rank = dist.get_rank(self._group)
        self._stager = Stager()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_yield_to_training)
        self._under_way: Future[None] | None = None
        self._error: GemctlError | None = None
        self._tolerated: list[SaveError] = []  # failed saves since the last good one
        self._step = -1
        self._log: JsonLog | None = None
        if self._rank == 0:
            self._log = JsonLog(self._attempt.saves)
            remove_strays(self._run, self._attempt)

    def save(self, step: int, state: Mapping[str, Tensor], position: dict[str, Any]) -> float:
        """Starts saving `state` as it is now; returns the seconds that it blocked. Collective.

        Waits for the save before it, and raises what that one met. The same step again does nothing. `position` is
        JSON and must be a function of the step alone, as `gemctl checkpoint diff` compares it.
        """
        start = time.perf_counter()
        self._idle()
        self.check()
        if step != self._step:
            self._start(step, state, position, start)
        self._step = step
        return time.perf_counter() - start

    def check(self) -> None:
        """Raises SaveError once saving has failed for good; never blocks."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Blocks until the save under way has ended; SaveError if the last one failed, tolerated or not."""
        self._idle()
        self.check()
        if self._tolerated:
            raise self._tolerated[-1]

    def close(self) -> None:
        """Waits, then gives the staging memory back."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._stager.close()
            if self._log is not None:
                self._log.close()

    def _idle(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _start(self, step: int, state: Mapping[str, Tensor], position: dict[str, Any], start: float) -> None:
        folder = self._run.checkpoints / folder_name(step, self._attempt.number)
        self._reach(step, "copy")
        layouts = {key: layout(value) for key, value in state.items()}
        staged = self._stager.stage({PIECES: state_pieces(state)})
        job = _Job(step, folder, staged, layouts, position, start)
        job.stall = time.perf_counter() - start
        # From here on the thread competes for the interpreter: as little as possible comes after.
        self._under_way = self._thread.submit(self._upload, job)

    def _upload(self, job: _Job) -> None:
        """Runs in the thread: tries until the save is published, or has failed. Every rank sees the same outcome."""
        try:
            fault = self._try(job)
            for again in range(self._config.retries):
                if fault is None or not fault.storage:
                    break
                self._say(job, "retry", fault=fault.text, left=self._config.retries - again)
                self._discard(job)
                time.sleep(RETRY_PAUSE)
                fault = self._try(job)
            self._conclude(job, fault)
        except Exception as error:  # a rank is gone, or this one is out of memory: nobody can agree on anything
            self._error = SaveError(f"saving step {job.step} failed on rank {self._rank}: {_text(error)}")

    def _try(self, job: _Job) -> _Fault | None:
        """One try; why it failed, or None. Collective, and the same on every rank."""
        try:
            planner = PiecePlanner()
            metadata = dcp.save(
                job.staged,
                storage_writer=Writer(job.folder, self._rank, functools.partial(self._reach, job.step)),
                planner=planner,
                process_group=self._group,
            )
        except CheckpointException as error:
            return self._same_on_all(_fault_of(error))
        parts = self._gather(job, planner)
        return self._same_on_all(None if parts is None else self._publish(job, metadata, parts))

    def _same_on_all(self, fault: _Fault | None) -> _Fault | None:
        """Rank 0's word. It alone asks who owns the run: an attempt that has lost it tries nothing again."""
        if self._rank == 0 and fault is not None and not self._attempt.owns_run():
            fault = self._lost()
        outcome = [fault]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        return outcome[0]

    def _lost(self) -> _Fault:
        owner = self._run.attempts()[-1].number
        return _Fault(f"attempt {owner} owns the run now; what attempt {self._attempt.number} saves is void", False)

    def _conclude(self, job: _Job, fault: _Fault | None) -> None:
        if fault is None:
            self._tolerated.clear()
            seconds = time.perf_counter() - job.start
            self._say(job, "saved", stall=job.stall, seconds=seconds, staged=self._stager.bytes)
            return
        if fault.storage:
            self._discard(job)
        error = SaveError(f"saving step {job.step} failed: {fault.text}")
        left = self._config.tolerate - len(self._tolerated)
        self._tolerated.append(error)
        if not fault.storage or left <= 0:
            self._error = error
        self._say(job, "failed", fault=fault.text, tolerated=self._error is None, left=max(0, left - 1))

    def _say(self, job: _Job, event: str, **facts: Any) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk: the fault itself goes to the ranks' records
                self._log.write({"event": event, "step": job.step, "time": time.time(), **facts}, last=True)

    def _reach(self, step: int, point: Point) -> None:
        """Where a test may plant an event."""
        maybe_inject(self._rank, "save", step, point)

    def _discard(self, job: _Job) -> None:
        """Deletes what an unpublished save has left, for its room; no rank writes any more."""
        if self._rank == 0:
            shutil.rmtree(job.folder, ignore_errors=True)

    def _gather(self, job: _Job, planner: PiecePlanner) -> list[_Part] | None:
        """Every rank's part on rank 0, None elsewhere."""
        try:
            self._reach(job.step, "hash")
            files = {name: describe_file(job.folder / name) for name in rank_files(job.folder, self._rank)}
            sums = add_up([{key: content_sum(piece)} for key, piece in planner.written()])
            part = _Part(files, job.layouts, sums)
        except Exception as error:  # the others wait in the gather: they must hear of whatever it is
            part = _Part(fault=_Fault(f"rank {self._rank}: {_text(error)}", isinstance(error, OSError)))
        parts: list[Any] | None = [None] * dist.get_world_size(self._group) if self._rank == 0 else None
        dist.gather_object(part, parts, group=self._group)
        return parts

    def _publish(self, job: _Job, metadata: Metadata, parts: list[_Part]) -> _Fault | None:
        """Writes the manifest and prunes; returns what went wrong, as the other ranks must hear of it."""
        if faults := [part.fault for part in parts if part.fault]:
            return _Fault("; ".join(fault.text for fault in faults), all(fault.storage for fault in faults))
        files = {name: file for part in parts for name, file in part.files.items()}
        layouts = {key: text for part in parts for key, text in part.layouts.items()}
        sums = add_up([part.sums for part in parts])
        objects = {
            key: _stored(entry, layouts[key], as_text(sums.get(key, 0)))
            for key, entry in sorted(metadata.state_dict_metadata.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        manifest = Manifest(job.step, self._attempt.number, self._facts, job.position, objects, files)
        try:
            if self._attempt.owns_run():
                self._reach(job.step, "manifest")
                self._sync_logs()
                publish(job.folder, manifest)
                self._reach(job.step, "published")
        except OSError as error:
            return _Fault(f"rank 0: {_text(error)}", True)
        except (ValueError, TypeError) as error:  # `position` is not JSON
            return _Fault(f"rank 0: {_text(error)}", False)
        if not self._attempt.owns_run():  # perhaps only since then: what was published is void, or the new owner's base
            return self._lost()
        self._prune(job)
        return None

    def _sync_logs(self) -> None:
        """Lines of the steps that a checkpoint holds must not be lost where it is not: no attempt writes them again."""
        for log in (self._attempt.metrics, self._attempt.ledger):
            if log.exists():
                sync_file(log)
        sync_folder(self._attempt.path)

    def _prune(self, job: _Job) -> None:
        """The new checkpoint stands whatever becomes of the old ones."""
        try:
            prune(self._run, self._attempt, self._config.keep, functools.partial(self._reach, job.step))
        except OSError as error:
            self._say(job, "prune failed", fault=_text(error))


def _yield_to_training() -> None:
    """Where cores are short this thread gets a tenth of what one of training does (Linux: nice is a thread's own).

    A training that waits for the save leaves its cores to it, so a save is late at most by what training takes.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _fault_of(error: CheckpointException) -> _Fault:
    faults = [(rank, fault) for rank, (fault, _) in sorted(error.failures.items())]
    text = "; ".join(f"rank {rank}: {_text(fault)}" for rank, fault in faults)
    return _Fault(text, all(isinstance(fault, OSError) for _, fault in faults))


def _stored(entry: TensorStorageMetadata, text: str, content: str) -> StoredObject:
    dtype = entry.properties.dtype
    return StoredObject(
        shape=list(entry.size),
        dtype=str(dtype).removeprefix("torch."),
        bytes=entry.size.numel() * dtype.itemsize,
        layout=text,
        pieces=len(entry.chunks),
        content=content,
    )


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"
