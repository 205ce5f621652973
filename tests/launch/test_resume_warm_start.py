"""Warm start: what a new run takes from another run's checkpoint, by names and shapes, and its notes about the rest."""

import json
from pathlib import Path

import pytest

from gemctl.cli import main
from gemctl.config.schema import WarmStartConfig
from gemctl.errors import InputError
from gemctl.run.directory import RunDir
from gemctl.run.manifest import read
from gemctl.run.warm_start import ShapeDiffers, find_source, match
from tests.checkpoint.checkpoint_world import make_run
from tests.checkpoint.resharding import Layout, load_tables_only, save_trained
from tests.support.saved_run import saved_run, words
from tests.support.world import run_world

WANTED = {
    "dense.heads.tasks.0.0.weight": (64, 128),
    "dense.new.bias": (3,),
    "tables.pooled.embedding_bags.user.weight": (9, 8),
    "optim.dense.new.bias.exp_avg": (3,),
    "optim.tables.pooled.embedding_bags.user.weight.momentum1": (51,),
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return saved_run(tmp_path_factory.mktemp("made"), [2, 4], reached=4)


def test_names_and_shapes_decide_what_is_taken(other: RunDir) -> None:
    folder = other.checkpoints / "step_4.a1"
    found = match(WarmStartConfig("x"), folder, WANTED)
    user = "tables.pooled.embedding_bags.user.weight"
    assert found.loaded == ["dense.heads.tasks.0.0.weight"]
    assert found.not_found == ["dense.new.bias"]
    assert [one.name for one in found.shape_differs] == [user]
    assert isinstance(found.shape_differs[0], ShapeDiffers) and found.shape_differs[0].ours == [9, 8]
    assert "dense.heads.tasks.1.0.weight" in found.unused and not any("optim" in name for name in found.unused)
    same = {name: tuple(stored.shape) for name, stored in read(folder).objects.items()}
    tables = match(WarmStartConfig("x", include=["*"], exclude=["dense.*"]), folder, same)
    assert f"optim.{user}.momentum1" in tables.loaded and user in tables.loaded and len(tables.loaded) == 14


def test_patterns_that_mean_nothing_are_refused(other: RunDir) -> None:
    folder = other.checkpoints / "step_4.a1"
    config = WarmStartConfig("x", include=["dense.*", "tabels.*", "optim.dense.*"], exclude=["dense.new.bais"])
    with pytest.raises(InputError) as error:
        match(config, folder, WANTED)
    said = error.value.problems
    assert len(said) == 3
    assert said[0] == "checkpoint.warm_start.include: 'tabels.*' matches no tensor"
    assert "AdamW starts from scratch" in said[1]
    assert said[2].endswith("'dense.new.bais' matches no tensor; did you mean dense.new.bias?")
    with pytest.raises(InputError, match=r"no tensor in .* has a selected name and the same shape"):
        match(WarmStartConfig("x", include=["dense.new.bias"]), folder, WANTED)


def test_the_source_must_be_there_and_whole(other: RunDir, tmp_path: Path) -> None:
    assert find_source(WarmStartConfig(f"{other.path}:2"), "runs") == other.checkpoints / "step_2.a1"
    with pytest.raises(InputError, match=r"warm_start.source: .*:3: no such checkpoint; the run has steps 4, 2"):
        find_source(WarmStartConfig(f"{other.path}:3"), "runs")
    damaged = saved_run(tmp_path, [2], reached=2)
    (damaged.checkpoints / "step_2.a1/__0_0.distcp").write_bytes(b"cut")
    with pytest.raises(InputError, match=r"warm_start.source: .*__0_0.distcp: 3 bytes"):
        find_source(WarmStartConfig(str(damaged.path)), "runs")


def test_dry_run_reports_what_would_be_taken(other: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*words(tmp_path), f"checkpoint.warm_start.source={other.path}", "model.head_hidden=[16]"]
    assert main(["train", *asked, "--dry-run", "--json"]) == 0
    warm = json.loads(capsys.readouterr().out)["warm_start"]
    assert warm["checkpoint"] == str(other.checkpoints / "step_4.a1")
    assert {one["name"].split(".")[1] for one in warm["shape_differs"]} == {"heads"}
    assert not any(name.startswith("optim.") for name in warm["loaded"]) and len(warm["loaded"]) > 20
    assert main(["train", *asked, "--dry-run"]) == 0
    assert "shape differs, keeps its initial values: dense.heads.tasks.0.0.weight is [" in capsys.readouterr().out
    assert main(["resume", str(other.path), "checkpoint.warm_start.source=x", "--dry-run"]) == 2
    assert "applies only at the start of a run" in capsys.readouterr().err


def test_only_what_is_chosen_is_loaded(tmp_path: Path) -> None:
    """Saved on two ranks, taken on one; the values are compared with what was saved."""
    path = make_run(tmp_path).path
    run_world(2, save_trained, path, Layout(2))
    changed = run_world(1, load_tables_only, path, Layout(1))[0]
    assert len(changed) == 3 and all(key.startswith("tables.") for key in changed)
