"""The current folder is not on the module path: modules that lie there are not imported in place of Python's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemctl import process
from gemctl.config.schema import LauncherConfig
from gemctl.launchers.local import LocalAgents
from gemctl.recover.cause import root_cause
from gemctl.run.attempt import claim
from gemctl.run.directory import RunDir
from tests.support import hostile

GEMCTL = Path(sys.executable).with_name("gemctl")


@pytest.mark.parametrize("python_path", [None, ":/nowhere"])
@pytest.mark.parametrize("program", [[str(GEMCTL)], [*process.python("-m", "gemctl")]], ids=["script", "module"])
def test_nothing_in_the_current_folder_is_imported(
    program: list[str], python_path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile.plant(tmp_path)
    (tmp_path / "runs").mkdir()
    if python_path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", python_path)
        (tmp_path / "gemctl.py").unlink()  # Python looks for it before it runs any of gemctl's code
    done = subprocess.run([*program, "list"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, hostile.ran(tmp_path)) == (0, []), done.stderr


def test_a_folder_that_pythonpath_names_is_searched_though_it_is_the_current_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("kept = 7\n")
    (tmp_path / "runs").mkdir()
    code = "import sys; sys.argv = ['gemctl', 'list']; from gemctl.__main__ import main; main(); import mine"
    found = {}
    for given in (".", str(tmp_path), f":{tmp_path}", ""):
        done = subprocess.run(
            process.python("-c", code), cwd=tmp_path, env={**os.environ, "PYTHONPATH": given},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found[given] = done.stderr.strip().rpartition("\n")[2]
    missing = "ModuleNotFoundError: No module named 'mine'"
    assert found == {".": "", str(tmp_path): "", f":{tmp_path}": "", "": missing}


def test_empty_entries_of_pythonpath_are_not_handed_on(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.argv = ['gemctl', 'list']; from gemctl.__main__ import main; main()\n"
        "print(os.environ['PYTHONPATH'], os.getcwd() in sys.path)"
    )
    done = subprocess.run(
        process.python("-c", code), cwd=tmp_path, env={**os.environ, "PYTHONPATH": ":/a::/b:"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "/a:/b False"


def test_the_error_of_an_agent_that_cannot_start_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its PATH does not begin with the current folder."""
    broken = tmp_path / "python"
    broken.write_text('#!/bin/sh\necho "no module named $PATH" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(broken))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # a long line would be cut
    run = RunDir.create(str(tmp_path / "runs"), "gem", [])
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=1, heartbeat=1.0)
    agents = LocalAgents(run, LauncherConfig())
    agents.start(attempt)
    while not (ended := agents.ended()):
        pass
    cause = root_cause(attempt, [], None, ended[0])
    assert cause.log == "attempts/1/logs/agent-0.log"
    assert cause.lines == ["no module named /usr/bin:/bin"]
