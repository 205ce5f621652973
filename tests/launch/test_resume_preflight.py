"""`gemctl resume` before any rank is started: which keys may change, and what will be loaded, moved and lost."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gemctl.cli import main
from gemctl.plan.state import saved_state
from gemctl.run.conclusion import reference
from gemctl.run.directory import RunDir
from gemctl.run.manifest import publish, read
from gemctl.specs.model import LayerSpec
from tests.checkpoint import resharding
from tests.support.saved_run import saved_run
from tests.support.small import SPEC, small_config
from tests.support.world import run_world


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Four ranks, dense 2 × 2; checkpoints at steps 2 and 4; died in step 6."""
    return saved_run(tmp_path_factory.mktemp("made"), [2, 4], reached=6)


def _resume(run: RunDir, *arguments: str, code: int = 0) -> int:
    assert main(["resume", str(run.path), *arguments]) == code
    return code


def _ahead(capsys: pytest.CaptureFixture[str], run: RunDir, *arguments: str) -> dict[str, Any]:
    _resume(run, *arguments, "--dry-run", "--json")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_dry_run_says_what_is_loaded_and_lost(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in run.path.rglob("*"))
    ahead = _ahead(capsys, run)
    assert (ahead["checkpoint"], ahead["step"], ahead["attempt"], ahead["ranks"]) == ("step_4.a1", 4, 2, 4)
    assert [load["kind"] for load in ahead["loads"]] == [
        "dense weights", "tables", "AdamW state", "tables' AdaGrad state",
    ]  # fmt: skip
    assert all(load["checked"] == load["objects"] > 0 and not load["moved"] for load in ahead["loads"])
    dense, adam = ahead["loads"][0], ahead["loads"][2]
    assert adam["objects"] == 2 * dense["objects"]
    assert dense["before"] == "dp_replicate 2 × dp_shard 2"
    assert ahead["lost"] == ["steps 5 to 6 are repeated: they are in no valid checkpoint"]
    assert sorted(path.name for path in run.path.rglob("*")) == before
    (run.path / "attempts/2").mkdir()  # a resume that a full disk ended
    assert _ahead(capsys, run)["lost"] == ahead["lost"]
    (run.path / "attempts/2").rmdir()
    _resume(run, "--dry-run")
    assert "from step_4.a1 (step 4) to step 9, ranks: 4" in capsys.readouterr().out


def test_dry_run_on_another_world_says_what_moves(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    ahead = _ahead(capsys, run, "launcher.ranks_per_node=2", "topology.dp_replicate=1", "topology.dp_shard=2")
    assert (ahead["ranks_before"], ahead["ranks"]) == (4, 2)
    assert all(load["moved"] for load in ahead["loads"])
    assert ahead["loads"][0]["after"] == "dp_shard 2"
    assert {change["key"] for change in ahead["changes"]} >= {"launcher.ranks_per_node", "topology.dp_replicate"}
    ahead = _ahead(capsys, run, "topology.tables.user=table_wise")
    assert [load["moved"] for load in ahead["loads"]] == [False, True, False, True]


def test_allowed_changes_say_what_they_cost(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    _resume(run, "train.global_batch=50", "--dry-run", code=2)
    assert "to change it anyway: --allow train.global_batch" in capsys.readouterr().err
    ahead = _ahead(capsys, run, "train.global_batch=50", "--allow", "train.global_batch")
    assert ahead["lost"][1] == "rows 200 to 280 of the data's order are repeated: train.global_batch"


def test_a_damaged_checkpoint_is_passed_over_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved_run(tmp_path, [2, 4], reached=4)
    (run.checkpoints / "step_4.a1/__0_0.distcp").write_bytes(b"short")
    ahead = _ahead(capsys, run)
    assert ahead["step"] == 2
    assert "step_4.a1/__0_0.distcp: 5 bytes, its manifest says 100" in ahead["passed_over"][0]
    assert ahead["lost"] == ["steps 3 to 4 are repeated: they are in no valid checkpoint"]
    (run.checkpoints / "step_2.a1/manifest.json").unlink()
    _resume(run, "--dry-run", code=2)
    said = capsys.readouterr().err
    assert said.startswith(f"error: run {run.run_id} has published checkpoints, and none of them can be used:\n")
    assert "step_4.a1/__0_0.distcp: 5 bytes" in said and said.rstrip().endswith(f"{run.path} --from-scratch")
    ahead = _ahead(capsys, run, "--from-scratch")
    assert (ahead["checkpoint"], ahead["step"], ahead["loads"]) == (None, 0, [])
    assert ahead["left_alone"] == ["step_4.a1"]


def test_missing_optimizer_state_stops_before_the_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved_run(tmp_path, [4], reached=4)
    folder = run.checkpoints / "step_4.a1"
    manifest = read(folder)
    gone = next(key for key in manifest.objects if key.endswith("exp_avg_sq"))
    objects = {key: stored for key, stored in manifest.objects.items() if key != gone}
    (folder / "manifest.json").unlink()
    publish(folder, dataclasses.replace(manifest, objects=objects))
    _resume(run, code=2)
    assert f"{gone} is not in the checkpoint" in capsys.readouterr().err
    assert not (run.path / "attempts/2").exists()


def test_a_run_that_is_done_says_how_to_go_on(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    _resume(run, "train.steps=4", code=2)
    told = f"has completed step 4 of train.steps=4; to train further: gemctl resume {reference(run)} train.steps=8"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "sgd"])
def test_the_tensors_of_a_checkpoint_are_those_of_the_model(kind: str) -> None:
    config = small_config()
    config.optim.tables.kind = kind  # type: ignore[assignment]
    config.model.layers = [LayerSpec(interaction=resharding.EXPERTS)]
    assert saved_state(config, SPEC) == run_world(1, resharding.shapes_of_state, kind)[0]
