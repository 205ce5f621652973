"""The test harness itself: results by rank, and failures that name their rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.world import WorldError, run_world


def _sum() -> float:
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return float(ones[0]) + dist.get_rank()


def _fail(kind: str) -> None:
    if dist.get_rank() == 1:
        if kind == "raise":
            raise ValueError("planted")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    dist.barrier()


def test_results_come_by_rank() -> None:
    assert run_world(3, _sum) == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(("kind", "told"), [("raise", "planted"), ("kill", "died without"), ("hang", "still running")])
def test_failed_rank_is_named(kind: str, told: str) -> None:
    with pytest.raises(WorldError, match=r"rank 1") as error:
        run_world(2, _fail, kind, timeout=4)
    assert told in str(error.value)
