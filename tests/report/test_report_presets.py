"""The presets' table from evaluations, and the commands that it runs."""

import io
import json
import subprocess
from typing import Any

import pytest
from rich.console import Console

from gemctl.bench import presets
from gemctl.render.sections import rich


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
    compared = presets.compare(["train.steps=7"])
    trained = [words for words in asked if words[0] == "train"]
    assert len(trained) == len(presets.PRESETS) * len(presets.SEEDS) == len(asked) / 2
    assert all("train.steps=7" in words for words in trained)
    assert len({tuple(words) for words in trained}) == len(trained)
    out = io.StringIO()
    Console(file=out, width=200).print(rich(presets.sections(compared)))
    lines = [line.split() for line in out.getvalue().splitlines()]
    for preset in presets.PRESETS:
        assert [preset, "0.8100", "0.8000", "0.8200", "0.7000"] in lines
    assert "0.9512" in out.getvalue()
