"""Functions that single ranks run in the checkpoint tests. No pytest here: each forked rank imports this module."""

import errno
import os
import pickle
import resource
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from gemctl.checkpoint import export as exporting
from gemctl.checkpoint import save as saving
from gemctl.checkpoint.content import content_sums
from gemctl.checkpoint.diff import compare
from gemctl.checkpoint.export import export
from gemctl.checkpoint.load import load
from gemctl.checkpoint.save import SaveError, Saver
from gemctl.checkpoint.staging import Stager
from gemctl.checkpoint.storage import Writer
from gemctl.config.schema import CheckpointConfig
from gemctl.errors import GemctlError, InputError
from gemctl.run.attempt import Base
from gemctl.run.checkpoints import Comparison
from gemctl.run.directory import RunDir
from gemctl.run.manifest import checkpoints
from tests.checkpoint.checkpoint_world import Trainee, add_attempt, facts
from tests.support.full_state import full_state_hash, gather_full


def saver_of(path: Path, attempt: int = 1, keep: int = 3, retries: int = 0, tolerate: int = 0) -> Saver:
    config = CheckpointConfig(keep=keep, retries=retries, tolerate=tolerate)
    return Saver(RunDir(path).checkpoints, attempt, config, facts())


def save_and_go_on(path: Path) -> tuple[str, list[float]]:
    """Two steps, a save, and two more steps while it uploads; returns the hash at the save and the later losses."""
    saver, trainee = saver_of(path), Trainee(5)
    for number in range(2):
        trainee.step(number)
    digest = full_state_hash(trainee.state())
    saver.save(2, trainee.state(), {"rows": 64})
    losses = [trainee.step(number) for number in range(2, 4)]
    saver.close()
    return digest, losses


def load_and_go_on(path: Path) -> tuple[str, list[float]]:
    """Loads that checkpoint into a trainee with other values; returns its hash and its next losses."""
    trainee = Trainee(6)
    trainee.step(0)  # so that AdamW has a state to be replaced
    position = load(path / "checkpoints/step_2.a1", trainee.state()).position
    assert position == {"rows": 64}
    digest = full_state_hash(trainee.state())
    return digest, [trainee.step(number) for number in range(2, 4)]


def full_values(seed: int) -> tuple[str, dict[str, Any]]:
    """Hash and, on rank 0, full values (as lists) of a fresh trainee."""
    state = Trainee(seed).state()
    return full_state_hash(state), {key: value.tolist() for key, value in gather_full(state).items()}


def save_while_writer_waits(path: Path) -> bool:
    """Changes the values, by collectives of the default group, before the writer may start; then saves again."""
    changed = threading.Event()
    original = Writer.write_data

    def late(self: Writer, *args: Any) -> Any:
        assert changed.wait(20)
        return original(self, *args)

    patch.object(Writer, "write_data", late).start()
    saver, state = saver_of(path), plain_state()
    saver.save(1, state, {})
    for _ in range(20):
        for value in state.values():
            dist.all_reduce(value)
    threading.Timer(0.3, changed.set).start()
    waited = saver.save(2, state, {})  # waits for the first
    saver.close()
    restored = {key: torch.zeros_like(value) for key, value in state.items()}
    load(path / "checkpoints/step_1.a1", restored)
    same = all(torch.equal(value, restored[key]) for key, value in plain_state().items())
    return same and waited > 0.25


def plain_state(elements: int = 5000) -> dict[str, Tensor]:
    """Replicated tensors, including a scalar like AdamW's step, bfloat16 and an empty one."""
    values = torch.arange(elements, dtype=torch.float32) % 97
    return {"a": values, "b": values.to(torch.bfloat16), "step": torch.tensor(3.0), "none": torch.zeros(0, 4)}


def save_twice(path: Path, steps: list[int], attempt: int, keep: int) -> None:
    """Saves plain states that differ by step, waiting for each to be published."""
    saver = saver_of(path, attempt, keep)
    for step in steps:
        saver.save(step, {key: value + step for key, value in plain_state().items()}, {"rows": step})
        saver.wait()
    saver.close()


