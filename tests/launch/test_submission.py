"""Submissions, and what `supervise`, `stop`, `status`, `list` and `resume` make of them; no rank is started."""

import argparse
import inspect
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gemctl.commands import list as listing
from gemctl.commands import resume, status, stop, supervise
from gemctl.config.compose import compose, to_yaml
from gemctl.config.schema import SyntheticConfig
from gemctl.data.synthetic import ensure, spec_text
from gemctl.errors import GemctlError, InputError
from gemctl.launch import supervise as supervising
from gemctl.launch.follow import wait_for_start
from gemctl.launch.liveness import attempt_of, is_starting, refuse_running
from gemctl.launch.submit import check_config
from gemctl.launchers import api, local
from gemctl.render.status import _submission as submission_line
from gemctl.run import requests
from gemctl.run.attempt import Attempt, Base, Heartbeat, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog
from gemctl.run.rank_records import StageRecorder
from gemctl.run.submission import Job, Submission, submissions, submit
from tests.support.waiting import wait_for


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(str(tmp_path / "runs"), "gem", ["gemctl", "train"])


def _submit(run: RunDir, kind: str = "local") -> Submission:
    return submit(run, to_yaml(compose(None, ["train.steps=7"])), "{}", {"kind": kind, "app": {}})


def _start(run: RunDir, number: int) -> Attempt:
    attempt = claim(run.path, number, nodes=1, ranks_per_node=1, heartbeat=0.02)
    attempt.write_base(Base(None, 0))
    return attempt


def _args(run: RunDir, **more: object) -> argparse.Namespace:
    given = {"run": run.run_id, "root": str(run.path.parent.parent), "now": False, "submission": None}
    return argparse.Namespace(**{**given, **more})


class Queue:
    """A launcher with a queue, in place of every other; it knows one job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
        self.state: Any = state
        self.cancelled: list[int] = []
        for module in api.LAUNCHERS.values():
            monkeypatch.setitem(sys.modules, module, self)

    def jobs(self, submissions: Sequence[Submission]) -> list[Job | None]:
        if self.state == "silent":
            raise GemctlError("no answer in 10 s")
        return [Job("17", self.state, f"job 17: {self.state}") for _ in submissions]

    def cancel(self, submission: Submission) -> None:
        self.cancelled.append(submission.number)

    def replaces_supervisor(self, submission: Submission) -> bool:
        return False


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `supervise` would have run: attempt number and Prepared."""
    found: list[Any] = []
    monkeypatch.setattr(
        supervising, "run_attempts", lambda run, number, prepared, *rest: found.append((number, prepared))
    )
    return found


def test_a_submission_keeps_what_was_asked_for_and_from_where_it_counts(run: RunDir) -> None:
    first = _submit(run)
    assert (first.number, first.first_attempt, first.first_request, first.submitted()) == (1, 1, 1, None)
    _start(run, 1).write_end("stopped", step=3)
    requests.file(run, "stop")
    second = _submit(run)
    assert (second.number, second.first_attempt, second.first_request) == (2, 2, 2)
    assert second.config.read_text() == first.config.read_text()
    (run.submissions / "3").mkdir()  # its maker died
    assert [one.number for one in submissions(run)] == [1, 2]
    assert _submit(run).number == 4
    assert attempt_of(run, first) is not None and attempt_of(run, second) is None


def test_supervise_runs_the_next_attempt_of_the_newest_submission(run: RunDir, ran: list[Any]) -> None:
    _start(run, 1).write_end("failed", step=3)
    submission = _submit(run)
    supervise.run(_args(run))
    ((number, prepared),) = ran
    assert (number, prepared.first, prepared.config) == (2, 2, submission.config.read_text())


def test_supervise_refuses_a_void_submission_and_none(run: RunDir, ran: list[Any]) -> None:
    with pytest.raises(InputError, match="nothing was submitted"):
        supervise.run(_args(run))
    _submit(run)
    _submit(run)
    with pytest.raises(InputError, match="submission 1 is superseded: submission 2 was made after it"):
        supervise.run(_args(run, submission=1))
    with pytest.raises(InputError, match=r"--submission 3: .* has 1, 2"):
        supervise.run(_args(run, submission=3))
    assert ran == []


