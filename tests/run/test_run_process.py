"""Processes that end together: a command's child with the command, whatever ends that one."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gemctl.process import exit_code, how_ended, wait_until_gone
from gemctl.torch_call import call
from tests.support.waiting import wait_for

SLEEPER = """
import os, pathlib, sys, time
pathlib.Path("draft").write_text(str(os.getpid()))
pathlib.Path("draft").rename("pid")
time.sleep(60)
"""


def _ended(pid: int) -> bool:
    return exit_code(pid) is not None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_child_does_not_outlive_its_command(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = os.fork()
    if command == 0:
        for taken in (signal.SIGTERM, signal.SIGINT):
            signal.signal(taken, signal.default_int_handler)
        try:
            call("sleeper:sleep", str)
        finally:
            os._exit(3)
    wait_for((tmp_path / "pid").exists)
    os.kill(command, number)
    os.waitid(os.P_PID, command, os.WEXITED | os.WNOWAIT)
    expected = "killed by SIGKILL" if number == signal.SIGKILL else "exit code 3"
    assert how_ended(command) == expected
    os.waitpid(command, 0)
    assert wait_until_gone([int((tmp_path / "pid").read_text())], 3) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_writing_leaves_nothing_half_done(number: signal.Signals, tmp_path: Path) -> None:
    words = ["data", "synth", str(tmp_path), "--rows", "2000000"]
    command = subprocess.Popen([sys.executable, "-P", "-m", "gemctl", *words], stderr=subprocess.PIPE, text=True)
    wait_for((tmp_path / ".train.parquet.partial").exists)
    command.send_signal(number)
    _, errors = command.communicate(timeout=20)
    assert (command.returncode, errors.splitlines()[-1]) == (128 + number, "interrupted")
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".yaml"] == []


def test_interrupt_during_the_imports_is_one_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gemctl", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (143, "interrupted\n")


def test_exit_code_is_seen_without_reaping() -> None:
    """Another thread's waitpid must still find the child: a reaped one looks failed to torchrun's agent."""
    for end, code in ((lambda: os._exit(3), 3), (lambda: os.kill(os.getpid(), signal.SIGKILL), -9)):
        pid = os.fork()
        if pid == 0:
            end()
        wait_for(functools.partial(_ended, pid), 5)
        assert exit_code(pid) == code
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
        with pytest.raises(ChildProcessError):
            exit_code(pid)
