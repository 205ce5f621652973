"""Real training over four simulated hosts whose names sort wrongly, behind two leaf switches with slow uplinks."""

import importlib
import os
import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gemctl import env
from gemctl.cli import main
from gemctl.config.compose import compose, to_yaml
from gemctl.mesh.groups import groups
from gemctl.plan.build import build, to_json
from gemctl.ranks.agent import Agent
from gemctl.recover.context import Prepared
from gemctl.recover.supervisor import run_attempts
from gemctl.run import requests
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import LogTail
from gemctl.run.mesh import read_mesh
from gemctl.specs import feature_spec
from tests.ranks import hosts
from tests.ranks.hosts import HOSTS, Network, NetworkAgents
from tests.support import small_run
from tests.support.world import run_world

RATE = "40mbit"
TURNS = 2
LAID, NAMED = ORDERS = [["n1", "n2", "n3", "n10"], ["n1", "n10", "n2", "n3"]]
WARM_UP, SHAPED, UNSHAPED = 4, 20, 60  # steps
SLICE = 2.0  # seconds
JOB = [
    "data.eval=null",
    "data.order=time",
    "train.global_batch=32",
    "train.steps=100000",
    "topology.dp_replicate=2",
    "topology.dp_shard=2",
    "topology.mp_replicate=2",
    "topology.mp_shard=2",
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
    """Follows one of two runs at once. The uplinks of both are slow until both have done their steps; then they are
    fast, and the runs take turns of `SLICE` seconds, so that what else the machine does meanwhile slows both alike.
    """

    def __init__(self, run: RunDir, agents: NetworkAgents, flags: Path, number: int) -> None:
        self.run, self.agents, self.flags, self.number = run, agents, flags, number
        self.tail: LogTail | None = None
        self.begun: list[float] = []  # when rank 0 began each step
        self.fast_from: int | None = None  # step
        self.paused = self.stopped = False
        agents.network.shape(RATE)

    def note(self, text: str) -> None: ...

    def follow(self, attempt: Attempt) -> None:
        self.tail = self.tail or LogTail(attempt.rank_log(0))
        self.begun += [line["time"] for line in self.tail.new() if line["stage"] == "step"]
        if self.fast_from is None and self._both("slow", len(self.slow()) == SHAPED):
            self.agents.network.shape(None)
            self.fast_from = len(self.begun)
        elif self.fast_from is not None and not self.stopped:
            self.stopped = self._both("fast", len(self.fast()) >= UNSHAPED)
            self._pause(not self.stopped and int(time.time() / SLICE) % 2 != self.number)
            if self.stopped:
                requests.file(self.run, "stop")

    def slow(self) -> list[float]:
        """Seconds of the steps with slow uplinks."""
        return [after - before for before, after in pairwise(self.begun)][WARM_UP : WARM_UP + SHAPED]

    def fast(self) -> list[float]:
        """Seconds of the steps without, of those that were not interrupted."""
        steps = list(pairwise(self.begun))[(self.fast_from or 0) + WARM_UP :]
        return [after - before for before, after in steps if int(before / SLICE) == int(after / SLICE)]

    def _both(self, phase: str, done: bool) -> bool:
        """True once both runs are done with the phase."""
        if done:
            (self.flags / f"{phase}-{self.number}").touch()
        return len(list(self.flags.glob(f"{phase}-*"))) == 2

    def _pause(self, wanted: bool) -> None:
        if wanted != self.paused:
            self.paused = wanted
            for pid in self.agents.pids.values():
                os.killpg(pid, signal.SIGSTOP if wanted else signal.SIGCONT)


def train(root: str, arguments: list[str]) -> tuple[list[list[str]], list[float], list[float]]:
    """One run in a network of its own, as laid (rank 0 of the test's world) or with nobody saying where hosts lie (rank
    1): the hosts of each shard group, seconds of the steps with slow uplinks, and of those without.
    """
    importlib.import_module("gemctl.ranks.worker")  # once, for all hosts
    config = compose(None, arguments)
    plan = build(config, feature_spec.load(config.data.spec))
    run = RunDir.create(root, "net", ["test"])
    number = env.rank()

    def serve(attempt: Attempt, node: int, store: str) -> int:
        cores = sorted(os.sched_getaffinity(0))  # which ranks share a core must not differ between the orders
        os.sched_setaffinity(0, {cores[ORDERS[number].index(HOSTS[node].name) % len(cores)]})
        if number == 0:
            os.environ["GEMCTL_TOPOLOGY_ADDRESS"] = HOSTS[node].topology
        agent: Any = importlib.import_module("gemctl.ranks.agent")
        return int(agent.main([str(run.path), "--attempt", str(attempt.number), "--node", str(node), "--store", store]))

    prepared = Prepared(to_yaml(config), to_json(plan), len(HOSTS), 1)
    agents = NetworkAgents(run, Network(), serve)
    shaping = Shaping(run, agents, Path(root), number)
    run_attempts(run, 1, prepared, config.recover, agents, shaping)
    mesh = read_mesh(run.attempt(1))
    found = groups(mesh.topology)
    assert (found["mp_shard"] == found["dp_shard"]).all()
    names = [[mesh.hosts[rank].name for rank in ranks] for ranks in found["dp_shard"].tolist()]
    return names, shaping.slow(), shaping.fast()


@pytest.mark.timeout(300)
def test_laid_mesh_is_faster_where_uplinks_are_slow(tmp_path: Path) -> None:
    """Both orders at once; twice at most, as on a busy machine the steps without shaping may differ by noise alone."""
    assert main(["data", "synth", str(tmp_path / "log"), *LOG]) == 0
    data = [f"data.spec={tmp_path}/log/spec.yaml", f"data.train={tmp_path}/log/train.parquet"]
    slow: list[list[float]] = [[], []]
    fast: list[list[float]] = [[], []]
    for turn in range(TURNS):
        root = tmp_path / f"turn{turn}"
        root.mkdir()
        laid, named = run_world(2, train, str(root), [*data, *JOB], gloo=False, timeout=100)
        assert (laid[0], named[0]) == ([LAID[:2], LAID[2:]], [NAMED[:2], NAMED[2:]])
        for order, run in enumerate((laid, named)):
            slow[order] += run[1]
            fast[order] += run[2]
        if 1 / 1.1 < ratio(fast) < 1.1:
            break
    assert ratio(slow) >= 1.5
    assert 1 / 1.1 < ratio(fast) < 1.1


def ratio(steps: list[list[float]]) -> float:
    """Median of the steps in the order of the names over that of the laid ones: above 1 the laid mesh is faster."""
    return statistics.median(steps[1]) / statistics.median(steps[0])


CUT = (3, 0)


def cut_off(root: str) -> small_run.Ended:
    """A small run in which a host's cable is taken out; how it ended."""
    node = CUT[env.rank()]
    case = small_run.Case(root, nodes=4, ranks_per_node=1, job=small_run.Job(2000), disturb=small_run.Disturb("cut"))
    run = RunDir.create(root, f"cut{node}", ["test"])
    network = Network()
    small_run.DISTURBANCES["cut"] = lambda run, records: network.cut(node)

    def serve(attempt: Attempt, node: int, store: str) -> int:
        return Agent(run, attempt, node, store).serve(small_run.work)

    return small_run.supervise_with(case, run, NetworkAgents(run, network, serve))


def test_host_that_is_cut_off_is_named(tmp_path: Path) -> None:
    """Also that of node 0, which keeps the store: then all others fall silent."""
    last, first = run_world(2, cut_off, str(tmp_path), gloo=False)
    assert "lost host n3 (node 3): no heartbeat from its agent for 5 s" in last.message
    assert "lost host n1 (node 0): no other host reaches it: no heartbeat from its agent for 5 s" in first.message
    for end in (last, first):
        assert end.left == []
        assert end.seconds < 20