@pytest.mark.parametrize(
    ("outcome", "facts", "again"),
    [
        ("finished", {"kind": None}, False),
        ("stopped", {"kind": None}, False),
        ("killed", {"kind": None}, False),
        ("stopped", {"kind": "preemption", "signal": "SIGTERM"}, True),
        ("preempted", {"kind": "time_limit", "again": True}, True),
        (None, {}, True),
    ],
)
def test_a_restarted_supervisor_continues_unless_the_run_has_ended(
    run: RunDir,
    ran: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    outcome: str | None,
    facts: dict[str, Any],
    again: bool,
) -> None:
    monkeypatch.setattr("gemctl.run.attempt.PATIENCE", 0.1)
    _submit(run)
    attempt = _start(run, 1)
    if outcome is not None:
        attempt.write_end(outcome, step=3, **facts)
    supervise.run(_args(run))
    assert [number for number, _ in ran] == ([2] if again else [])


def test_a_stop_request_is_kept_for_a_supervisor_that_starts_later(run: RunDir, ran: list[Any]) -> None:
    _submit(run)
    requests.file(run, "stop", "SIGTERM")  # an agent's, as its host was taken away
    supervise.run(_args(run))
    assert [prepared.first_request for _, prepared in ran] == [2]
    requests.file(run, "stop")
    supervise.run(_args(run))
    assert len(ran) == 1


