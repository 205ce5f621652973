"""What ranks tell each other is JSON or tensors: no pickle of another rank's is ever opened."""

import os
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gemctl import env
from gemctl.errors import GemctlError
from gemctl.mesh.topology import Topology
from gemctl.parallel import exchange
from tests.checkpoint import checkpoint_ranks
from tests.checkpoint.checkpoint_world import make_run
from tests.parallel import any_layout
from tests.support.world import run_world


class Planted:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def exchange_all() -> dict[str, Any]:
    rank = env.rank()
    value = {"rank": rank, "text": "é" * 10**rank, "many": 2**64 - 1}
    return {
        "all": exchange.all_gather_json(value),
        "gathered": exchange.gather_json([value["rank"]] * rank),
        "scattered": exchange.scatter_json(
            [{"to": other, "pad": "x" * other} for other in range(3)][: 3 * (rank == 0)]
        ),
        "told": exchange.broadcast_json(f"from {rank}"),
    }


def test_values_arrive_whole_whatever_their_lengths() -> None:
    found = run_world(3, exchange_all)
    expected = [{"rank": rank, "text": "é" * 10**rank, "many": 2**64 - 1} for rank in range(3)]
    for rank, one in enumerate(found):
        assert one == {
            "all": expected,
            "gathered": [[], [1], [2, 2]] if rank == 0 else None,
            "scattered": {"to": rank, "pad": "x" * rank},
            "told": "from 0",
        }


def receive_a_pickle(mark: Path) -> list[str]:
    """Rank 1, or whoever has got between it and the others, sends a pickle in place of JSON."""
    told = []
    if env.rank() == 1:
        exchange._text = lambda value: pickle.dumps(Planted(mark))
    for call in (exchange.all_gather_json, exchange.gather_json):
        try:
            call({})
        except GemctlError as error:
            told.append(str(error))
    return told


def test_a_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    told = run_world(2, receive_a_pickle, tmp_path / "mark")
    assert [line.partition(":")[0] for line in told[0]] == ["what rank 1 sent is not JSON"] * 2
    assert not (tmp_path / "mark").exists()


def _without_object_collectives() -> Any:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("an object collective")

    return patch.multiple(distributed_c10d, _object_to_tensor=refused, _tensor_to_object=refused)


def work_without_pickles(path: Path) -> bool:
    """Trains with experts and 2D tables, saves and loads, where none of torch's object collectives work."""
    with _without_object_collectives():
        any_layout.train(any_layout.Case(Topology(4, 2, 2, 2, 2, 2, 4), "mixed", "sgd"))
        saved = checkpoint_ranks.save_and_go_on(path)
        return saved == checkpoint_ranks.load_and_go_on(path)


def use_an_object_collective() -> None:
    with _without_object_collectives():
        dist.broadcast_object_list([1])


def test_training_saving_and_loading_use_no_object_collective(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert run_world(4, work_without_pickles, tmp_path) == [True] * 4
    with pytest.raises(AssertionError, match="an object collective"):  # so this would have been seen
        run_world(1, use_an_object_collective)
