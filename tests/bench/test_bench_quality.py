"""The tables of the ladder and of the presets from evaluations, and the commands that they run."""

import io
import json
import subprocess
from typing import Any

import pytest
from rich.console import Console

from gemctl.bench import quality
from gemctl.render.sections import Section, rich

VERSIONS = {"torch": "2.13.0"}


def shown(tables: list[Section]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(rich(tables))
    return out.getvalue()


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
        ("base rate", 0.0), ("logistic regression", 0.25), ("model without histories", 0.5), ("model", 0.7),
        ("best possible", 1.0),
    ]  # fmt: skip
    out = shown(quality.ladder_sections(ladder))
    for figure in ("0.8600", "70.0%", "0.9500", "25.0%", "0.8000", "train.steps=7", "torch 2.13.0"):
        assert figure in out


def test_a_failed_command_ends_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("gemctl.bench.quality.subprocess.run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        quality.climb([])
    assert quality.main([]) == quality.main(["presets"]) == 1


def test_help_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert quality.main(["presets", "--help"]) == 0
    assert "python -m gemctl.bench.quality presets" in capsys.readouterr().out


def test_every_preset_is_trained_with_every_seed_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fake(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        name, words = command[4], command[5:]
        asked.append([name, *words])
        if name == "train":
            run = next(word for word in words if word.startswith("run.name=")).removeprefix("run.name=")
            found: dict[str, Any] = {"path": f"runs/{run}", "run": {"versions": {"torch": "2.13.0"}}}
        else:
            seed = int(words[0][-1])
            figures = {"examples": 5000, "base_rate": 0.27, "ne": 0.8 + seed / 100, "auc": 0.7}
            found = {"tasks": {"click": figures}, "baseline": {"click": {**figures, "ne": 0.9512}}}
        return subprocess.CompletedProcess(command, 0, json.dumps(found))

    monkeypatch.setattr("gemctl.bench.quality.subprocess.run", fake)
    compared = quality.compare_presets(["train.steps=7"])
    trained = [words for words in asked if words[0] == "train"]
    assert len(trained) == len(quality.PRESETS) * len(quality.SEEDS) == len(asked) / 2
    assert all("train.steps=7" in words for words in trained)
    assert len({tuple(words) for words in trained}) == len(trained)
    out = shown(quality.preset_sections(compared))
    lines = [line.split() for line in out.splitlines()]
    for preset in quality.PRESETS:
        assert [preset, "0.8100", "0.8000", "0.8200", "0.7000"] in lines
    assert "0.9512" in out
