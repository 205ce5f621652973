"""A few ranks of this machine, forked from this process, that measure something together.

    results = on_ranks(2, work, config, threads=1)        # work(group, config) on each rank; its results, by rank

Nothing before the fork may have opened a collective or an OpenMP region; torch is imported already, so a rank starts in
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
    """Results of `work(*arguments)`, which the default process group (gloo) joins. GemctlError names ranks that failed.

    Each rank computes with `threads` threads.
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
        return False, "died without a result"
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
        warnings.simplefilter("ignore")  # of torch and TorchRec about themselves; the trainer's go to its logs
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
        pipe.send((True, pickle.dumps(work(*arguments))))
        dist.barrier()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)
