"""`gemctl logs`: lines of several processes merged by time, the cause first, attempts followed to the run's end."""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemctl.commands import logs
from gemctl.errors import InputError
from gemctl.launch.liveness import is_starting
from gemctl.report.logs import AttemptTail, Line, Selection
from gemctl.run.attempt import Attempt, Base, Heartbeat, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog
from gemctl.run.rank_records import OutputTimes, StageRecorder
from gemctl.run.submission import Submission, submit
from tests.support.waiting import wait_for

RANKS = 2
CAUSE = {"text": "rank 1 failed first, in stage step, step 3: killed by SIGKILL", "rank": 1}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(str(tmp_path / "runs"), "gem", ["gemctl", "train"])


def _start(run: RunDir, number: int) -> Attempt:
    attempt = claim(run.path, number, nodes=1, ranks_per_node=RANKS, heartbeat=0.02)
    attempt.write_base(Base(None, 0))
    for rank in range(RANKS):
        StageRecorder(attempt, rank).enter("build")
    return attempt


def _say(attempt: Attempt, rank: int, text: str) -> None:
    with attempt.rank_output(rank).open("a") as file:
        file.write(text)


def _submitted(run: RunDir, pid: int) -> Submission:
    submission = submit(run, "{}", "{}", {"kind": "local", "app": {}})
    submission.write_process(pid)
    return submission


def _args(run: RunDir, **more: object) -> argparse.Namespace:
    given = {
        "run": str(run.path),
        "root": "",
        "attempt": None,
        "rank": None,
        "merged": False,
        "follow": False,
        "tail": None,
    }
    return argparse.Namespace(**{**given, "json": False, **more})


def _texts(lines: "list[Line]", source: str) -> list[str]:
    return [line.text for line in lines if line.source.startswith(source)]


def test_lines_of_ranks_are_merged_by_the_times_at_which_they_were_seen(run: RunDir) -> None:
    attempt = _start(run, 1)
    index = OutputTimes(attempt, 0)
    order = [0, 1, 1, 0, 1, 0, 0, 1]
    for number, rank in enumerate(order):
        _say(attempt, rank, f"line {number}\nand more\n")
        index.look(range(RANKS))
        time.sleep(0.003)
    lines = list(AttemptTail(run, attempt, Selection(merged=True)).new())
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    said = [(line.source, line.text) for line in lines if line.text.startswith("line")]
    assert said == [(f"rank {rank}", f"line {number}") for number, rank in enumerate(order)]


def test_only_whole_lines_are_shown_until_the_attempt_has_ended(run: RunDir) -> None:
    attempt = _start(run, 1)
    tail = AttemptTail(run, attempt, Selection(rank=0))
    _say(attempt, 0, "one\ntw")
    assert _texts(list(tail.new()), "rank 0")[-1] == "one"
    _say(attempt, 0, "o\nlast words")
    assert _texts(list(tail.new()), "rank 0") == ["two"]
    attempt.write_end("failed", step=3, cause=CAUSE)
    assert _texts(list(tail.new()), "rank 0") == ["last words"]
    assert list(tail.new()) == []


def test_steps_are_left_out_and_failures_are_not(run: RunDir) -> None:
    attempt = _start(run, 1)
    stages = StageRecorder(attempt, 1)
    for step in range(3):
        stages.enter("data", step)
        stages.enter("step", step)
    for _ in range(3):
        stages.enter("eval", 3)
    stages.enter("step", 3)
    stages.fail(ValueError("no"))
    lines = list(AttemptTail(run, attempt, Selection(rank=1)).new())
    said = [text for text in _texts(lines, "rank 1") if "process" not in text]
    assert said == ["stage build", "stage eval, step 3", "failed in stage step, step 3: ValueError: no"]


