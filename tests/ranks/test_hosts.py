"""The real worker fails on another host than the mesh has it on, whether started by an agent or by hand."""

import dataclasses
import functools
import json
import os
import socket
from pathlib import Path

import pytest

from gemctl.config.compose import compose, to_yaml
from gemctl.errors import InputError
from gemctl.mesh.groups import HostReport, MisplacedError
from gemctl.mesh.topology import Topology
from gemctl.ranks.worker import _lay_by_hand, by_hand, main
from gemctl.run.attempt import Attempt, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import read_json, read_log
from gemctl.run.mesh import read_mesh, write_mesh
from tests.support.world import run_world

TWO = Topology(2, 1, 2, 1, 1, 2, 1)


def attempt_of_two(root: Path) -> Attempt:
    """An attempt of two hosts of one rank each, planned and not laid yet."""
    run = RunDir.create(str(root), "place", ["test"])
    attempt = claim(run.path, 1, nodes=2, ranks_per_node=1, heartbeat=1.0)
    attempt.config.write_text(to_yaml(compose(None, ["launcher.nodes=2"])))
    attempt.plan.write_text(json.dumps({"topology": dataclasses.asdict(TWO)}))
    return attempt


def start_workers(run: str, hosts: list[tuple[str, str]]) -> list[str]:
    """What the worker says on each host as rank 0 of a world of that size."""
    told = []
    for host, world in hosts:
        socket.gethostname = functools.partial(str, host)
        os.environ.update(RANK="0", WORLD_SIZE=world)
        with pytest.raises(MisplacedError) as caught:
            main(run, 1)
        told.append(str(caught.value))
    return told


def test_worker_fails_where_the_mesh_has_it_elsewhere(tmp_path: Path) -> None:
    attempt = attempt_of_two(tmp_path)
    write_mesh(attempt, [HostReport("n10", 1, "leaf1.n10"), HostReport("n2", 1, "leaf1.n2")])
    run = str(attempt.path.parent.parent)
    told = run_world(1, start_workers, run, [("n10", "2"), ("n2", "1")], gloo=False)[0]
    assert told == [
        "rank 0 runs on n10 as local rank 0; the mesh places it on n2 as local rank 0",
        "rank 0 is one of 1 ranks, but the mesh has 2",
    ]
    failed = read_log(attempt.rank_log(0))[-1]
    assert (failed["event"], failed["stage"], failed["type"]) == ("fail", "start", "MisplacedError")


def start_by_hand(run: str) -> str:
    """What a rank says that is started by hand."""
    with pytest.raises(InputError) as caught:
        by_hand(run)
    return str(caught.value)


def test_too_few_ranks_started_by_hand_all_say_so_and_take_nothing_over(tmp_path: Path) -> None:
    run = RunDir(attempt_of_two(tmp_path).path.parent.parent)
    told = run_world(1, start_by_hand, str(run.path), gloo=False)[0]
    assert told == f"{run.path}: its plan has 2 ranks, 1 were started"
    assert len(run.attempts()) == 1


def lay_by_hand(path: str, names: list[str], addresses: list[str]) -> list[str]:
    """Hosts of the mesh as ranks on hosts of these names lay it."""
    rank, attempt = int(os.environ["RANK"]), Attempt(Path(path))
    socket.gethostname = lambda: names[rank]
    os.environ["GEMCTL_TOPOLOGY_ADDRESS"] = addresses[rank]
    _lay_by_hand(attempt)
    return [host.name for host in read_mesh(attempt).hosts]


@pytest.mark.parametrize(
    ("addresses", "laid"),
    [(["", ""], ["n10", "n2"]), (["leaf1.n10", "leaf1.n2"], ["n2", "n10"])],
)
def test_ranks_started_by_hand_lay_their_hosts(tmp_path: Path, addresses: list[str], laid: list[str]) -> None:
    """In the order of the ranks if the network is unknown: then every rank is in its place."""
    attempt = attempt_of_two(tmp_path)
    assert run_world(2, lay_by_hand, str(attempt.path), ["n10", "n2"], addresses) == [laid, laid]
    assert [host["name"] for host in read_json(attempt.mesh)["hosts"]] == laid
