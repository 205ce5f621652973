"""The ladder's table from two evaluations, and the commands that it runs."""

import io
import json
import subprocess
from typing import Any

import pytest

from gemctl.bench import quality

VERSIONS = {"torch": "2.13.0"}


def evaluation(ne: float, gap: float) -> dict[str, Any]:
    def figures(ne: float, gap: float) -> dict[str, Any]:
        return {"examples": 5000, "base_rate": 0.27, "ne": ne, "auc": 0.7, "best_ne": 0.8, "gap_closed": gap}

    return {"tasks": {"click": figures(ne, gap)}, "baseline": {"click": figures(0.95, 0.25)}}


def test_the_ladder_trains_twice_scores_both_and_lists_all_rungs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fake(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[4:])
        name, words = command[4], command[5:]
        if name == "train":
            path = "runs/b" if "data.histories=empty" in words else "runs/a"
            return subprocess.CompletedProcess(command, 0, json.dumps({"path": path, "run": {"versions": VERSIONS}}))
        found = evaluation(0.9, 0.5) if "runs/b" in words else evaluation(0.86, 0.7)
        return subprocess.CompletedProcess(command, 0, json.dumps(found))

    monkeypatch.setattr("gemctl.bench.quality.subprocess.run", fake)
    ladder = quality.climb(["train.steps=7"])
    assert [words[0] for words in asked] == ["train", "train", "eval", "eval"]
    assert all("train.steps=7" in words and words[-1] == "--json" for words in asked[:2])
    assert [(rung.name, rung.quality["gap_closed"]) for rung in ladder.rungs] == [
        ("base rate", 0.0), ("logistic regression", 0.25), ("the model, histories emptied", 0.5), ("the model", 0.7),
        ("best possible", 1.0),
    ]  # fmt: skip
    from rich.console import Console  # noqa: PLC0415

    from gemctl.render.sections import rich

    out = io.StringIO()
    Console(file=out, width=200).print(rich(quality.sections(ladder)))
    for figure in ("0.8600", "70.0%", "0.9500", "25.0%", "0.8000", "train.steps=7", "torch 2.13.0"):
        assert figure in out.getvalue()


def test_a_failed_command_ends_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("gemctl.bench.quality.subprocess.run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        quality.climb([])
    monkeypatch.setattr("sys.argv", ["quality"])
    assert quality.main("", lambda words: quality.sections(quality.climb(words))) == 1


def test_help_trains_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["quality", "--help"])
    assert quality.main("what it is\n", lambda words: 1 / 0) == 0  # type: ignore[arg-type, return-value]
    assert capsys.readouterr().out == "what it is\n"