def test_a_failed_attempt_begins_with_its_cause_and_shows_the_rank_that_failed_first(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = _start(run, 1)
    for rank in range(RANKS):
        _say(attempt, rank, f"words of {rank}\n")
    JsonLog(attempt.metrics).write({"kind": "mystery", "step": 3, "time": time.time()})
    slow = {"rank": 1, "ratio": 3.0, "part": "dense_forward", "share": 0.4, "step": 2, "host": None}
    JsonLog(attempt.ledger).write({"kind": "straggler", "time": time.time(), **slow})
    JsonLog(attempt.ledger).write({"kind": "interval", "time": time.time(), "step": 3})
    attempt.write_end("failed", step=3, cause=CAUSE, again=False, refusal="enough")
    logs.run(_args(run))
    out = capsys.readouterr().out
    head = out.split("\n\n")[0]
    assert head.startswith(
        f"run {run.run_id} failed: {CAUSE['text']}\nnot tried again: enough\nto resume from the start"
    )
    assert "words of 1" in out and "words of 0" not in out and "mystery, step 3" in out
    assert (
        "training | rank 1 takes 3.0 × the others' time, most of it in dense_forward" in out and "interval" not in out
    )
    logs.run(_args(run, merged=True, json=True))
    first, *rest = map(json.loads, capsys.readouterr().out.splitlines())
    assert "killed by SIGKILL" in first["conclusion"]
    assert {line["source"] for line in rest} == {"rank 0", "rank 1", "training"}
    assert all(set(line) == {"time", "attempt", "source", "host", "text", "record"} for line in rest)


def test_what_cannot_be_read_hides_nothing_else(run: RunDir) -> None:
    attempt = _start(run, 1)
    _say(attempt, 0, "words\n")
    attempt.rank_log(1).write_text("{broken\n")
    attempt.rank_output(1).mkdir()
    lines = list(AttemptTail(run, attempt, Selection(merged=True)).new())
    assert "words" in _texts(lines, "rank 0")
    (told,) = _texts(lines, "rank 1")
    assert told.startswith("cannot be read: ") and "rank-1.log" in told


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"rank": 2}, "--rank 2: attempt 1 has 2 ranks, 0 to 1"),
        ({"attempt": 7}, r"no attempt 7 \(it has 1\)"),
        ({"attempt": 1, "follow": True}, "use only one of them"),
    ],
)
def test_what_is_not_there_is_refused(run: RunDir, more: dict[str, object], told: str) -> None:
    _start(run, 1)
    with pytest.raises(InputError, match=told):
        logs.run(_args(run, **more))


def test_a_run_without_attempts_says_what_its_job_does(run: RunDir) -> None:
    with pytest.raises(InputError, match=r"no attempt \(it was never launched"):
        logs.run(_args(run))
    _submitted(run, os.getpid())
    with pytest.raises(InputError, match=rf"no attempt \(process {os.getpid()} of this host"):
        logs.run(_args(run))


def test_following_goes_over_attempts_to_the_end_of_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL", 0.01)
    _submitted(run, os.getpid())
    first = _start(run, 1)
    _say(first, 0, "one\n")
    followed = logs._followed(run, Selection(rank=0))
    seen = list(itertools.islice(followed, 3))
    _say(first, 0, "last of one")
    first.write_end("failed", step=3, cause=CAUSE, again=True)
    second = _start(run, 2)
    _say(second, 0, "two\n")
    second.write_end("finished", step=5)
    seen += list(followed)
    said = [line.text if isinstance(line, Line) else line for line in seen]
    kept = [text for text in said if text and "process" not in text and "stage" not in text.split(",")[0]]
    failed = f"run {run.run_id} failed: {CAUSE['text']}\nanother attempt follows"
    assert [text for text in kept if text != failed] == ["one", "last of one", "two", f"run {run.run_id} has finished"]
    assert said.index(failed) == said.index("last of one") + 1