def die_in(path: Path, stage: str) -> None:
    """Publishes step 2 with keep=1, then kills all ranks in a stage of the save of step 4."""
    save_twice(path, [2], 1, 1)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    me = dist.get_rank()

    def die(*_: Any, **__: Any) -> None:
        if me == 0:
            for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                os.kill(pid, signal.SIGKILL)

    def after(function: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            die()
            return result

        return both

    places: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "copy": (Stager, "stage", after(Stager.stage)),
        "plan": (Writer, "prepare_local_plan", after(Writer.prepare_local_plan)),
        "metadata": (Writer, "finish", after(Writer.finish)),
        "manifest's draft": (os, "link", die),
        "write": (Writer, "write_data", after(Writer.write_data)),
        "hash": (saving, "describe_file", die),
        "before the manifest": (saving, "publish", die),
        "after the manifest": (saving, "publish", after(saving.publish)),
        "in pruning": (shutil, "rmtree", die),
    }
    owner, name, replacement = places[stage]
    patch.object(owner, name, replacement).start()
    save_twice(path, [4], 1, 1)
    time.sleep(20)


def stop_in(path: Path, stage: str, keep: int) -> str | None:
    """Publishes step 2; rank 0 stops in a stage of the save of step 4. Returns the save's error after SIGCONT."""
    patch.object(saving, "RETRY_PAUSE", 0.01).start()
    save_twice(path, [2], 1, keep)
    places: dict[str, tuple[Any, str]] = {
        "write": (Writer, "write_data"),
        "hash": (saving, "describe_file"),
        "manifest": (saving, "publish"),
        "link": (os, "link"),
        "prune": (saving, "prune"),
    }
    owner, name = places[stage]
    original = getattr(owner, name)

    def stopped(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0 and not (path / "pid").exists():
            (path / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)  # another thread may have taken the signal, and this one runs for a moment
        return original(*args, **kwargs)

    patch.object(owner, name, stopped).start()
    saver = saver_of(path, 1, keep, retries=2, tolerate=5)
    saver.save(4, {key: value + 4 for key, value in plain_state().items()}, {"rows": 4})
    try:
        saver.wait()
    except SaveError as error:
        return str(error)
    return None


def load_errors(folders: list[Path]) -> list[list[str]]:
    """What `load` says of each folder."""
    found: list[list[str]] = []
    for folder in folders:
        try:
            load(folder, plain_state())
            found.append([])
        except InputError as error:
            found.append(error.problems)
    return found


def read_errors(folder: Path, target: Path) -> list[str]:
    """What `compare` and `export` say of a folder."""
    said = []
    for call in (lambda: compare(folder, folder), lambda: export(folder, target, 10**9, True)):
        try:
            call()
        except GemctlError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def load_wrong_state(folder: Path) -> list[str]:
    state = plain_state()
    state["a"] = torch.zeros(7)
    state["b"] = torch.zeros(5000, dtype=torch.float16)
    if dist.get_rank() == 1:
        state["mine"] = torch.zeros(1)  # a key of one rank only
    del state["step"]
    try:
        load(folder, state)
    except InputError as error:
        return error.problems
    return []


def save_with_small_files(path: Path, limited: int) -> tuple[str, str]:
    """One rank can't write files of more than 64 kB; returns the errors of `check` and of another save."""
    saver, big = saver_of(path), {"big": torch.zeros(100_000), "other": torch.zeros(100_000)}
    if dist.get_rank() == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    saver.save(1, big, {})
    said: list[str] = []
    deadline = time.monotonic() + 20
    while not said and time.monotonic() < deadline:
        try:
            saver.check()
            time.sleep(0.01)
        except SaveError as error:
            said.append(str(error))
    try:
        saver.save(2, big, {})
    except SaveError as error:
        said.append(str(error))
    return said[0], said[1]


def save_on_a_disk_that_fills(
    path: Path, fails: dict[int, int], retries: int, tolerate: int
) -> tuple[list[int], str | None, str | None]:
    """Rank 1 cannot write the first `fails[step]` tries of a save. Steps whose `check` passed, what ended it, and what
    `wait` says at the end."""
    patch.object(saving, "RETRY_PAUSE", 0.01).start()
    left, original = dict(fails), Writer.write_data

    def write(self: Writer, *args: Any) -> Any:
        step = int(self._file.parent.name.split(".")[0].removeprefix("step_"))
        limited = dist.get_rank() == 1 and left.get(step, 0) > 0
        left[step] = left.get(step, 0) - 1
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (65536 if limited else resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        return original(self, *args)

    patch.object(Writer, "write_data", write).start()
    saver, passed = saver_of(path, keep=1, retries=retries, tolerate=tolerate), []
    for step in (2, 4, 6):
        try:
            saver.save(step, {"big": torch.full((100_000,), float(step)), "other": torch.zeros(100_000)}, {})
            saver._wait_for_thread()
            saver.check()
            passed.append(step)
        except SaveError as error:
            return passed, str(error), None
    try:
        saver.wait()
    except SaveError as error:
        return passed, None, str(error)
    return passed, None, None


def save_and_fail_to_prune(path: Path) -> list[str]:
    """Two saves with keep=1 whose old checkpoints can't be deleted; returns the valid checkpoints."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "somewhere")

    patch.object(saving, "prune", refuse).start()
    save_twice(path, [2, 4], 1, 1)
    return [checkpoint.path.name for checkpoint in checkpoints(RunDir(path)) if checkpoint.flaw is None]


def save_unsynced(path: Path) -> list[str]:
    """Two saves with keep=1; the disk fails after the second manifest was written. Returns the valid checkpoints."""
    save_twice(path, [2], 1, 1)
    publish = saving.publish

    def publish_and_fail(*given: Any) -> None:
        publish(*given)
        raise OSError(errno.EIO, "Input/output error", "somewhere")

    patch.object(saving, "publish", publish_and_fail).start()
    save_twice(path, [4], 1, 1)
    return [checkpoint.path.name for checkpoint in checkpoints(RunDir(path)) if checkpoint.flaw is None]


def save_bad_position(path: Path) -> str:
    saver = saver_of(path)
    saver.save(1, plain_state(), {"rows": float("nan")})
    try:
        saver.wait()
    except SaveError as error:
        return str(error)
    return ""


def time_saves(path: Path, megabytes: int, saves: int) -> dict[str, list[float]]:
    """Seconds of each save after the first, on this rank, with `megabytes` of state here.

    `stall` beside `copy`, the mean of two bare copies of the same tensors into memory of the same kind, one just before
    the save and one just after it has ended; `whole`: the save from its start to its end. These without the time in
    which the thread could run and other processes had the cores, but with all waiting. `during`: a step of training
    while it uploads, beside `alone`, one before or after; medians within the save. `first`: the first save's stall.
    """
    saver = saver_of(path, keep=1)
    state = {f"t{at}": torch.rand(250_000) for at in range(megabytes)}
    room = [torch.zeros_like(value) for value in state.values()]
    times: dict[str, list[float]] = {"first": [saver.save(1, state, {})]}
    saver.wait()
    for step in range(2, saves + 2):
        alone = [_time_step() for _ in range(9)]
        dist.barrier()
        before = _time_copy(state, room)
        dist.barrier()
        stall, upload = _Watch(), _Watch(next(iter(saver._thread._threads)).native_id)
        saver.save(step, state, {})
        found, during = {"stall": stall.seconds()}, []
        while not saver._pending.done():  # type: ignore[union-attr]
            during.append(_time_step())
        saver.wait()
        found["whole"] = upload.seconds()
        dist.barrier()
        found["copy"] = (before + _time_copy(state, room)) / 2
        dist.barrier()
        alone += [_time_step() for _ in range(9)]
        found |= {"alone": statistics.median(alone), "during": statistics.median(during)}
        for name, value in found.items():
            times.setdefault(name, []).append(value)
    saver.close()
    return times


def _time_copy(state: dict[str, Tensor], room: list[Tensor]) -> float:
    watch = _Watch()
    for target, value in zip(room, state.values(), strict=True):
        target.copy_(value)
    return watch.seconds()


class _Watch:
    """Seconds of a thread (this one), excluding the time that it waited for a core (Linux)."""

    def __init__(self, thread: int | None = None) -> None:
        self._file = Path(f"/proc/self/task/{thread or threading.get_native_id()}/schedstat")
        self._start = self._now()

    def _now(self) -> float:
        while True:
            queued = self._queued()
            now = time.perf_counter()
            if self._queued() == queued:  # else it lost its core between the two clocks
                return now - queued * 1e-9

    def _queued(self) -> int:
        return int(self._file.read_text().split()[1])

    def seconds(self) -> float:
        return self._now() - self._start


def _time_step() -> float:
    """Seconds of a step: some operations of a millisecond each, on one thread."""
    start = time.perf_counter()
    for _ in range(20):
        torch.mm(_LEFT, _LEFT)
    return time.perf_counter() - start


_LEFT = torch.rand(320, 320)


def compare_all(pairs: list[tuple[Path, Path]]) -> list[Comparison]:
    return [compare(a, b) for a, b in pairs]


def save_variants(path: Path) -> None:
    """Attempt 1 … 5: a state, the same, one last bit changed, a key less, another shape."""
    base = plain_state()
    nudged = {**base, "a": torch.nextafter(base["a"], torch.full_like(base["a"], 1e9))}
    nudged["a"] = torch.where(torch.arange(5000) == 17, nudged["a"], base["a"])
    fewer = {key: value for key, value in base.items() if key != "step"}
    longer = {**base, "b": torch.zeros(3, dtype=torch.bfloat16)}
    for attempt, state in enumerate([base, base, nudged, fewer, longer], start=1):
        if attempt > 1:
            add_attempt(RunDir(path), attempt, Base(f"step_1.a{attempt - 1}", 1))
        saver = saver_of(path, attempt, keep=9)
        saver.save(1, state, {})
        saver.close()


class Planted:
    """Unpickling this makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def plant(folder: Path, mark: Path) -> None:
    """Puts a pickle that makes the folder `mark` in the metadata's place."""
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(mark)))


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def lose_a_value_on_the_way(path: Path) -> list[str]:
    """What `load` says if the storage library leaves one optimizer state as it was, or loads it into wrong places."""
    saver, trainee = saver_of(path), Trainee(5)
    trainee.step(0)
    saver.save(2, trainee.state(), {})
    saver.close()
    said, original = [], dcp.load

    def without(state: dict[str, Tensor], **rest: Any) -> None:
        original({key: value for key, value in state.items() if not key.endswith("exp_avg")}, **rest)

    def turned(state: dict[str, Tensor], **rest: Any) -> None:
        original(state, **rest)
        local: Any = state["optim.dense.0.weight.exp_avg"].to_local()  # type: ignore[attr-defined]
        local.copy_(local.flip(0))

    for replacement in (without, turned):
        with patch.object(dcp, "load", replacement):
            try:
                load(path / "checkpoints/step_2.a1", Trainee(6).trained().state())
            except GemctlError as error:
                said.append(str(error))
    return said


def sums_by_hand(seed: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Content sums of a fresh trainee, and on rank 0 its full values."""
    state = Trainee(seed).trained().state()
    return content_sums(state), gather_full(state)


def save_for_export(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Saves a trainee and plain tensors; on rank 0 dtype, shape and bytes of every full tensor."""
    state = Trainee(5).trained().state() | plain_state(50)
    saver = saver_of(path)
    saver.save(2, state, {})
    full = gather_full(state)
    saver.close()
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    raw = {key: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, value in full.items()}
    return {key: (names[value.dtype], tuple(value.shape), raw[key]) for key, value in full.items()}


def export_to(folder: Path, target: Path, largest: int, optimizer: bool) -> None:
    export(folder, target, largest, optimizer)


def export_with_a_lost_value(folder: Path, target: Path) -> str:
    """What is said if a tensor does not arrive."""
    original = exporting.read_object

    def lose(reader: Any, key: str, values: Tensor) -> None:
        if key != "scale":
            original(reader, key, values)

    with patch.object(exporting, "read_object", lose):
        try:
            export(folder, target, 10**9, True)
        except GemctlError as error:
            return str(error)
    return ""
