"""Real training over four simulated hosts whose names sort wrongly, behind two leaf switches with slow uplinks."""

import importlib
import os
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gemctl.agent import Agent
from gemctl.mesh.groups import groups
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import LogTail
from gemctl.run.laid import read_mesh
from tests.mesh import hosts
from tests.mesh.hosts import HOSTS, Network, NetworkAgents
from tests.recovery import small_run
from tests.world import run_world

RATE = "60mbit"
TURNS = 2
WARM_UP, SHAPED, UNSHAPED = 4, 20, 40
STEPS = WARM_UP + SHAPED + WARM_UP + UNSHAPED
JOB = [
    "data.eval=null",
    "data.order=time",
    "train.global_batch=32",
    f"train.steps={STEPS}",
    "topology.dp_replicate=2",
    "topology.dp_shard=2",
    "launcher.nodes=4",
    "launcher.ranks_per_node=1",
]
LOG = ["--users", "50", "--items", "200", "--rows", "3000", "--eval-rows", "10"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def simulated() -> None:
    if (why := hosts.missing()) is not None:
        pytest.skip(why)


class Shaping:
    """Follows a run: the uplinks are slow for the first steps, and then as fast as all else."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.tail: LogTail | None = None
        self.begun: list[float] = []  # when rank 0 began each step
        self.slow = True
        network.shape(RATE)

    def note(self, text: str) -> None: ...

    def follow(self, attempt: Attempt) -> None:
        self.tail = self.tail or LogTail(attempt.rank_log(0))
        self.begun += [line["time"] for line in self.tail.new() if line["stage"] == "step"]
        if self.slow and len(self.begun) > WARM_UP + SHAPED:
            self.slow = False
            self.network.shape(None)

    def steps(self) -> tuple[list[float], list[float]]:
        """Seconds of each step with slow uplinks, and without; the first ones of either are left out."""
        steps = [after - before for before, after in pairwise(self.begun)]
        fast = WARM_UP + SHAPED + WARM_UP
        return steps[WARM_UP : WARM_UP + SHAPED], steps[fast:]


def train(root: str, arguments: list[str], addresses: bool) -> tuple[list[list[str]], list[float], list[float]]:
    """One run in a network of its own: hosts of each dp_shard group, seconds of steps with slow uplinks and without."""
    from gemctl.config.compose import compose, to_yaml
    from gemctl.plan.build import build, to_json
    from gemctl.recover.supervisor import Prepared, run_attempts
    from gemctl.specs import feature_spec

    importlib.import_module("gemctl.worker")  # once, for all hosts
    config = compose(None, arguments)
    plan = build(config, feature_spec.load(config.data.spec))
    run = RunDir.create(root, "net", ["test"])
    network = Network()
    shaping = Shaping(network)

    def serve(attempt: Attempt, node: int, store: str) -> int:
        if addresses:
            os.environ["GEMCTL_TOPOLOGY_ADDRESS"] = HOSTS[node].topology
        agent: Any = importlib.import_module("gemctl.agent")
        return int(agent.main([str(run.path), "--attempt", str(attempt.number), "--node", str(node), "--store", store]))

    prepared = Prepared(to_yaml(config), to_json(plan), len(HOSTS), 1)
    run_attempts(run, 1, prepared, config.recover, NetworkAgents(run, network, serve), shaping)
    mesh = read_mesh(run.attempt(1))
    names = [[mesh.hosts[rank].name for rank in ranks] for ranks in groups(mesh.topology)["dp_shard"].tolist()]
    return names, *shaping.steps()


@pytest.mark.timeout(300)
def test_laid_mesh_is_faster_where_uplinks_are_slow(tmp_path: Path) -> None:
    """Twice at most: on a busy machine one turn's steps without shaping may differ by their noise alone."""
    from gemctl.cli import main

    assert main(["data", "synth", str(tmp_path / "log"), *LOG]) == 0
    data = [f"data.spec={tmp_path}/log/spec.yaml", f"data.train={tmp_path}/log/train.parquet"]
    slow, fast = Steps([], []), Steps([], [])
    for _ in range(TURNS):
        slow_laid, fast_laid = _train(tmp_path, data, True, [["n1", "n2"], ["n3", "n10"]])
        slow_named, fast_named = _train(tmp_path, data, False, [["n1", "n10"], ["n2", "n3"]])
        slow, fast = slow.and_of(slow_laid, slow_named), fast.and_of(fast_laid, fast_named)
        if abs(fast.ratio() - 1) < 0.1:
            break
    assert slow.ratio() >= 1.5
    assert 1 / 1.1 < fast.ratio() < 1.1


@dataclass(frozen=True)
class Steps:
    """Seconds of steps with ranks as laid, and in the order of the hosts' names."""

    laid: list[float]
    named: list[float]

    def and_of(self, laid: list[float], named: list[float]) -> "Steps":
        return Steps(self.laid + laid, self.named + named)

    def ratio(self) -> float:
        """Of the medians: above 1 the laid mesh is faster."""
        return statistics.median(self.named) / statistics.median(self.laid)


def _train(root: Path, data: list[str], addresses: bool, wanted: list[list[str]]) -> tuple[list[float], list[float]]:
    found, slow, fast = run_world(1, train, str(root), [*data, *JOB], addresses, gloo=False, timeout=90)[0]
    assert found == wanted
    return slow, fast


def cut_off(root: str) -> small_run.Ended:
    """A small run in which the last host's cable is taken out; how it ended."""
    case = small_run.Case(root, nodes=4, ranks_per_node=1, steps=2000, disturb="cut")
    run = RunDir.create(root, "small", ["test"])
    network = Network()
    small_run.DISTURBANCES["cut"] = lambda run, records: network.cut(3)

    def serve(attempt: Attempt, node: int, store: str) -> int:
        return Agent(run, attempt, node, store).serve(small_run.work)

    return small_run.supervise_with(case, run, NetworkAgents(run, network, serve))


def test_host_that_is_cut_off_is_named(tmp_path: Path) -> None:
    end = run_world(1, cut_off, str(tmp_path), gloo=False)[0]
    assert "lost host n3 (node 3): no sign of its agent for 5 s" in end.message
    assert end.left == []
    assert end.seconds < 20
