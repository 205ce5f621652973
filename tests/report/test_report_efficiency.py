"""The scaling ratio in a report, by division and from the ledger, and the cache of the layers' own times."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gemctl.config.compose import from_yaml, to_yaml
from gemctl.config.schema import Config, SyntheticConfig
from gemctl.data.synthetic import spec_text
from gemctl.report.compare import compare
from gemctl.report.layers import Layers, LayerTime, cache_file, cached, keep, subject
from gemctl.report.report import build
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog
from gemctl.specs import feature_spec
from tests.report.test_report import PARTS, RANKS, ledger_line, text, train_line, write_attempt

# Effective MFU is .2 (5 s for 4e9 FLOPs at 4e9 FLOP/s), compute 3.9 of 5 s.
EFFECTIVE, LEDGER = 0.2, 0.78


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Two attempts, of which the first's last interval was done again; the feature spec exists."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = RunDir.create(str(tmp_path), "demo", ["gemctl", "train"])
    first = write_attempt(run, 1, 0, [10, 20, 30], {"outcome": "failed", "step": 31})
    second = write_attempt(run, 2, 20, [30, 40], {"outcome": "finished", "step": 40})
    config = configured(first)
    config.data.spec = str(tmp_path / "spec.yaml")
    Path(config.data.spec).write_text(spec_text(SyntheticConfig(users=50, items=50)))
    for attempt in (first, second):
        attempt.config.write_text(to_yaml(config))
    return run


def configured(attempt: Attempt) -> Config:
    return from_yaml(attempt.config.read_text(), str(attempt.config))


def measured(run: RunDir, local_mfu: float) -> Path:
    """Keeps a measurement with this local MFU; parts of a layer, which are not summed, would spoil it."""
    config = configured(run.attempts()[-1])
    of = subject(config, feature_spec.load(config.data.spec))
    rows = [
        LayerTime("tokens", 0.0, 0.25, 0.25, inside=False),
        LayerTime("layers.0", 6e9, 0.5, 1.0, inside=False),
        LayerTime("layers.0.interaction", 3e9, 0.1, 0.1, inside=True),
    ]
    layers = Layers(of, 6e9 / 2.0 / local_mfu, 3, 30, 300, "rows", 2.1, rows)
    assert layers.local_mfu == pytest.approx(local_mfu)
    keep(of, asdict(layers))
    return cache_file(of)


def test_the_ledgers_ratio_is_the_share_of_compute_in_the_steps_that_counted(run: RunDir) -> None:
    report = build(run)
    found = report.throughput
    assert found.ledger_ratio == pytest.approx(LEDGER)
    assert report.step_shares == pytest.approx({"compute": 0.78, "data_wait": 0.2, "unaccounted": 0.02})
    assert found.local_mfu is None and found.scaling_ratio is None
    shown = text(report)
    assert "bench layers" in shown and re.search(r"scaling ratio, from the ledger +0\.780", shown)


def test_both_ratios_once_the_layers_are_measured(run: RunDir) -> None:
    measured(run, 0.25)
    report = build(run)
    assert report.throughput.local_mfu == pytest.approx(0.25)
    assert report.throughput.scaling_ratio == pytest.approx(EFFECTIVE / 0.25)
    assert not any("by division" in note for note in report.notes), "0.80 and 0.78 agree"
    assert "scaling ratio, from the ledger" in text(compare(run, run))


def test_ratios_that_do_not_agree_are_said_to(run: RunDir) -> None:
    measured(run, 0.4)
    (note,) = (note for note in build(run).notes if "by division" in note)
    assert "0.500 by division and 0.780 from the ledger: they differ by 56%" in note and "1.56 ×" in note


def test_exposed_communication_and_evaluations_are_no_compute(run: RunDir, tmp_path: Path) -> None:
    other = RunDir.create(str(tmp_path), "other", ["gemctl"])
    attempt = write_attempt(other, 1, 0, [], None)
    parts = {"dense_forward": 1.0, "dense_backward": 2.0, "exposed_communication": 1.0, "eval": 7.0, "peak": 1.0}
    JsonLog(attempt.metrics).write(train_line(10, 1.0, 4.0))
    JsonLog(attempt.ledger).write(ledger_line(10, 1.0, dict.fromkeys(PARTS, 0.0) | parts, 0.0))
    assert build(other).step_shares == pytest.approx({"compute": 0.75, "exposed_communication": 0.25})


def test_intervals_on_other_ranks_do_not_count(run: RunDir) -> None:
    log = run.attempts()[-1].metrics
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[0] |= {"ranks": RANKS + 1, "seconds": 50.0}
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = build(run)
    assert report.throughput.ledger_ratio == pytest.approx(LEDGER)
    assert any("1 intervals on another number of ranks" in note for note in report.notes)


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda kept: kept[: len(kept) // 2], "not JSON"),
        (lambda kept: json.dumps({**json.loads(kept), "format": 2}), "format 2 is newer"),
        (lambda kept: json.dumps({"format": 1, "layers": []}), "missing"),
        (lambda kept: json.dumps({"format": 1}), ": layers is missing"),
    ],
    ids=["cut short", "newer", "fields missing", "another object"],
)
def test_a_damaged_or_newer_measurement_is_named_and_not_used(run: RunDir, damage: Any, reason: str) -> None:
    file = measured(run, 0.25)
    file.write_text(damage(file.read_text()))
    report = build(run)
    assert report.throughput.local_mfu is None
    assert any(reason in note and str(file) in note for note in report.notes), report.notes


def test_a_measurement_is_of_one_model_batch_and_world_alone(run: RunDir) -> None:
    measured(run, 0.25)
    config = configured(run.attempts()[-1])
    spec = feature_spec.load(config.data.spec)
    assert cached(config, spec)[0] is not None
    others = [
        replace(config, model=replace(config.model, heads=4)),
        replace(config, train=replace(config.train, global_batch=77)),
        replace(config, launcher=replace(config.launcher, ranks_per_node=2)),
        replace(config, precision=replace(config.precision, dense="bf16")),
    ]
    assert [cached(other, spec)[0] for other in others] == [None] * len(others)
