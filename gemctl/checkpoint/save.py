"""Saves the state while training goes on: copy, upload in the background, manifest last.

    saver = Saver(run.checkpoints, 1, config.checkpoint, facts)       # on every rank
    stall = saver.save(step, state, position)                         # seconds that training was blocked
    saver.check()                                                     # at each step: raises once saving has failed
    saver.wait()                                                      # at the end: the last save must be there

A thread of each rank writes its pieces in DCP's format, over a gloo group of its own, so training may use any other
group meanwhile. It hashes its file and sends the hashes to rank 0, which publishes the manifest and deletes what
retention does not keep. What ranks tell each other is JSON, where `dcp.save` would have them unpickle
it. Whatever fails on one rank fails the save on all, and without a manifest there is no checkpoint.

A save that the storage refused is tried again `checkpoint.retries` times from the same copy; then training goes on
without it, but for the last one and for more than `checkpoint.tolerate` in a row. An attempt that does not own the run
any more publishes nothing. Rank 0 says what became of each save in attempts/<n>/saves.jsonl.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata

from gemctl.checkpoint.content import add_up, as_text, content_sum
from gemctl.checkpoint.pieces import Piece, dtype_name, layout, state_pieces
from gemctl.checkpoint.retention import prune, remove_half_written
from gemctl.checkpoint.staging import Stager
from gemctl.checkpoint.storage import METADATA, PieceSave, Row, Writer, rank_files
from gemctl.config.schema import CheckpointConfig
from gemctl.durable import sync_file, sync_folder
from gemctl.errors import GemctlError, InputError
from gemctl.failpoints import failpoint
from gemctl.parallel.exchange import broadcast_json, gather_json, scatter_json
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog
from gemctl.run.manifest import (
    FILE_NAME,
    Manifest,
    RunFacts,
    StoredFile,
    StoredObject,
    describe_file,
    folder_name,
    publish,
)

NICE = 10  # of the thread that uploads
RETRY_PAUSE = 1.0  # seconds; what is busy or full for a moment may be free then


class SaveError(GemctlError):
    """A checkpoint could not be written; the message names step, rank, file and errno."""


@dataclass
class _Job:
    """One save: what was staged, and what all ranks know of it."""

    step: int
    folder: Path
    staged: dict[str, list[Piece]]
    layouts: dict[str, str]
    position: dict[str, Any]
    start: float
    stall: float = 0.0


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
            with contextlib.suppress(OSError, InputError):  # what stays takes room alone; the next prune tries again
                remove_half_written(self._run, self._attempt)

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
        failpoint("save.copy", step)
        layouts = {key: layout(value) for key, value in state.items()}
        staged = self._stager.stage(state_pieces(state))
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
        save = PieceSave(job.staged, Writer(job.folder, self._rank), self._rank)
        plans = gather_json(self._part(save.plan), self._group)
        own = scatter_json(None if plans is None else self._divide(save, plans), self._group)
        if own["fault"]:
            return self._same_on_all(_Fault(**own["fault"]))
        parts = gather_json(self._part(lambda: self._write(job, save, own["value"])), self._group)
        return self._same_on_all(None if parts is None else self._publish(job, save, parts))

    def _part(self, work: Callable[[], Any]) -> dict[str, Any]:
        """What `work` returns, or why it failed: the others wait for either."""
        try:
            return {"value": work(), "fault": None}
        except Exception as error:
            fault = _Fault(f"rank {self._rank}: {_text(error)}", isinstance(error, OSError))
            return {"value": None, "fault": asdict(fault)}

    def _divide(self, save: PieceSave, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """For each rank what it writes, or why nobody can."""
        fault = _joined(plans)
        if fault is None:
            divided = self._part(lambda: save.divide([plan["value"] for plan in plans]))
            if divided["fault"] is None:
                return [{"value": rows, "fault": None} for rows in divided["value"]]
            fault = _Fault(**divided["fault"])
        return [{"value": None, "fault": asdict(fault)}] * len(plans)

    def _write(self, job: _Job, save: PieceSave, rows: list[Row]) -> dict[str, Any]:
        """Writes this rank's part: where its pieces lie, its files, the layouts and the content of what it wrote."""
        failpoint("save.upload", job.step)
        places = save.write(rows)
        failpoint("save.hash", job.step)
        files = {name: asdict(describe_file(job.folder / name)) for name in rank_files(job.folder, self._rank)}
        sums = add_up([{key: content_sum(piece)} for key, piece in save.written()])
        return {"places": places, "files": files, "layouts": job.layouts, "sums": sums}

    def _same_on_all(self, fault: _Fault | None) -> _Fault | None:
        """Rank 0's word. It alone asks who owns the run: an attempt that has lost it tries nothing again."""
        if self._rank == 0 and fault is not None and not self._attempt.owns_run():
            fault = self._lost()
        told = broadcast_json(None if fault is None else asdict(fault), self._group)
        return None if told is None else _Fault(**told)

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

    def _discard(self, job: _Job) -> None:
        """Deletes what an unpublished save has left, for its room; no rank writes any more."""
        if self._rank == 0:
            shutil.rmtree(job.folder, ignore_errors=True)

    def _publish(self, job: _Job, save: PieceSave, parts: list[dict[str, Any]]) -> _Fault | None:
        """Writes the manifest and prunes; returns what went wrong, as the other ranks must hear of it."""
        if (fault := _joined(parts)) is not None:
            return fault
        found = [part["value"] for part in parts]
        sums = add_up([part["sums"] for part in found])
        layouts = {key: text for part in found for key, text in part["layouts"].items()}
        files = {name: StoredFile(**facts) for part in found for name, facts in part["files"].items()}
        try:
            failpoint("save.metadata", job.step)
            metadata = save.finish([part["places"] for part in found])
            files[METADATA] = describe_file(job.folder / METADATA)
            objects = {
                key: _stored(entry, layouts[key], as_text(sums.get(key, 0)))
                for key, entry in sorted(metadata.state_dict_metadata.items())
                if isinstance(entry, TensorStorageMetadata)
            }
            manifest = Manifest(job.step, self._attempt.number, self._facts, job.position, objects, files)
            if self._attempt.owns_run():
                failpoint("save.manifest", job.step)
                self._sync_logs()
                publish(job.folder, manifest)
                failpoint("save.published", job.step)
        except OSError as error:
            if not (job.folder / FILE_NAME).exists():
                return _Fault(f"rank 0: {_text(error)}", True)
            # It is there for all to see, perhaps not on disk: so it stays, and the older ones do too.
            self._say(job, "published, not synced", fault=_text(error))
            return None
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
            prune(self._run, self._attempt, self._config.keep)
        except (OSError, InputError) as error:
            self._say(job, "prune failed", fault=_text(error))


def _yield_to_training() -> None:
    """Where cores are short this thread gets a tenth of what one of training does (Linux: nice is a thread's own).

    A training that waits for the save leaves its cores to it, so a save is late at most by what training takes.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _joined(parts: list[dict[str, Any]]) -> _Fault | None:
    """The faults of all ranks as one."""
    faults = [_Fault(**part["fault"]) for part in parts if part["fault"]]
    if not faults:
        return None
    return _Fault("; ".join(fault.text for fault in faults), all(fault.storage for fault in faults))


def _stored(entry: TensorStorageMetadata, text: str, content: str) -> StoredObject:
    dtype = entry.properties.dtype
    return StoredObject(
        shape=list(entry.size),
        dtype=dtype_name(dtype),
        bytes=entry.size.numel() * dtype.itemsize,
        layout=text,
        pieces=len(entry.chunks),
        content=content,
    )


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"
