"""Shared by all tests: the fork server for multi-process worlds, and each suite's seconds beside its share."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemctl import env
from tests.support import world

FAST_SHARE = {
    "bench": 15,
    "chaos": 5,
    "checkpoint": 40,
    "cluster": 5,
    "commands": 20,
    "config": 10,
    "data": 20,
    "kernels": 30,
    "launch": 50,
    "mesh": 5,
    "model": 25,
    "parallel": 55,
    "plan": 20,
    "ranks": 15,
    "recover": 50,
    "render": 5,
    "report": 10,
    "run": 15,
    "slurm": 5,
    "specs": 5,
    "support": 15,
    "train": 60,
}
SLOW_SHARE = {
    "bench": 300,
    "chaos": 480,
    "checkpoint": 150,
    "commands": 60,
    "config": 15,
    "data": 60,
    "kernels": 180,
    "launch": 210,
    "model": 210,
    "parallel": 420,
    "ranks": 120,
    "recover": 180,
    "report": 60,
    "run": 90,
    "slurm": 690,
    "train": 60,
}
_seconds: dict[str, float] = defaultdict(float)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Ends the fork server after the last test."""
    yield
    world.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Any:
    start = time.monotonic()
    result = yield
    _seconds[item.nodeid.split("/")[1]] += time.monotonic() - start
    return result


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    share = SLOW_SHARE if config.getoption("-m") == "slow" else FAST_SHARE
    for suite, seconds in sorted(_seconds.items()):
        terminalreporter.write_line(f"suite {suite}: {seconds:.1f} s of {share.get(suite, 0)} s")


def _needs() -> dict[str, str]:
    lines = (Path(__file__).parent / "required.txt").read_text().splitlines()
    return dict(line.split() for line in lines if line and not line.startswith("#"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Under CI=true a skip is a failure, unless required.txt names a variable that is not set."""
    report = yield
    if report.skipped and env.in_ci() and not hasattr(report, "wasxfail"):
        need = _needs().get(item.nodeid.split("::")[0], "")
        if not (need.startswith("env:") and not os.environ.get(need.removeprefix("env:"))):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped under CI ({need or 'not in tests/required.txt'})"
    return report
