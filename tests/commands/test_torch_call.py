"""Calls of functions in a process of their own: what goes there and comes back; every call fits its function."""

import ast
import inspect
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gemctl import torch_call
from gemctl.errors import DoesNotFit, GemctlError, InputError

HERE = "tests.commands.test_torch_call"
ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ROOT / "gemctl" / "commands"
IN_PROCESS = torch_call._in_process


@dataclass(frozen=True)
class Point:
    x: float
    at: Path


def moved(point: Point, by: float) -> Point:
    return Point(point.x + by, point.at / "moved")


def refused(error: str) -> None:
    raise {
        "input": InputError(["a: wrong", "b: wrong too"]),
        "run": GemctlError("rank 1 died"),
        "fit": DoesNotFit("too large"),
        "disk": OSError(28, "full", "/x/y"),
        "bug": OSError(9, "bad descriptor"),
    }[error]


def process_of(text: str) -> list[int]:
    sys.stdout.write(text)
    return [os.getpid(), os.getsid(0)]


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_call, "_in_process", torch_call.answer)


def test_dataclasses_and_paths_go_there_and_back() -> None:
    point = Point(float("inf"), Path("/a"))
    assert torch_call.call(f"{HERE}:moved", Point, point=point, by=1.5) == Point(float("inf"), Path("/a/moved"))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ("input", InputError, "a: wrong\nb: wrong too"),
        ("run", GemctlError, "rank 1 died"),
        ("fit", GemctlError, "too large"),
        ("disk", GemctlError, "/x/y: No space left on device"),
    ],
)
def test_errors_for_the_user_come_back(error: str, kind: type[GemctlError], message: str) -> None:
    with pytest.raises(GemctlError) as raised:
        torch_call.call(f"{HERE}:refused", dict[str, Any], error=error)
    assert (type(raised.value), str(raised.value)) == (kind, message)


@pytest.mark.parametrize(("code", "said"), [(-9, "(killed by SIGKILL)"), (1, "(exit code 1); its messages are above")])
def test_a_process_that_dies_is_told(code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_call, "_in_process", IN_PROCESS)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, ""))
    with pytest.raises(GemctlError) as raised:
        torch_call.call(f"{HERE}:process_of", list[int], text="")
    assert str(raised.value) == f"the process of {HERE}:process_of failed {said}"


def test_defects_keep_their_traceback() -> None:
    with pytest.raises(OSError, match="bad descriptor"):
        torch_call.answer(f"{HERE}:refused", json.dumps({"error": "bug"}))


def test_every_call_fits_its_function() -> None:
    calls = []
    for file in sorted(COMMANDS.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch_call.call":
                function = torch_call._resolve(ast.literal_eval(node.args[0]))
                inspect.signature(function).bind(**{str(keyword.arg): None for keyword in node.keywords})
                calls.append(function.__name__)
    assert sorted(calls) == ["compare", "evaluate", "export", "measure", "measure", "run"]


def test_the_process_has_a_session_of_its_own_and_its_output_is_not_the_reply(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_call, "_in_process", IN_PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pid, session = torch_call.call(f"{HERE}:process_of", list[int], text="a line of output\n")
    assert pid == session != os.getsid(0)
    assert capfd.readouterr() == ("", "a line of output\n")