def test_following_ends_where_nobody_is_left(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    submission = _submitted(run, gone.pid)
    gone.wait()
    monkeypatch.setattr("gemctl.launch.liveness.JOB_POLL", 0.0)
    submission.output.write_text("error: something\n")
    assert list(logs._followed(run, Selection()))[-1] == (
        f"run {run.run_id} did not start: it has no attempt (process {gone.pid} of this host)\nerror: something"
    )
    _start(run, 1)
    assert "its supervisor is gone" in str(list(logs._followed(run, Selection()))[-1])


def test_an_interrupt_ends_the_following_and_says_so(run: RunDir) -> None:
    _submitted(run, os.getpid())
    _say(_start(run, 1), 0, "words\n")
    command = [sys.executable, "-P", "-m", "gemctl", "logs", "-f", str(run.path)]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert shown.stdout is not None
    assert "process" in shown.stdout.readline()
    shown.send_signal(signal.SIGINT)
    _, told = shown.communicate(timeout=30)
    assert (shown.returncode, told) == (130, f"no longer following run {run.run_id}, which is left as it is\n")


def test_what_an_agent_printed_is_shown(run: RunDir) -> None:
    attempt = _start(run, 1)
    attempt.agent_output(0).write_text("Traceback\nImportError: no torch\n")
    assert _texts(list(AttemptTail(run, attempt, Selection()).new()), "agent 0") == [
        "Traceback",
        "ImportError: no torch",
    ]


def test_following_from_another_machine_ends_where_nothing_beats(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemctl.run.attempt.PATIENCE", 0.1)
    monkeypatch.setattr(logs, "POLL", 0.01)
    _submitted(run, 1)
    with Heartbeat(attempt := _start(run, 1), 0.01):
        wait_for(lambda: not is_starting(attempt))
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    last = list(logs._followed(run, Selection()))[-1]
    assert "attempt 1: no heartbeat from" in str(last) and str(last).endswith("its supervisor is gone")


def test_a_reader_that_has_gone_ends_the_writing(run: RunDir) -> None:
    attempt = _start(run, 1)
    _say(attempt, 0, "words and more words\n" * 10_000)
    command = [sys.executable, "-P", "-m", "gemctl", "logs", str(run.path)]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert shown.stdout is not None and shown.stderr is not None
    assert b"process" in shown.stdout.readline()
    shown.stdout.close()
    assert (shown.wait(30), shown.stderr.read()) == (1, b"")


def test_the_last_lines_are_those_that_all_lines_end_with(run: RunDir) -> None:
    attempt = _start(run, 1)
    index, metrics = OutputTimes(attempt, 0), JsonLog(attempt.metrics)
    for number in range(200):
        _say(attempt, number % 2, f"line {number}\n" + "\n" * (number % 3 == 0))
        index.look(range(RANKS))
        if number % 5 == 0:
            metrics.write({"kind": "train", "time": time.time(), "step": number})
            for stage in ("data", "step"):
                StageRecorder(attempt, 0).enter(stage, number)
        time.sleep(0.001)
    StageRecorder(attempt, 1).enter("save", 200)

    def shown(tail: int | None) -> list[tuple[str, str, object]]:
        lines = logs._last(AttemptTail(run, attempt, Selection(merged=True, tail=tail)).new(), tail)
        return [(line.source, line.text, (line.record or {}).get("step")) for line in lines]

    whole = shown(None)
    assert len(whole) > 300 and ("rank 1", "stage save, step 200", None) in whole
    for tail in (1, 2, 7, 50, 1000):
        assert shown(tail) == whole[-tail:]


def test_fewer_lines_than_one_are_refused(run: RunDir) -> None:
    _start(run, 1)
    with pytest.raises(InputError, match="--tail 0"):
        logs.run(_args(run, tail=0))


@pytest.mark.slow
def test_the_end_of_a_gigabyte_is_there_at_once(run: RunDir) -> None:
    attempt = _start(run, 1)
    text = b"".join(b"%063d\n" % number for number in range(1 << 20))
    with attempt.rank_output(0).open("wb") as file:
        for _ in range(16):
            file.write(text)
    start = time.process_time()
    lines = list(logs._last(AttemptTail(run, attempt, Selection(rank=0, tail=100)).new(), 100))
    assert time.process_time() - start < 1
    assert [int(line.text) for line in lines[-99:]] == list(range((1 << 20) - 99, 1 << 20))
