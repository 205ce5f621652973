"""`gemctl eval`: a 2-rank run's own scores, recomputed in one process from its checkpoint, and the baseline beside."""

import io
import json
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from sklearn.metrics import roc_auc_score

from gemctl import torch_call
from gemctl.checkpoint.save import Saver
from gemctl.cli import parser_of
from gemctl.commands import eval as command
from gemctl.config.compose import from_yaml, to_yaml
from gemctl.config.schema import Config, DataConfig, TopologyConfig, TrainConfig
from gemctl.data.loader import eval_batches
from gemctl.errors import GemctlError, InputError
from gemctl.mesh.topology import resolve
from gemctl.parallel.assemble import assemble
from gemctl.render.show import plain, rendered
from gemctl.report.report import Evaluation
from gemctl.run.attempt import Base, claim
from gemctl.run.directory import RunDir
from gemctl.run.manifest import RunFacts
from gemctl.specs import feature_spec
from gemctl.specs.model import ModelConfig
from gemctl.train.evaluate import ScoreFile
from gemctl.train.optim import DenseOptimizer
from tests.support.world import run_world

TRAIN, SCORED = 300, 101
SPEC = """
name: shop
tables: [{name: user, rows: 20}, {name: item, rows: 30}, {name: tag, rows: 9, ids: hash}]
categorical:
  - {name: user, table: user}
  - {name: candidate, table: item}
  - {name: tags, table: tag, multi: true}
dense: [{name: price, log: true}]
sequences: [{name: history, ids: [{name: item, table: item, column: seen}], timestamps: seen_at}]
labels: [{name: click}, {name: like, mask: liked}]
timestamp: at
true_probability: p
"""


def write_rows(path: Path, rows: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 6, rows)
    truth = draw.uniform(0.1, 0.9, rows).astype(np.float32)
    columns: dict[str, Any] = {
        "user": draw.integers(0, 25, rows),  # some outside of the vocabulary
        "candidate": draw.integers(0, 29, rows),
        "tags": [[f"t{tag}" for tag in draw.integers(0, 9, draw.integers(0, 4))] for _ in range(rows)],
        "price": draw.uniform(0, 50, rows),
        "at": np.arange(rows) + 1000,
        "seen": [draw.integers(0, 29, length).tolist() for length in lengths],
        "seen_at": [np.sort(draw.integers(0, 900, length)).tolist() for length in lengths],
        "click": (draw.random(rows) < truth).astype(np.int64),
        "like": (draw.random(rows) < 0.3).astype(np.int64),
        "liked": (draw.random(rows) < 0.6).astype(np.int64),
        "p": truth,
    }
    lists = {"tags": pa.string(), "seen": pa.int64(), "seen_at": pa.int64()}
    arrays = {
        name: pa.array(values, pa.list_(lists[name])) if name in lists else pa.array(values)
        for name, values in columns.items()
    }
    pq.write_table(pa.table(arrays), path, row_group_size=64)


