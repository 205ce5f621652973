"""Root causes from records: signals first, own exceptions before lost peers, the rank that waits for nobody."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemctl.process import UNREPORTED
from gemctl.recover.cause import Frame, hung_rank, root_cause, threads, waits
from gemctl.recover.records import RankRecord
from gemctl.run.attempt import Attempt, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log
from gemctl.run.rank_records import StageRecorder

PEER = ("RuntimeError", "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
COLLECTIVE = [Frame("/lib/torch/distributed/distributed_c10d.py", 3021, "all_reduce"), Frame("loop.py", 1, "step")]
OUTER = [Frame("x.py", 1, "f")] * 3
WAITING = [COLLECTIVE]
WORKING = [[Frame("/lib/torch/nn/functional.py", 12, "linear"), *OUTER, *COLLECTIVE]]
JOINING = [[Frame("/lib/threading.py", 327, "wait"), Frame("save.py", 78, "wait")], OUTER, COLLECTIVE]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    run = RunDir.create(str(tmp_path), "gem", [])
    return claim(run.path, 1, nodes=1, ranks_per_node=4, heartbeat=1.0)


def _failed(rank: int, time: float, kind: str = "ValueError", message: str = "bad") -> RankRecord:
    failure = {"time": time, "type": kind, "message": message}
    return RankRecord(rank, stage="step", step=3, failure=failure, exit=_exit(time + 0.1, code=1))


def _exit(time: float, *, code: int | None = None, signal: str | None = None, killed: bool = False) -> dict[str, Any]:
    return {"time": time, "code": code, "signal": signal, "killed": killed}


def test_signal_comes_before_exceptions_that_were_recorded_earlier(attempt: Attempt) -> None:
    ranks = [_failed(0, 1.0), RankRecord(1, stage="save", step=9, exit=_exit(2.0, signal="SIGKILL"))]
    cause = root_cause(attempt, ranks, None, None)
    assert (cause.kind, cause.rank, cause.stage, cause.step) == ("signal", 1, "save", 9)
    assert cause.text() == "rank 1 failed first, in stage save, step 9: killed by SIGKILL"


def test_other_ranks_are_listed_by_what_they_were_doing_the_largest_groups_first(attempt: Attempt) -> None:
    stages = ["build", "load", "data", "data", "eval", *["step"] * 9]
    others = [RankRecord(rank, stage=stage) for rank, stage in enumerate(stages, start=1)]
    cause = root_cause(attempt, [_failed(0, 1.0), *others], None, None)
    assert cause.others == (
        "ranks 6, 7, 8, 9, 10, 11, 12, 13, … in stage step; ranks 3, 4 in stage data; rank 1 in stage build; …"
    )
    assert root_cause(attempt, [_failed(0, 1.0), others[0]], None, None).others == "rank 1 in stage build"
    assert root_cause(attempt, [_failed(0, 1.0)], None, None).others is None


def test_own_exception_comes_before_lost_peers_and_before_kills_by_the_agent(attempt: Attempt) -> None:
    ranks = [
        _failed(0, 1.0, *PEER),
        RankRecord(1, exit=_exit(4.0, signal="SIGKILL", killed=True)),
        _failed(2, 3.0),
        _failed(3, 2.0, "DistBackendError", "NCCL error"),
    ]
    cause = root_cause(attempt, ranks, None, None)
    assert (cause.kind, cause.rank, cause.detail) == ("exception", 2, "ValueError: bad")


def test_first_of_several_exceptions_is_named(attempt: Attempt) -> None:
    assert root_cause(attempt, [_failed(0, 2.0), _failed(1, 1.0), _failed(2, 3.0)], None, None).rank == 1


def test_error_that_every_rank_passes_on_is_blamed_on_its_rank(attempt: Attempt) -> None:
    ranks = [_failed(rank, 2.0 - rank, "SaveError", "saving step 3 failed: rank 0: no space left") for rank in range(3)]
    assert root_cause(attempt, ranks, None, None).rank == 0


def test_exit_without_an_exception_is_named(attempt: Attempt) -> None:
    cause = root_cause(attempt, [_failed(0, 2.0, *PEER), RankRecord(1, exit=_exit(1.0, code=3))], None, None)
    assert (cause.kind, cause.rank, cause.detail) == ("exit", 1, "exit code 3 without an exception")


def test_lost_peers_alone_are_said_to_be_just_that(attempt: Attempt) -> None:
    cause = root_cause(attempt, [_failed(0, 2.0, *PEER), _failed(1, 1.0, *PEER)], None, None)
    assert (cause.kind, cause.rank) == ("peer", 1)
    assert "no rank failed before it" in cause.text()


def test_agent_is_to_blame_where_no_rank_is(attempt: Attempt) -> None:
    cause = root_cause(attempt, [RankRecord(0)], None, "ImportError: no module")
    assert cause.text() == "the agent failed: ImportError: no module"


@pytest.mark.parametrize(
    ("stacks", "hung"),
    [
        ({0: WAITING, 1: WAITING, 2: WORKING}, 2),
        ({0: JOINING, 1: WAITING, 2: WORKING}, 2),  # a main thread that waits for a save waits for the other ranks
        ({0: WAITING, 1: [], 2: WORKING}, 1),  # one that does not answer, before one that works
        ({0: WAITING, 1: WAITING, 2: WAITING}, 0),  # all wait: the least advanced
    ],
)
def test_hung_rank_is_the_one_the_others_wait_for(stacks: dict[int, list[list[Frame]]], hung: int) -> None:
    ranks = [RankRecord(rank, stage="step", step=7 + (rank > 0)) for rank in range(3)]
    assert hung_rank(ranks, stacks).rank == hung


def test_what_waits_is_told_from_what_merely_runs_under_torchrun() -> None:
    launcher = Frame("/lib/torch/distributed/elastic/multiprocessing/errors/__init__.py", 362, "wrapper")
    assert waits(WAITING)
    assert waits(JOINING)
    assert not waits(JOINING[:2])
    assert not waits(WORKING)
    assert not waits([[Frame("loop.py", 3, "step"), launcher]])
    assert not waits([*WORKING, COLLECTIVE])  # a thread saves while the main one works


def test_stack_dump_is_read_by_thread_the_running_one_first() -> None:
    dump = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/a b/failpoints.py", line 72 in failpoint
  File "/a b/worker.py", line 155 in _enter
"""
    main, other = threads(dump)
    assert main == [Frame("/a b/failpoints.py", 72, "failpoint"), Frame("/a b/worker.py", 155, "_enter")]
    assert [frame.function for frame in other] == ["wait", "_bootstrap"]
    assert threads("") == []


