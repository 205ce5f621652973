"""Agents of two hosts: they meet, take their places in the mesh, and end together, however one of them ends."""

import socket
import time
from pathlib import Path

import pytest

from gemctl.config.schema import BudgetsConfig
from gemctl.ranks import rendezvous
from gemctl.recover.cause import lost_hosts
from gemctl.recover.records import RANK_LOOK, Records
from gemctl.run.attempt import claim
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, read_log
from gemctl.run.mesh import read_mesh
from gemctl.run.rank_records import StageRecorder
from tests.support.small_run import STEPS, Case, Disturb, Ended, Job, supervise_all
from tests.support.world import run_world

LONG = Job(500)
CASES: dict[str, dict[str, object]] = {
    "kill": {"inject": "kill:rank=3,step=3"},
    "hang": {"inject": "hang:rank=2,step=3", "watchdog": 8.0},
    "crash": {"inject": "kill:rank=1,step=3", "budgets": BudgetsConfig(crash=1)},
    "stop": {"disturb": Disturb("file_stop"), "job": LONG},
    "kill agent": {"disturb": Disturb("kill_agent"), "job": LONG},
    "kill agent 1": {"disturb": Disturb("kill_agent_1"), "job": Job(40), "budgets": BudgetsConfig(crash=1)},
    "stop host 1": {"disturb": Disturb("stop_host_1"), "job": LONG},
    "broken agent": {"fault": "broken", "budgets": BudgetsConfig()},
    "host too few": {"fault": "absent"},
    "one name": {"hosts": ("n1", "n1")},
    "misplaced": {"fault": "misplace"},
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All cases at once."""
    cases = [Case(str(tmp_path_factory.mktemp("runs")), nodes=2, **arguments) for arguments in CASES.values()]  # type: ignore[arg-type]
    return dict(zip(CASES, run_world(1, supervise_all, cases, gloo=False)[0], strict=True))


@pytest.mark.parametrize(
    ("case", "kind", "told"),
    [
        ("kill", "signal", "rank 3 on n10 failed first, in stage step, step 3: killed by SIGKILL"),
        ("hang", "hang", "rank 2 on n10 failed first, in stage step, step 3: no progress for 8 s"),
    ],
)
def test_rank_of_one_host_ends_all_and_is_named(ends: dict[str, Ended], case: str, kind: str, told: str) -> None:
    end = ends[case]
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert end.cause is not None
    assert end.cause["kind"] == kind
    assert told in end.message
    assert end.seconds < 14
    assert (end.run_dir.path / end.cause["log"]).is_file()


def test_next_attempt_goes_on_in_the_living_agents_and_ranks_follow_the_mesh(ends: dict[str, Ended]) -> None:
    """n2 is node 1 of the launcher, and comes first in the mesh."""
    end = ends["crash"]
    assert (end.error, end.exit_code, end.left) == (None, 0, [])
    first, second = end.run_dir.attempts()
    for node, ranks in ((0, {2, 3}), (1, {0, 1})):
        lines = read_log(second.agent_log(node))
        assert lines[0]["pid"] == read_log(first.agent_log(node))[0]["pid"]
        assert {line["rank"] for line in lines if line["event"] == "rank"} == ranks
    assert read_mesh(second).ranks_by_host() == {"n2": [0, 1], "n10": [2, 3]}
    finish = read_log(second.rank_log(3))[-1]
    assert (finish["event"], finish["result"], finish["step"]) == ("finish", "finished", STEPS)


def test_stop_request_is_agreed_on_by_all_hosts(ends: dict[str, Ended]) -> None:
    end = ends["stop"]
    assert (end.error, end.left) == (None, [])
    last = [read_log(end.run_dir.attempt(1).rank_log(rank))[-1] for rank in range(4)]
    assert [line["result"] for line in last] == ["stopped"] * 4
    assert len({line["step"] for line in last}) == 1


@pytest.mark.parametrize(
    ("case", "told", "seconds"),
    [
        ("kill agent", "lost host n10 (node 0): killed by SIGKILL", 5),
        ("stop host 1", "lost host n2 (node 1): no heartbeat from its agent for 5 s", 15),
    ],
)
def test_host_that_vanishes_is_named(ends: dict[str, Ended], case: str, told: str, seconds: float) -> None:
    end = ends[case]
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert told in end.message
    assert end.seconds < seconds


def test_agent_that_fails_by_itself_was_not_taken_away(ends: dict[str, Ended]) -> None:
    end = ends["broken agent"]
    assert (end.error, end.left, len(end.run_dir.attempts())) == ("RunFailed", [], 1)
    assert "lost host n2 (node 1): ImportError: no module" in end.message
    assert "not tried again: it failed before its first step, and recover.budgets.startup=0" in end.message


def test_lost_agent_is_replaced_for_the_next_attempt(ends: dict[str, Ended]) -> None:
    end = ends["kill agent 1"]
    assert (end.error, end.left) == (None, [])
    assert any(
        "lost host n2 (node 1): killed by SIGKILL; trying again (preemption: 99 of" in note for note in end.notes
    )


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("host too few", "1 of 2 hosts joined within 2 s; no agent on nodes 1"),
        ("one name", "host n1 reports 2 times"),
    ],
)
def test_hosts_that_do_not_meet_never_train(ends: dict[str, Ended], case: str, told: str) -> None:
    end = ends[case]
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert told in end.message
    assert list(end.run_dir.attempt(1).ranks.iterdir()) == []


def test_rank_in_the_wrong_place_names_both(ends: dict[str, Ended]) -> None:
    end = ends["misplaced"]
    assert end.error == "RunFailed"
    assert "runs on elsewhere as local rank" in end.message
    assert "; the mesh places it on n" in end.message


def _unknown(*arguments: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name unknown")


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("nosuchhost:29400", "nosuchhost:29400 was not reached within 0 s: its name does not resolve: Name unknown"),
        ("a..b:29400", "a..b:29400 was not reached within 0 s: its name does not resolve: "),
        ("127.0.0.1:1", "127.0.0.1:1 was not reached within 0 s: Connection refused"),
        ("n1", "--store n1: expected HOST:PORT"),
        (None, "an attempt of 2 hosts needs a store to meet in"),
    ],
)
def test_store_that_is_not_reached_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: str | None, told: str
) -> None:
    run = RunDir.create(str(tmp_path), "small", ["test"])
    attempt = claim(run.path, 1, nodes=2, ranks_per_node=1, heartbeat=0.1)
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "n2")
    if store == "nosuchhost:29400":
        monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    with pytest.raises(rendezvous.MeetingError) as caught:
        rendezvous.Rendezvous(1, 2, store, lambda: False)._connect(attempt)
    assert told in str(caught.value)
    assert str(caught.value).startswith("--store" if store == "n1" else "node 1 (host n2): ")


def records_of_four(root: Path) -> Records:
    """Hosts n0 to n3, one rank on each; all gave a sign a second ago."""
    run = RunDir.create(str(root), "small", ["test"])
    records = Records(claim(run.path, 1, nodes=4, ranks_per_node=1, heartbeat=0.1))
    for agent in records.agents:
        agent.host, agent.sign = f"n{agent.node}", time.monotonic() - 1
    return records


def test_what_ranks_say_is_looked_at_less_often_than_who_has_ended(tmp_path: Path) -> None:
    """Agents tell the ends; files of thousands are opened one a millisecond at most."""
    records = records_of_four(tmp_path)
    records.look()
    for rank in range(4):
        StageRecorder(records.attempt, rank).enter("step", 7)
    JsonLog(records.attempt.agent_log(2)).write({"event": "end", "ok": True})
    records._looked_at = {"agents": time.monotonic() - 0.005, "ranks": time.monotonic() + 60}
    records.look()
    assert (records.agents[2].succeeded, records.step()) == (True, None)
    records._looked_at["ranks"] = time.monotonic() - RANK_LOOK
    records.look()
    assert records.step() == 7
    StageRecorder(records.attempt, 1).enter("step", 8)
    records.update()  # before anything is decided
    assert records.step() == 8
    assert not records._due("agents", 3000, 0.0)


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        ([2], "lost host n2 (node 2): no sign"),
        ([1, 3], "lost host n1 (node 1), host n3 (node 3): no sign"),
        ([0, 1, 2, 3], "lost host n0 (node 0): no sign"),
        ([1, 2, 3], "lost host n0 (node 0): no other host reaches it: no sign"),
    ],
)
def test_of_hosts_that_fall_silent_together_the_lost_one_is_named(tmp_path: Path, silent: list[int], told: str) -> None:
    records = records_of_four(tmp_path)
    cause = lost_hosts(records.attempt, records, dict.fromkeys(silent, "no sign"))
    assert cause is not None
    assert cause.text() == told


def test_a_rank_that_failed_before_its_host_was_lost_is_the_cause(tmp_path: Path) -> None:
    records = records_of_four(tmp_path)
    rank = records.ranks[1]
    rank.exit, rank.ended = {"code": None, "signal": "SIGKILL", "killed": False}, time.monotonic() - 2
    assert lost_hosts(records.attempt, records, {1: "no sign"}) is None
    rank.ended += 1.5
    assert lost_hosts(records.attempt, records, {1: "no sign"}) is not None
    rank.ended -= 1.5
    rank.exit, rank.failure = (
        {"code": 1, "signal": None, "killed": False},
        {"type": "RuntimeError", "message": "Connection closed by peer"},
    )
    assert lost_hosts(records.attempt, records, {1: "no sign"}) is not None
