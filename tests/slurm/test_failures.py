"""Nodes that go DOWN, die, are cut off or were bad from the start; the runs end as if nothing had happened."""

import json
import signal

import pytest

from gemctl.run.attempt import Attempt
from gemctl.run.files import read_log
from gemctl.run.manifest import checkpoints
from tests.slurm.desk import STEPS, Desk, Saved, Watched
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SLOW = "slow:factor=30"  # the first attempt, so that it is not done before something happens to it
RUN = f"train.steps={STEPS}"


def test_node_that_is_set_down_has_the_job_queued_again(desk: Desk, undisturbed: Saved) -> None:
    run = desk.train(RUN, "recover.budgets.crash=0", inject=SLOW)
    desk.at_work(run, step=7)
    (_, bad) = run.hosts(1)
    desk.cluster.must("scontrol", "update", f"NodeName={bad}", "State=DOWN", "Reason=test")
    desk.start_again(run.job())
    assert desk.ended(run, 2)["outcome"] == "finished"
    assert bad not in run.hosts(2)
    assert run.attempt(2).base().step > 0
    assert run.saved() == undisturbed


def test_node_that_dies_has_the_job_queued_again(desk: Desk, undisturbed: Saved) -> None:
    """The supervisor sees it within seconds, and has no other node; SLURM sees it after SlurmdTimeout."""
    run = desk.train(RUN, "recover.budgets.crash=0", inject=SLOW)
    desk.at_work(run, step=7)
    (_, bad) = run.hosts(1)
    killed = desk.now()
    desk.cluster.kill(bad)
    end = desk.ended(run, 1)
    assert (end["kind"], end["cause"]["kind"]) == ("preemption", "host")
    assert f"lost host {bad}" in end["cause"]["text"]
    assert end["time"] - killed < 30
    desk.start_again(run.job())
    last = finished(desk, run)
    assert bad not in run.hosts(last)
    assert run.saved() == undisturbed


def finished(desk: Desk, run: Watched) -> int:
    """Waits until the run has finished; returns the number of the attempt that did it."""
    wait_for(
        lambda: any((attempt.end() or {}).get("outcome") == "finished" for attempt in run.dir.attempts()),
        240, lambda: f"a finished attempt{desk.story(run)}",
    )  # fmt: skip
    return run.dir.attempts()[-1].number


def test_spare_node_takes_the_place_of_one_that_dies(desk: Desk, undisturbed: Saved) -> None:
    """In the same job, which is not queued again."""
    run = desk.train(RUN, "launcher.slurm.spare_nodes=1", "recover.budgets.crash=0", inject=SLOW)
    desk.at_work(run, step=7)
    (_, bad) = run.hosts(1)
    desk.cluster.kill(bad)
    assert desk.ended(run, 2)["outcome"] == "finished"
    assert run.hosts(1)[0] in run.hosts(2)
    assert bad not in run.hosts(2)
    assert bad in json.loads((run.attempt(2).path / "hosts.json").read_text())["left_out"]
    assert run.saved() == undisturbed
    desk.job_ended(run.job(), "COMPLETED")
    assert desk.restarts(run.job()) == 0


def test_bad_node_is_named_and_left_out(desk: Desk) -> None:
    """Its loopback is down, and the allocation has a spare one."""
    desk.cluster.loopback("n3", up=False)
    try:
        run = desk.train("train.steps=3", "launcher.slurm.spare_nodes=1")
        assert desk.ended(run, 1)["outcome"] == "finished"
    finally:
        desk.cluster.loopback("n3", up=True)
    assert "n3" not in run.hosts(1)
    assert "node n3 is left out: loopback:" in run.supervisor_log()


def test_fewer_nodes_than_planned_never_train(desk: Desk) -> None:
    """Without a spare one, the job ends and says which node is bad."""
    desk.cluster.loopback("n3", up=False)
    try:
        run = desk.train("train.steps=3", "launcher.slurm.exclude=[n2,n4]")
        end = desk.ended(run, 1)
    finally:
        desk.cluster.loopback("n3", up=True)
    assert (end["outcome"], end["kind"], run.step(1)) == ("failed", "startup", -1)
    assert "2 nodes are planned, 1 can take part (n3: loopback:" in end["cause"]["text"]
    desk.job_ended(run.job(), "FAILED")


def test_what_a_node_that_was_cut_off_writes_after_the_takeover_is_void(desk: Desk) -> None:
    """A job of one node goes on there without a network, on storage that it still reaches; it sleeps while the job that
    was queued again takes over, and wakes to save every step."""
    run = desk.train(
        "train.steps=100000", "launcher.nodes=1", "topology.dp_replicate=1", "checkpoint.every=1",
        "checkpoint.keep=1000", inject=SLOW,
    )  # fmt: skip
    desk.at_work(run, step=5)
    (host,) = run.hosts(1)
    desk.cluster.cut(host)
    wait_for(lambda: desk.restarts(run.job()) == 1, 240, lambda: f"a restart{desk.story(run)}")
    desk.cluster.signal(host, signal.SIGSTOP)
    desk.start_again(run.job())
    desk.at_work(run, 2)
    base = run.attempt(2).base().step
    assert base >= 5
    processes = desk.cluster.pids(host)
    desk.cluster.signal(host, signal.SIGCONT)
    agent = next(line for line in read_log(run.attempt(1).agent_log(0)) if line["event"] == "agent")
    wait_for(lambda: superseded(run.attempt(1)), 60, lambda: f"the end of agent {agent} of {processes}")
    step = run.step(2)
    desk.at_work(run, 2, step + 3)
    assert desk.gemctl("stop", run.id).code == 0
    desk.ended(run, 2)
    listed = checkpoints(run.dir)
    assert [found for found in listed if found.attempt == 1 and found.step > base and found.flaw is None] == []
    names = {path.name for path in run.dir.checkpoints.iterdir()}
    assert not {name for name in names if name.endswith(".a1") and int(name.split("_")[1].split(".")[0]) > base}
    assert any(name.endswith(".a2") for name in names)


def superseded(attempt: Attempt) -> bool:
    """True once the attempt's agent has seen that another one owns the run."""
    return any(line["event"] == "superseded" for line in read_log(attempt.agent_log(0)))