def _agent_said(attempt: Attempt, text: str) -> str:
    attempt.agent_output(0).write_text(text, encoding="utf-8")
    return root_cause(attempt, [RankRecord(0)], None, UNREPORTED).text()


def test_agent_that_could_not_record_why_it_failed_is_quoted(attempt: Attempt) -> None:
    error = "OSError: [Errno 28] No space left on device: '/runs/1/agent-0.jsonl'"
    told = _agent_said(attempt, f'Traceback (most recent call last):\n  File "a.py", line 1, in b\n{error}\n')
    assert told == f"the agent failed: {error}"


def test_agent_that_could_not_even_print_why_it_failed_is_told_with_the_full_disk(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _agent_said(attempt, "a warning: x\n") == "the agent failed: it exited without reporting a cause"
    for blocks, files, free in ((0, 100, 7), (9, 100, 0), (9, 0, 0)):
        disk = SimpleNamespace(f_bavail=blocks, f_files=files, f_favail=free)
        monkeypatch.setattr("gemctl.recover.cause.os.statvfs", lambda _, disk=disk: disk)
        full = f" (the disk of {attempt.path} is full)" if files else ""
        assert _agent_said(attempt, "") == f"the agent failed: it exited without reporting a cause{full}"


def test_a_full_disk_that_no_file_is_named_for_is_told_with_what_is_left(attempt: Attempt) -> None:
    StageRecorder(attempt, 0).fail(OSError(28, "No space left on device"))
    (line,) = [line for line in read_log(attempt.rank_log(0)) if line["event"] == "fail"]
    assert line["message"].startswith("[Errno 28] No space left on device (")
    assert f"bytes free in {attempt.path}, " in line["message"]
    StageRecorder(attempt, 1).fail(OSError(28, "No space left on device", "/x"))
    assert read_log(attempt.rank_log(1))[-1]["message"] == "[Errno 28] No space left on device: '/x'"
