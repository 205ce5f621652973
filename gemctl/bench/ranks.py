"""Forks ranks from this process that measure something together.

    results = on_ranks(2, work, config, threads=1)        # the results of work(config), by rank

Before the fork there must have been no collective and no OpenMP region. torch is imported already, so a rank starts in
a few milliseconds.
"""

import logging
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemctl.errors import GemctlError
from gemctl.process import die_with_parent


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any, threads: int) -> list[Any]:
    """The results of `work(*arguments)` by rank, each with `threads` threads and the default process group (gloo).

    GemctlError names the ranks that failed.
    """
    with tempfile.TemporaryDirectory(prefix="gemctl-ranks-") as folder:
        store, parent = Path(folder) / "store", os.getpid()
        pipes, pids = [], []
        for rank in range(world):
            ours, theirs = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                ours.close()
                die_with_parent(parent)
                _rank(rank, world, store, threads, work, arguments, theirs)
            theirs.close()
            pipes.append(ours)
            pids.append(pid)
        found = [_result(pipe) for pipe in pipes]
        for pid in pids:
            os.waitpid(pid, 0)
    failed = [f"rank {rank}: {value}" for rank, (good, value) in enumerate(found) if not good]
    if failed:
        raise GemctlError("\n".join(failed))
    return [pickle.loads(value) for _, value in found]


def _result(pipe: Connection) -> tuple[bool, Any]:
    try:
        found: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, "the process died without a result"
    return found


def _rank(
    rank: int,
    world: int,
    store: Path,
    threads: int,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    pipe: Connection,
) -> None:
    try:
        torch.set_num_threads(threads)
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")  # of torch and TorchRec
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
        pipe.send((True, pickle.dumps(work(*arguments))))
        dist.barrier()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)
