"""Saves checkpoints while training continues: copy the state, write it in the background, publish the manifest last.

    saver = Saver(run.checkpoints, 1, config.checkpoint, facts)       # on every rank
    stall = saver.save(step, state, position)                         # seconds for which training was blocked
    saver.check()                                                     # in every step: raises once saving has failed
    saver.wait()                                                      # at the end: the last save must succeed

A thread on each rank writes the rank's pieces in DCP's format. It uses a gloo group of its own, so that training can
use every other group meanwhile. It hashes its file and sends the hashes to rank 0, which publishes the manifest and
deletes old checkpoints. Ranks exchange JSON, where `dcp.save` would exchange pickles. A failure on any rank fails the
save on all ranks; without a manifest there is no checkpoint.

What happens when a save fails is decided in `_save` and `_failed`: a storage error is retried `checkpoint.retries`
times from the same copy. After that training continues without this checkpoint, unless it is the last one or more than
`checkpoint.tolerate` saves in a row have failed. Any other error ends the attempt, and so does the loss of the run to a
newer attempt; gemctl/recover/decide.py decides whether another attempt follows. Rank 0 records the outcome of every
save in attempts/<n>/saves.jsonl.
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

NICE = 10  # of the thread that writes
RETRY_PAUSE = 1.0  # seconds; storage that is busy or full may recover in that time


class SaveError(GemctlError):
    """A checkpoint could not be written; the message names step, rank, file and errno."""


@dataclass
class _Job:
    """One save: the staged copy, and what every rank knows about it."""

    step: int
    folder: Path
    staged: dict[str, list[Piece]]
    layouts: dict[str, str]
    position: dict[str, Any]
    start: float
    stall: float = 0.0


@dataclass(frozen=True)
class _Failure:
    """Why a save failed. `storage`: the storage refused it, so that a retry or a later save may succeed."""

    text: str
    storage: bool


class Saver:
    """Writes the checkpoints of one attempt, one at a time. Every rank creates one and makes the same calls."""

    def __init__(self, checkpoints_dir: Path, attempt: int, config: CheckpointConfig, facts: RunFacts) -> None:
        self._run = RunDir(checkpoints_dir.parent)
        self._attempt = self._run.attempt(attempt)
        self._config, self._facts = config, facts
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self._rank = dist.get_rank(self._group)
        self._stager = Stager()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_lower_priority)
        self._pending: Future[None] | None = None
        self._error: GemctlError | None = None
        self._tolerated: list[SaveError] = []  # failed saves since the last successful one
        self._step = -1
        self._log: JsonLog | None = None
        if self._rank == 0:
            self._log = JsonLog(self._attempt.saves)
            with contextlib.suppress(OSError, InputError):  # leftovers only take space; the next prune tries again
                remove_half_written(self._run, self._attempt)

    def save(self, step: int, state: Mapping[str, Tensor], position: dict[str, Any]) -> float:
        """Starts saving `state` as it is now; returns the seconds for which it blocked. Collective.

        Waits for the previous save and raises its error. Saving the same step again does nothing. `position` is JSON
        and must depend on the step alone, since `gemctl checkpoint diff` compares it.
        """
        start = time.perf_counter()
        self._wait_for_thread()
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
        """Blocks until the current save has ended; SaveError if the last one failed, tolerated or not."""
        self._wait_for_thread()
        self.check()
        if self._tolerated:
            raise self._tolerated[-1]

    def close(self) -> None:
        """Waits, then releases the staging memory."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._stager.close()
            if self._log is not None:
                self._log.close()

    def _wait_for_thread(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _start(self, step: int, state: Mapping[str, Tensor], position: dict[str, Any], start: float) -> None:
        folder = self._run.checkpoints / folder_name(step, self._attempt.number)
        failpoint("save.copy", step)
        layouts = {key: layout(value) for key, value in state.items()}
        staged = self._stager.stage(state_pieces(state))
        job = _Job(step, folder, staged, layouts, position, start)
        job.stall = time.perf_counter() - start
        # From here on the thread competes for the interpreter: do as little as possible after this.
        self._pending = self._thread.submit(self._save, job)

    def _save(self, job: _Job) -> None:
        """Runs in the thread, with retries, until the save has succeeded or failed; the same outcome on every rank."""
        try:
            failure = self._try(job)
            for left in range(self._config.retries, 0, -1):
                if failure is None or not failure.storage:
                    break
                self._record(job, "retry", fault=failure.text, left=left)
                self._discard(job)
                time.sleep(RETRY_PAUSE)
                failure = self._try(job)
            if failure is None:
                self._succeeded(job)
            else:
                self._failed(job, failure)
        except Exception as error:  # a rank is gone, or this one is out of memory: ranks can't agree on anything
            self._error = SaveError(f"saving step {job.step} failed on rank {self._rank}: {_text(error)}")

    def _succeeded(self, job: _Job) -> None:
        self._tolerated.clear()
        seconds = time.perf_counter() - job.start
        self._record(job, "saved", stall=job.stall, seconds=seconds, staged=self._stager.bytes)

    def _failed(self, job: _Job, failure: _Failure) -> None:
        """Tolerates the failure, or lets the next `check` on every rank raise it."""
        if failure.storage:
            self._discard(job)
        error = SaveError(f"saving step {job.step} failed: {failure.text}")
        left = self._config.tolerate - len(self._tolerated)
        self._tolerated.append(error)
        if not failure.storage or left <= 0:
            self._error = error
        self._record(job, "failed", fault=failure.text, tolerated=self._error is None, left=max(0, left - 1))

    def _discard(self, job: _Job) -> None:
        """Deletes an unpublished checkpoint to free its space; no rank is writing to it any more."""
        if self._rank == 0:
            shutil.rmtree(job.folder, ignore_errors=True)

    def _record(self, job: _Job, event: str, **facts: Any) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk: the failure itself goes to the ranks' records
                self._log.write({"event": event, "step": job.step, "time": time.time(), **facts}, last=True)

    def _try(self, job: _Job) -> _Failure | None:
        """Tries once; returns why it failed, or None. Collective, with the same result on every rank."""
        save = PieceSave(job.staged, Writer(job.folder, self._rank), self._rank)
        plans = gather_json(self._outcome(save.plan), self._group)
        own = scatter_json(None if plans is None else self._divide(save, plans), self._group)
        if own["fault"]:
            return self._agree(_Failure(**own["fault"]))
        parts = gather_json(self._outcome(lambda: self._write(job, save, own["value"])), self._group)
        return self._agree(None if parts is None else self._publish(job, save, parts))

    def _outcome(self, work: Callable[[], Any]) -> dict[str, Any]:
        """What `work` returns, or why it failed. Other ranks wait for either."""
        try:
            return {"value": work(), "fault": None}
        except Exception as error:
            failure = _Failure(f"rank {self._rank}: {_text(error)}", isinstance(error, OSError))
            return {"value": None, "fault": asdict(failure)}

    def _divide(self, save: PieceSave, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """For each rank the pieces that it writes, or why nobody can write."""
        failure = _joined(plans)
        if failure is None:
            divided = self._outcome(lambda: save.divide([plan["value"] for plan in plans]))
            if divided["fault"] is None:
                return [{"value": rows, "fault": None} for rows in divided["value"]]
            failure = _Failure(**divided["fault"])
        return [{"value": None, "fault": asdict(failure)}] * len(plans)

    def _write(self, job: _Job, save: PieceSave, rows: list[Row]) -> dict[str, Any]:
        """Writes this rank's pieces; returns their places, the files' hashes, and layouts and content sums by key."""
        failpoint("save.upload", job.step)
        places = save.write(rows)
        failpoint("save.hash", job.step)
        files = {name: asdict(describe_file(job.folder / name)) for name in rank_files(job.folder, self._rank)}
        sums = add_up([{key: content_sum(piece)} for key, piece in save.written()])
        return {"places": places, "files": files, "layouts": job.layouts, "sums": sums}

    def _agree(self, failure: _Failure | None) -> _Failure | None:
        """Rank 0's result, on every rank. It also checks who owns the run: an attempt that lost it must not retry."""
        if self._rank == 0 and failure is not None and not self._attempt.owns_run():
            failure = self._superseded()
        agreed = broadcast_json(None if failure is None else asdict(failure), self._group)
        return None if agreed is None else _Failure(**agreed)

    def _superseded(self) -> _Failure:
        owner = self._run.attempts()[-1].number
        return _Failure(f"attempt {owner} owns the run now; what attempt {self._attempt.number} saves is void", False)

    def _publish(self, job: _Job, save: PieceSave, parts: list[dict[str, Any]]) -> _Failure | None:
        """On rank 0: publishes the manifest and prunes. Returns why the save failed, or None."""
        if (failure := _joined(parts)) is not None:
            return failure
        values = [part["value"] for part in parts]
        sums = add_up([part["sums"] for part in values])
        layouts = {key: text for part in values for key, text in part["layouts"].items()}
        files = {name: StoredFile(**facts) for part in values for name, facts in part["files"].items()}
        try:
            failpoint("save.metadata", job.step)
            metadata = save.finish([part["places"] for part in values])
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
                return _Failure(f"rank 0: {_text(error)}", True)
            # Everyone can see it, but it may not be on disk yet: keep it, and keep the older ones too.
            self._record(job, "published, not synced", fault=_text(error))
            return None
        except (ValueError, TypeError) as error:  # `position` is not JSON
            return _Failure(f"rank 0: {_text(error)}", False)
        if not self._attempt.owns_run():  # perhaps lost just now: the checkpoint is void, or the new owner's base
            return self._superseded()
        self._prune(job)
        return None

    def _sync_logs(self) -> None:
        """Log lines of the saved steps must be on disk before the checkpoint: no later attempt writes them again."""
        for log in (self._attempt.metrics, self._attempt.ledger):
            if log.exists():
                sync_file(log)
        sync_folder(self._attempt.path)

    def _prune(self, job: _Job) -> None:
        """The new checkpoint is valid even if old ones can't be deleted."""
        try:
            prune(self._run, self._attempt, self._config.keep)
        except (OSError, InputError) as error:
            self._record(job, "prune failed", fault=_text(error))


def _lower_priority() -> None:
    """Gives this thread a tenth of a training thread's share where cores are scarce (Linux: nice is per thread).

    While training waits for the save it leaves its cores idle, so a save is delayed by training's own work at most.
    Under `nice -n 15 gemctl train` it stays as it is: only root may raise a priority.
    """
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < NICE:
        os.setpriority(os.PRIO_PROCESS, thread, NICE)


def _joined(parts: list[dict[str, Any]]) -> _Failure | None:
    """The failures of all ranks as one."""
    failures = [_Failure(**part["fault"]) for part in parts if part["fault"]]
    if not failures:
        return None
    return _Failure("; ".join(failure.text for failure in failures), all(failure.storage for failure in failures))


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