def save_checkpoint(folder: str) -> list[list[float]]:
    """Runs on each of 2 ranks: initialises the model, saves it, and returns its own logits of the rank's eval rows."""

    run = RunDir(Path(folder))
    config = from_yaml(run.attempt(1).config.read_text(), "config")
    spec = feature_spec.load(config.data.spec)
    topology = resolve(config.topology, config.launcher)
    model = assemble(config, spec, topology, torch.device("cpu"))
    model.initialise(config.run.seed)
    state = model.state() | DenseOptimizer(model.dense, config.optim.dense).state()
    facts = RunFacts(2, {"dp_shard": 2}, ["host", "host"], "p", "c", 0, {"dense": "adamw"})
    saver = Saver(run.checkpoints, 1, config.checkpoint, facts)
    saver.save(6, state, {"step": 6, "applied_updates": 6})
    rank = dist.get_rank()
    batches = eval_batches(config.data, spec, global_batch=SCORED, rank=rank, world=2)
    logits = [row for batch in batches for row in model.predict(batch, SCORED // 2 + 1).tolist()]
    saver.wait()
    saver.close()
    return logits


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, np.ndarray]:
    """A run with a checkpoint of step 6 by 2 ranks, and the logits [SCORED, 2] that those ranks computed."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "spec.yaml").write_text(SPEC)
    write_rows(folder / "train.parquet", TRAIN, 0)
    write_rows(folder / "eval.parquet", SCORED, 1)
    data = DataConfig(str(folder / "spec.yaml"), str(folder / "train.parquet"), str(folder / "eval.parquet"))
    config = Config(
        data=data, train=TrainConfig(global_batch=32), model=ModelConfig(dim=8),
        topology=TopologyConfig(world_size=2),
    )  # fmt: skip
    config.launcher.ranks_per_node = 2
    run = RunDir.create(str(folder / "runs"), "demo", ["gemctl"])
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=2, heartbeat=1.0)
    attempt.write_base(Base(None, 0))
    attempt.config.write_text(to_yaml(config))
    parts = run_world(2, save_checkpoint, str(run.path))
    return run, np.array([row for part in parts for row in part])


def run_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> Evaluation:
    """`gemctl eval` that scores in this process instead of in a new one (seconds of imports)."""

    def in_process(function: str, request: str) -> str:
        threads = torch.get_num_threads()
        try:
            return torch_call.answer(function, request)
        finally:
            torch.set_num_threads(threads)

    monkeypatch.setattr(torch_call, "_in_process", in_process)
    return command.run(parsed(*words))


def parsed(*words: str) -> Namespace:
    return parser_of("eval").parse_args(list(words))


def test_scores_and_figures_equal_those_of_the_ranks(
    scored: tuple[RunDir, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, logits = scored
    out = tmp_path / "scores.parquet"
    value = run_command(monkeypatch, str(run.path), "--out", str(out))
    scores = pq.read_table(out).to_pydict()
    rows = pq.read_table(run.path.parents[2] / "eval.parquet").to_pydict()
    assert scores["row"] == list(range(SCORED)) and value.rows == SCORED and value.step == 6
    np.testing.assert_allclose(scores["score_click"], 1 / (1 + np.exp(-logits[:, 0])), atol=1e-6)
    np.testing.assert_allclose(scores["score_like"], 1 / (1 + np.exp(-logits[:, 1])), atol=1e-6)
    assert scores["label_click"] == rows["click"] and scores["mask_like"] == rows["liked"]
    assert value.tasks["click"]["auc"] == pytest.approx(roc_auc_score(rows["click"], logits[:, 0]), abs=1e-3)
    counted = np.array(rows["liked"]) == 1
    want = roc_auc_score(np.array(rows["like"])[counted], logits[counted, 1])
    assert value.tasks["like"]["auc"] == pytest.approx(want, abs=1e-3)
    assert value.tasks["like"]["examples"] == counted.sum()
    assert value.baseline is not None
    for task, quality in value.baseline.items():
        assert quality["examples"] == value.tasks[task]["examples"]
        assert quality["best_ne"] == value.tasks[task]["best_ne"]
    check_shown(value)


def check_shown(value: Evaluation) -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(rendered(value))
    shown = out.getvalue()
    assert value.baseline is not None
    for figure in (value.tasks["click"]["auc"], value.baseline["like"]["ne"], value.tasks["click"]["best_ne"]):
        assert f"{figure:.4f}" in shown
    assert "logistic regression" in shown and "step_6.a1" in shown
    assert json.loads(json.dumps(plain(value)))["tasks"]["click"]["auc"] == value.tasks["click"]["auc"]


def test_other_rows_and_a_training_file_that_has_gone(
    scored: tuple[RunDir, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = scored
    write_rows(tmp_path / "other.parquet", 40, 5)
    attempt = run.attempt(1)
    text = attempt.config.read_text()
    attempt.config.write_text(text.replace("train.parquet", "gone.parquet"))
    try:
        value = run_command(monkeypatch, str(run.path), "--data", str(tmp_path / "other.parquet"), "--checkpoint", "6")
    finally:
        attempt.config.write_text(text)
    assert value.rows == 40 and value.baseline is None
    assert value.baseline_reason is not None and "gone.parquet" in value.baseline_reason


def test_wrong_input_is_named_by_the_command(
    scored: tuple[RunDir, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = scored
    with pytest.raises(InputError, match=r"no checkpoint of that step \(it has 6\)"):
        run_command(monkeypatch, str(run.path), "--checkpoint", "7")
    with pytest.raises(InputError, match=r"missing\.parquet"):
        run_command(monkeypatch, str(run.path), "--data", str(tmp_path / "missing.parquet"))
    write_rows(other := tmp_path / "other.parquet", 9, 5)
    pq.write_table(pq.read_table(other).set_column(2, "tags", pa.array([[1]] * 9)), other)
    with pytest.raises(InputError, match=r"column 'tags' is list<element: int64>, but column 'tags' of"):
        run_command(monkeypatch, str(run.path), "--data", str(other))
    other.unlink()
    monkeypatch.setattr(torch_call, "_in_process", None)  # what follows never gets to the scoring
    for out in (str(tmp_path / "no" / "folder.parquet"), str(tmp_path), "", "/dev/null", str(tmp_path / ("n" * 300))):
        with pytest.raises(InputError, match="cannot be written"):
            command.run(parsed(str(run.path), "--out", out))
    assert not list(tmp_path.iterdir())
    write_rows(other, 9, 5)
    (tmp_path / "spec.yaml").write_text("format: 1")
    for kept in (other, tmp_path / "spec.yaml"):
        before = kept.read_bytes()
        with pytest.raises(InputError, match="exists already and holds no scores"):
            command.run(parsed(str(run.path), "--data", str(other), "--out", str(kept)))
        assert kept.read_bytes() == before
    config = run.attempt(1).config
    config.rename(config.with_name("moved"))
    with pytest.raises(InputError, match=r"config\.yaml: missing; it describes the model of step_6"):
        command.run(parsed(str(run.path)))
    config.with_name("moved").rename(config)


def test_a_failure_while_scoring_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ScoreFile(tmp_path / "scores.parquet", ["click"]):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_a_scoring_process_that_dies_is_an_error(
    scored: tuple[RunDir, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    died = subprocess.CompletedProcess([], -9, stdout="")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: died)
    with pytest.raises(GemctlError, match=r"gemctl\.train\.evaluate:evaluate failed \(killed by SIGKILL\)"):
        command.run(parsed(str(scored[0].path)))