def test_a_run_that_waits_is_listed_and_can_be_withdrawn(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(monkeypatch, "waiting")
    _submit(run, "slurm")
    (listed,) = listing.run(argparse.Namespace(root=str(run.path.parent.parent), last=None, json=False)).runs
    assert (listed.state, listed.submission and listed.submission.job) == (
        "waiting",
        Job("17", "waiting", "job 17: waiting"),
    )
    with pytest.raises(InputError, match="was submitted and has not ended: job 17: waiting; gemctl stop"):
        refuse_running(run, None)
    filed = stop.run(_args(run))
    assert (filed.outcome, filed.job, queue.cancelled) == ("withdrawn", "job 17: waiting", [1])
    queue.state = "ended"
    assert status.run(_args(run)).state == "withdrawn"
    with pytest.raises(InputError, match=r"is not running, so there is nothing to stop \(job 17: ended\)"):
        stop.run(_args(run))
    refuse_running(run, None)


@pytest.mark.parametrize(
    ("state", "shown"), [("running", "starting"), ("silent", "starting"), ("ended", "not started")]
)
def test_the_state_before_the_first_attempt_is_the_jobs(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, state: str, shown: str
) -> None:
    Queue(monkeypatch, state)
    _submit(run, "slurm")
    assert status.run(_args(run)).state == shown
    assert [
        one.state
        for one in listing.run(argparse.Namespace(root=str(run.path.parent.parent), last=None, json=False)).runs
    ] == [shown]


def test_stop_reaches_a_supervisor_between_two_attempts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    Queue(monkeypatch, "running")
    _submit(run, "slurm")
    assert (stop.run(_args(run)).attempt, stop.run(_args(run)).request) == (None, 2)
    _start(run, 1).write_end("failed", step=3, again=True)
    assert status.run(_args(run)).state == "restarting"
    assert stop.run(_args(run)).attempt is None


def test_a_job_that_was_ended_and_queued_again_waits_and_can_be_withdrawn(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(monkeypatch, "waiting")
    _submit(run, "slurm")
    attempt = _start(run, 1)
    attempt.write_end("stopped", step=3, kind="preemption", signal="SIGTERM", again=False)
    assert (status.run(_args(run)).state, status.run(_args(run)).conclusion) == ("waiting", None)
    with pytest.raises(InputError, match="was submitted and has not ended: job 17: waiting"):
        refuse_running(run, attempt)
    assert (stop.run(_args(run)).outcome, queue.cancelled) == ("withdrawn", [1])
    queue.state = "ended"
    assert status.run(_args(run)).state == "stopped"
    with pytest.raises(InputError, match=r"is not running: attempt 1 stopped \(job 17: ended\)"):
        stop.run(_args(run))
    refuse_running(run, attempt)
    assert "stopped at step 3" in str(status.run(_args(run)).conclusion)


def test_stop_reports_a_job_in_an_unknown_state(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    Queue(monkeypatch, "silent")
    _submit(run, "slurm")
    with pytest.raises(
        InputError, match=r"not stopped, as the state of its job is unknown \(no answer in 10 s\); try again"
    ):
        stop.run(_args(run))


def test_resume_refuses_a_run_whose_attempt_is_starting(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemctl.run.attempt.PATIENCE", 0.1)
    queue = Queue(monkeypatch, "running")
    _submit(run, "slurm")
    attempt = _start(run, 1)  # its agents import, and do not beat yet
    with pytest.raises(InputError, match="was submitted and has not ended: job 17: running"):
        refuse_running(run, attempt)
    queue.state = "ended"
    refuse_running(run, attempt)


def test_the_process_of_a_copied_run_is_the_originals_alone(run: RunDir, tmp_path: Path) -> None:
    _submit(run).write_process(os.getpid())
    copy = Path(shutil.copytree(run.path, tmp_path / "copied" / "x" / run.run_id))
    (link := tmp_path / "link").symlink_to(run.path)
    found = [submissions(RunDir(path))[-1].submitted() for path in (run.path, link, copy)]
    assert [one is not None for one in found] == [True, True, False]
    run.path.rename(tmp_path / "gone")
    assert submissions(RunDir(copy))[-1].submitted() is not None  # it may as well have been moved


def test_status_of_a_copy_does_not_call_it_unstarted(run: RunDir, tmp_path: Path) -> None:
    def line(path: Path) -> str:
        value = status.run(argparse.Namespace(run=str(path), root="."))
        assert value.submission is not None
        return submission_line(value.submission)

    assert _submit(run).number == 1
    assert line(run.path) == "submission 1, launcher=local: not started yet"
    submissions(run)[-1].write_process(os.getpid())
    _start(run, 1).write_end("finished", step=7)
    assert line(run.path).endswith(f": process {os.getpid()} on host {socket.gethostname()}")
    copy = Path(shutil.copytree(run.path, tmp_path / run.run_id))
    assert line(copy) == "submission 1, launcher=local: no supervisor of this directory"


def test_stop_reports_a_run_without_processes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemctl.run.attempt.PATIENCE", 0.1)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    _submit(run).write_process(gone.pid)
    gone.wait()
    _start(run, 1)
    with pytest.raises(
        InputError, match=rf"no process is left to handle a stop request \(process {gone.pid} of this host\)"
    ):
        stop.run(_args(run))
    assert list(run.requests.iterdir()) == []


def test_stop_of_a_run_that_another_machine_starts_is_filed_while_it_may_come_up(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemctl.run.attempt.PATIENCE", 0.1)
    _submit(run).write_submitted(pid=1, started=1)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    _start(run, 1)
    assert stop.run(_args(run)).attempt == 1
    monkeypatch.setattr(stop, "STARTING", 0.0)
    with pytest.raises(
        InputError, match=r"no process is left to handle a stop request \(process 1 of host .*\); it ran on"
    ):
        stop.run(_args(run))


def test_stop_now_orders_the_agents_where_the_supervisor_does_not_answer(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "ORDER_AFTER", 0.05)
    monkeypatch.setattr(stop, "END_SECONDS", 0.2)
    attempt = _start(run, 1)
    with Heartbeat(attempt, 0.02):
        filed = stop.run(_args(run, now=True))
    assert (filed.outcome, attempt.kill_order.exists()) == ("ordered", True)
    assert requests.pending(run, attempt) == [requests.Request(1, "kill")]


def test_a_process_of_the_same_number_is_not_taken_for_the_supervisor(run: RunDir) -> None:
    submission = _submit(run)
    submission.write_process(os.getpid())
    assert [job and job.state for job in local.jobs([submission])] == ["running"]
    other = _submit(run)
    other.write_submitted(pid=os.getpid(), started=1)
    assert [job and job.state for job in local.jobs([other])] == ["ended"]


def test_status_shows_ranks_budgets_and_the_whole_cause(run: RunDir) -> None:
    submission = _submit(run)
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=3, heartbeat=0.02)
    attempt.config.write_text(submission.config.read_text())
    for rank in range(3):
        StageRecorder(attempt, rank).enter("step", 7 if rank == 1 else 8)
    lines = [{"event": "attempt", "attempt": 1, "step": 0, "time": 0.0}]
    cause = {"text": "rank 1 failed first", "rank": 1, "log": None}
    end: dict[str, Any] = {
        "outcome": "failed",
        "step": 8,
        "saved": 0,
        "kind": "crash",
        "cause": cause,
        "again": False,
        "refusal": "no",
    }
    lines.append({"event": "end", "attempt": 1, "time": 1.0, **end})
    for line in lines:
        JsonLog(run.supervisor_log).write(line)
    attempt.write_end(**end)
    shown = status.run(_args(run))
    assert [(group.ranks, group.step) for group in shown.ranks] == [([1], 7), ([0, 2], 8)]
    assert {budget.kind: budget.spent for budget in shown.budgets if budget.spent} == {"crash": 1, "no_progress": 1}
    assert shown.conclusion is not None
    assert shown.conclusion.startswith(f"run {run.run_id} failed: rank 1 failed first\nnot tried again: no\nto resume")


@pytest.mark.parametrize("kind", api.LAUNCHERS)
def test_every_launcher_implements_the_protocol(kind: str) -> None:
    module = api.launcher_of(kind)
    wanted = {name: member for name, member in vars(api.Launcher).items() if inspect.isfunction(member)}
    wanted = {name: member for name, member in wanted.items() if not name.startswith("_")}
    assert isinstance(module.IN_PROCESS, bool)
    for name, member in wanted.items():
        assert (
            list(inspect.signature(getattr(module, name)).parameters) == list(inspect.signature(member).parameters)[1:]
        )


def test_resume_refuses_a_group_that_it_keeps_in_one_line(run: RunDir) -> None:
    _submit(run)
    args = _args(run, changes=["model=kunlun_nano", "experiment=ml100k", "run=default"], allow=[], dry_run=True)
    with pytest.raises(InputError) as refused:
        resume.run(args)
    assert [problem.split(",")[0] for problem in refused.value.problems] == [
        "model=kunlun_nano: refused", "experiment=ml100k: refused", "run=default: refused"
    ]  # fmt: skip


def test_a_choice_replaces_the_runs_own_group(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(compose(None, ["launcher.ranks_per_node=3", "train.steps=7"])))
    chosen = compose(str(file), ["launcher=slurm", "launcher.nodes=5"], replace=True)
    assert (chosen.launcher.kind, chosen.launcher.nodes, chosen.train.steps) == ("slurm", 5, 7)
    assert chosen.launcher.ranks_per_node == compose(None, ["launcher=slurm"]).launcher.ranks_per_node


def test_a_detached_run_that_does_not_start_fails_at_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = run.path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(broken))
    submission = _submit(run)
    local.start(run, submission, compose(None, []))
    began = time.monotonic()
    with pytest.raises(GemctlError, match=r"did not start: it has no attempt \(process .*\)\nno such module"):
        wait_for_start(run, submission, api.launcher_of("local"))
    assert time.monotonic() - began < 5


def test_problems_of_launcher_topology_and_data_are_reported_together(tmp_path: Path) -> None:
    log = ["data.synthetic=null", "data.eval=null", f"data.train={tmp_path}/gone.parquet"]
    (tmp_path / "spec.yaml").write_text(spec_text(SyntheticConfig()))
    config = compose(None, [*log, f"data.spec={tmp_path}/spec.yaml", "launcher.nodes=2", "topology.dp_shard=3"])
    with pytest.raises(InputError) as refused:
        check_config(config)
    launcher, *topology, data = refused.value.problems
    assert launcher.startswith("launcher.nodes=2: launcher.kind=local starts ranks on this machine only")
    assert "topology.dp_shard" in topology[0]
    assert f"{tmp_path}/gone.parquet" in data
    config.data.spec = f"{tmp_path}/none.yaml"
    with pytest.raises(InputError) as refused:
        check_config(config)
    assert refused.value.problems[0] == launcher and "none.yaml" in refused.value.problems[-1]


def test_a_launchable_configuration_has_notes_on_its_data(tmp_path: Path) -> None:
    log = ["data.synthetic.rows=100", "data.synthetic.eval_rows=10", f"data.spec={tmp_path}/spec.yaml"]
    config = compose(None, [*log, f"data.train={tmp_path}/train/rows.parquet", f"data.eval={tmp_path}/eval.parquet"])
    assert check_config(config) == []  # the synthetic log is not written yet
    (tmp_path / "train").mkdir()
    ensure(config.data)
    config.data.synthetic, config.data.eval = None, f"{tmp_path}/train"
    (note,) = check_config(config)
    assert note.startswith(f"data.eval: {tmp_path}/train/rows.parquet: also in data.train")


def test_an_attempt_is_starting_until_its_first_heartbeat_or_its_end(run: RunDir) -> None:
    attempt = _start(run, 1)
    assert is_starting(attempt)
    attempt.write_end("failed")
    assert not is_starting(attempt)
    beating = _start(run, 2)
    with Heartbeat(beating, 0.02):
        wait_for(lambda: not is_starting(beating))
