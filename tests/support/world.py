"""Worlds of processes for tests, forked from one preloaded server: `run_world(4, fn, arg)` → four results.

The server imports torch and torchrec once (4 s); a world of four gloo ranks then takes 0.1–0.3 s. `fn` must be a
module-level function; arguments and results travel by pickle. A rank that raises, dies or hangs fails the call
with that rank's traceback or exit code.
"""

import importlib
import multiprocessing.connection as mpc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemctl import process

_server: "subprocess.Popen[bytes] | None" = None
_pipe: Any = None


class WorldError(AssertionError):
    """A rank failed; the message has every failed rank's traceback or exit code."""


def run_world(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, gloo: bool = True) -> list[Any]:
    """Runs `fn(*args)` on `world` fresh ranks (gloo initialised unless `gloo=False`); returns their results by rank."""
    pipe = _connect()
    pipe.send((world, fn.__module__, fn.__qualname__, pickle.dumps(args), timeout, gloo))
    try:
        if not pipe.poll(timeout + 30):
            raise WorldError(f"the fork server did not answer within {timeout + 30:.0f} s")
        results = pipe.recv()
    except BaseException:  # the answer, should it come, would be taken for the next call's
        _abandon()
        raise
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
    if failed:
        raise WorldError("\n".join(failed))
    return [pickle.loads(value) for _, value in results]


def preload() -> None:
    """Starts the fork server without waiting for its imports."""
    _connect()


def stop() -> None:
    """Ends the fork server."""
    global _server, _pipe  # noqa: PLW0603 (one server for the whole test session)
    if _server is not None:
        _pipe.close()
        _server.wait(timeout=10)
        _server = _pipe = None


def _abandon() -> None:
    global _server, _pipe  # noqa: PLW0603
    if _server is not None:
        _server.kill()
        _server.wait(timeout=10)
        _pipe.close()
        _server = _pipe = None


def _connect() -> Any:
    global _server, _pipe  # noqa: PLW0603
    if _server is None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        _server = subprocess.Popen(
            process.python("-m", "tests.support.world", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            cwd=root,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
        )
        theirs.close()
        _pipe = mpc.Connection(ours.detach())
    return _pipe


def _serve(fd: int) -> None:
    for module in ("torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torchrec.distributed"):
        importlib.import_module(module)

    pipe = mpc.Connection(fd)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            os._exit(0)  # nothing is left to do, and Python's own end takes a second
        pipe.send(_run(*request))


def _run(world: int, module: str, name: str, args: bytes, timeout: float, gloo: bool) -> list[tuple[bool, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, pids = [], []
    for rank in range(world):
        ours, theirs = mpc.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            ours.close()
            _rank(rank, world, port, (module, name, args, gloo), theirs)
        theirs.close()
        pipes.append(ours)
        pids.append(pid)
    return _collect(pipes, pids, time.monotonic() + timeout)


def _rank(rank: int, world: int, port: int, call: tuple[str, str, bytes, bool], pipe: Any) -> None:
    module, name, args, gloo = call
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        process.die_with_parent(os.getppid())  # an abandoned server takes its ranks with it
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        torch.set_num_threads(1)
        if gloo:
            dist.init_process_group("gloo")
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        result = pickle.dumps(target(*pickle.loads(args)))
        if gloo:
            dist.barrier()
            dist.destroy_process_group()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)


def _collect(pipes: list[Any], pids: list[int], deadline: float) -> list[tuple[bool, Any]]:
    results: list[tuple[bool, Any] | None] = [None] * len(pids)
    failed_at: float | None = None
    while any(result is None for result in results):
        waiting = [pipe for pipe, result in zip(pipes, results, strict=True) if result is None]
        for pipe in mpc.wait(waiting, timeout=0.2):
            rank = pipes.index(pipe)
            try:
                results[rank] = pipes[rank].recv()
            except EOFError:
                results[rank] = (False, "died without a result (killed or exited)")
            if not results[rank][0] and failed_at is None:  # type: ignore[index]
                failed_at = time.monotonic()
        # The others may wait for the failed rank for ever: give them a moment, then end them.
        if time.monotonic() > deadline or (failed_at is not None and time.monotonic() > failed_at + 3):
            results = [result or (False, "still running when the world was ended") for result in results]
    for pid in pids:
        if failed_at is not None or time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [result for result in results if result is not None]


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
