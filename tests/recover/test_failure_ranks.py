"""A rank that dies, raises or hangs in any stage ends the whole run soon, and the report names it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemctl.cluster.host import own_groups
from gemctl.run.files import read_log
from tests.support.small_run import Case, Ended, supervise_all
from tests.support.world import run_world

RANKS = 4
STAGES = {"build": "stage=build", "step": "stage=step,step=3", "save": "stage=save"}
KINDS = {"kill": "signal", "raise": "exception", "hang": "hang"}
TOLD = {"kill": "killed by SIGKILL", "raise": "InjectedError: planted in rank 1", "hang": "failpoints.py:"}


@pytest.fixture(scope="module")
def cgroup() -> Iterator[Path | None]:
    """A memory cgroup of 400 MB, of either version; None where this user may not make one."""
    own = next((chain[0] for chain in own_groups("memory")), None)
    folder = own / f"gemctl-test-{os.getpid()}" if own is not None else None
    limit = "memory.max" if (Path("/sys/fs/cgroup") / "cgroup.controllers").exists() else "memory.limit_in_bytes"
    try:
        if folder is not None:
            folder.mkdir()
            (folder / limit).write_text(str(400 << 20))
    except OSError:
        folder = None
    yield folder
    if folder is not None:
        folder.rmdir()


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory, cgroup: Path | None) -> dict[tuple[str, str], Ended]:
    """Every fault in every stage, and want of memory, all at once."""
    faults: dict[tuple[str, str], dict[str, Any]] = {
        (kind, stage): {"inject": f"{kind}:rank=1,{STAGES[stage]}", "watchdog": 8.0 if kind == "hang" else 60.0}
        for kind in KINDS
        for stage in STAGES
    }
    faults |= {("memory", "rlimit"): {"fault": "memory"}, ("block", "start"): {"fault": "block"}}
    if cgroup is not None:
        faults["memory", "cgroup"] = {"fault": "memory", "cgroup": str(cgroup)}
    cases = [Case(str(tmp_path_factory.mktemp("runs")), ranks_per_node=RANKS, **fault) for fault in faults.values()]
    return dict(zip(faults, run_world(1, supervise_all, cases, gloo=False)[0], strict=True))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_fault_ends_the_run_and_is_named(ends: dict[tuple[str, str], Ended], kind: str, stage: str) -> None:
    end = ends[kind, stage]
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert end.seconds < (15 if kind == "hang" else 10)
    assert end.cause is not None
    assert (end.cause["kind"], end.cause["rank"], end.cause["stage"]) == (KINDS[kind], 1, stage)
    assert end.cause["step"] == {"build": None, "step": 3, "save": 6}[stage]
    for text in (f"rank 1 failed first, in stage {stage}", TOLD[kind], "gemctl resume", end.run_dir.run_id):
        assert text in end.message
    assert (end.run_dir.path / end.cause["log"]).is_file()


def test_what_the_others_waited_for_is_told(ends: dict[tuple[str, str], Ended]) -> None:
    for kind, told in (("kill", ""), ("hang", ", waiting in all_reduce")):
        cause = ends[kind, "step"].cause
        assert cause is not None
        assert cause["others"] == f"ranks 0, 2, 3 in stage step, step 3{told}"
        assert f"other ranks: {cause['others']}" in ends[kind, "step"].message
    cause = ends["raise", "step"].cause
    assert cause is not None
    assert cause["lines"][-1].endswith("InjectedError: planted in rank 1, stage step, step 3")
    assert f"  | {cause['lines'][-1]}" in ends["raise", "step"].message


def test_want_of_memory_is_said(ends: dict[tuple[str, str], Ended]) -> None:
    told = {
        "rlimit": "rank 1 failed first, in stage step, step 3: out of memory: MemoryError",
        "cgroup": "rank 1 failed first, in stage step, step 3: killed by SIGKILL, out of memory: the kernel",
    }
    for limit in [limit for kind, limit in ends if kind == "memory"]:
        end = ends["memory", limit]
        assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
        assert told[limit] in end.message
        assert end.seconds < 10


def test_rank_that_ends_before_it_is_registered_ends_the_others_soon(ends: dict[tuple[str, str], Ended]) -> None:
    """torchrun's agent alone would wait 30 s for them."""
    end = ends["block", "start"]
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert "rank 1 failed first, in stage start: IsADirectoryError" in end.message
    last = {line["rank"]: line["time"] for line in read_log(end.run_dir.attempt(1).agent_log(0)) if "rank" in line}
    assert set(last) == set(range(RANKS))
    assert max(last.values()) - end.run_dir.attempt(1).claim().time < 12


def test_end_is_on_record(ends: dict[tuple[str, str], Ended]) -> None:
    run = ends["raise", "step"].run_dir
    end = run.attempt(1).end()
    assert end is not None
    assert (end["outcome"], end["cause"]["rank"]) == ("failed", 1)
    assert "planted in rank 1" in run.attempt(1).rank_output(1).read_text()
