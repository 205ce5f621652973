"""A fault is injected at its rank, step, stage, point and attempt, and nowhere else."""

import os
import resource
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from gemctl.config.schema import Config, DataConfig, LauncherConfig
from gemctl.errors import InputError
from gemctl.failpoints import Fault, InjectedError, check, failpoint, parse, planted
from gemctl.launch.submit import checked_plan
from gemctl.run.rank_records import Stage
from gemctl.specs.feature_spec import parse as parse_spec

SPEC = parse_spec("{name: s, tables: [], dense: [{name: x}], labels: [{name: y}]}", "spec.yaml")


def test_faults_are_parsed_with_defaults() -> None:
    assert parse("kill:rank=1,step=3") == (Fault("kill", 1, 3, "step", 1),)
    assert parse("nan") == (Fault("nan", 0, None, "step", 1),)
    assert parse("nan; stop:stage=save,point=hash,count=2") == (
        Fault("nan"),
        Fault("stop", 0, None, "save", 1, "hash", 2),
    )


def test_an_unknown_fault_is_refused_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMCTL_INJECT", "frob:x=1")
    with pytest.raises(InputError) as error:
        checked_plan(Config(data=DataConfig(spec="none", train="none")), SPEC)
    assert [problem.split(" is none of")[0] for problem in error.value.problems] == [
        "GEMCTL_INJECT: 'frob'",
        "GEMCTL_INJECT: 'x'",
    ]


def test_a_rank_that_the_run_does_not_have_is_refused_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMCTL_INJECT", "kill:rank=1;nan:rank=2;slow:rank=7")
    check(8)
    with pytest.raises(InputError) as error:
        checked_plan(Config(data=DataConfig("none", "none"), launcher=LauncherConfig(ranks_per_node=2)), SPEC)
    assert error.value.problems == [f"GEMCTL_INJECT: rank={rank}: the run has ranks 0 to 1" for rank in (2, 7)]


def test_a_slowed_rank_sleeps_for_its_own_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMCTL_INJECT", "slow:rank=1,factor=4")
    monkeypatch.setenv("RANK", "1")
    failpoint("step", 0)
    time.sleep(0.2)
    begun = time.thread_time()
    while time.thread_time() - begun < 0.05:
        pass
    start = time.perf_counter()
    failpoint("step", 1)
    assert 0.15 <= time.perf_counter() - start < 0.5
    monkeypatch.setenv("GEMCTL_INJECT", "slow:rank=1,factor=1")
    begun = time.thread_time()
    while time.thread_time() - begun < 0.05:
        pass
    with patch.object(time, "sleep") as sleep:
        failpoint("step", 2)
    sleep.assert_called_once_with(0)


def test_all_problems_are_told() -> None:
    with pytest.raises(InputError) as error:
        parse("bang:rank=x,stage=lunch,when=3;kill:point=noon")
    text = "\n".join(error.value.problems)
    for word in (
        "point 'noon' is none of copy",
        "'bang' is none of raise",
        "rank='x' is not a whole number",
        "'lunch' is none of start",
        "'when'",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kill:point=upload", "point=upload: is of stage=save, not of stage=step"),
        ("nan:stage=save,point=hash", "nan needs stage=step, not stage=save"),
    ],
)
def test_a_fault_that_can_never_occur_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InputError) as error:
        parse(text)
    assert error.value.problems == [f"GEMCTL_INJECT: {problem}"]


@pytest.mark.parametrize(
    ("rank", "stage", "step", "attempt"), [(0, "step", 3, 1), (1, "save", 3, 1), (1, "step", 2, 1), (1, "step", 3, 2)]
)
def test_nothing_happens_elsewhere(
    rank: int, stage: Stage, step: int, attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMCTL_INJECT", "raise:rank=1,step=3")
    monkeypatch.setenv("GEMCTL_ATTEMPT", str(attempt))
    monkeypatch.setenv("RANK", str(rank))
    failpoint(stage, step)
    monkeypatch.setenv("GEMCTL_ATTEMPT", "1")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InjectedError, match="rank 1, stage step, step 3"):
        failpoint("step", 3)


def test_a_planted_fault_is_told_once_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    failpoint("step", 3)
    assert not planted("nan")
    monkeypatch.setenv("GEMCTL_INJECT", "nan:step=3")
    failpoint("step", 2)
    assert not planted("nan")
    for _ in range(2):
        failpoint("step", 3)
        assert [planted("grad_nan"), planted("nan"), planted("nan")] == [False, True, False]


def test_kill_is_sigkill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMCTL_INJECT", "kill:stage=build")
    child = os.fork()
    if child == 0:
        failpoint("build", None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_point_is_not_its_stage_and_a_count_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMCTL_INJECT", "raise:stage=save,point=hash,count=2")
    failpoint("save", 3)
    failpoint("save.upload", 3)
    for _ in range(2):
        with pytest.raises(InjectedError, match="rank 0, stage save, step 3"):
            failpoint("save.hash", 3)
    failpoint("save.hash", 3)


def test_a_disk_is_full_until_its_count_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMCTL_INJECT", "disk_full:stage=save,point=upload,step=3,count=1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        failpoint("save.upload", 3)
        with pytest.raises(OSError, match="File too large"):
            (tmp_path / "large").write_bytes(bytes(20_000))
        (tmp_path / "small").write_bytes(bytes(10_000))
        failpoint("save.upload", 6)
        (tmp_path / "large").write_bytes(bytes(20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_stopped_process_goes_on_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMCTL_INJECT", "stop:stage=build")
    child = os.fork()
    if child == 0:
        failpoint("build", None)
        os._exit(7)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
