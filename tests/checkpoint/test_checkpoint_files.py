"""Damaged, planted, void and superseded checkpoints: refused with the reason, never loaded, never pruned too early."""

import json
import math
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from gemctl.checkpoint.diff import compare_values
from gemctl.checkpoint.retention import prune, remove_half_written
from gemctl.cli import main
from gemctl.errors import InputError
from gemctl.run.attempt import Base
from gemctl.run.base import newest_verified
from gemctl.run.checkpoints import resolve
from gemctl.run.directory import RunDir
from gemctl.run.manifest import checkpoints, describe_file, publish, read, verify
from tests.checkpoint import checkpoint_ranks as ranks
from tests.checkpoint.checkpoint_world import add_attempt, make_run
from tests.support.world import run_world


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 2 and 4, written by two ranks."""
    run = make_run(tmp_path_factory.mktemp("runs") / "saved")
    run_world(2, ranks.save_twice, run.path, [2, 4], 1, 3)
    return run.path


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> RunDir:
    return RunDir(ranks.copy(saved, tmp_path / "run"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES: list[Callable[[Path], None]] = [_cut, _flip, Path.unlink]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES, ids=["cut", "flip", "gone"])
def test_a_damaged_file_is_named_and_the_older_checkpoint_chosen(
    run: RunDir, name: str, damage: Callable[[Path], None]
) -> None:
    newest = run.checkpoints / "step_4.a1"
    damage(newest / name)
    choice = newest_verified(run)
    assert choice.checkpoint is not None and choice.checkpoint.step == 2
    assert len(choice.passed_over) == 1 and name in choice.passed_over[0]
    assert choice.left_alone == ["step_4.a1"]


def test_a_checkpoint_under_another_ones_name_is_what_its_manifest_says(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newest = run.checkpoints / "step_2.a1", run.checkpoints / "step_4.a1"
    older.rename(run.checkpoints / "aside")
    newest.rename(older)
    (run.checkpoints / "aside").rename(newest)
    choice = newest_verified(run)
    assert choice.passed_over == []
    assert choice.checkpoint is not None and (choice.checkpoint.path, choice.checkpoint.step) == (older, 4)
    (run.path / "run.json").write_text("{}")
    assert resolve(f"{run.path}:2", "runs") == newest
    assert main(["checkpoint", "list", str(run.path)]) == 0
    assert "step_2.a1 (contains step_4.a1)" in capsys.readouterr().out


def test_no_flipped_bit_goes_unseen(run: RunDir) -> None:
    folder, draw = run.checkpoints / "step_4.a1", random.Random(1)
    for path in sorted(folder.iterdir()):
        original = path.read_bytes()
        # The manifest's first field is its format: an older one (0) is read all the same.
        first = original.index(b"sha256") if path.name == "manifest.json" else 0
        for place in draw.sample(range(first, len(original)), 40):
            data = bytearray(original)
            data[place] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            assert verify(folder) != [], (path.name, place)
        path.write_bytes(original)
    assert verify(folder) == []


def test_load_refuses_what_is_damaged_or_planted(run: RunDir, tmp_path: Path) -> None:
    mark = tmp_path / "planted"
    folders = {name: ranks.copy(run.checkpoints / "step_4.a1", run.checkpoints / name) for name in "abcdef"}
    _flip(folders["a"] / "__1_0.distcp")
    (folders["b"] / "manifest.json").unlink()
    ranks.plant(folders["c"], mark)
    ranks.plant(folders["d"], mark)
    _republish(folders["d"])
    _edit_metadata(folders["e"], "entry")
    _edit_metadata(folders["f"], "file")
    for problems in run_world(2, ranks.load_errors, [*folders.values(), run.checkpoints / "step_4.a1"]):
        assert [len(lines) for lines in problems] == [1] * 6 + [0]
        first = [lines[0] for lines in problems[:-1]]
        assert "__1_0.distcp: damaged" in first[0]
        assert "manifest.json is missing" in first[1]
        assert ".metadata" in first[2]
        assert "refused: it wants to run posix.mkdir" in first[3]
        assert "refused: it wants to run torch.distributed.checkpoint.metadata.BytesStorageMetadata" in first[4]
        assert "points to ../step_2.a1/__0_0.distcp" in first[5]
    assert not mark.exists()


def test_diff_and_export_refuse_what_is_planted(run: RunDir, tmp_path: Path) -> None:
    """By a message, though DCP's own exception is none that programs wait for."""
    mark, folder = tmp_path / "planted", run.checkpoints / "step_4.a1"
    ranks.plant(folder, mark)
    _republish(folder)
    for said in run_world(1, ranks.read_errors, folder, tmp_path / "export")[0]:
        assert said == f"InputError: {folder}/.metadata: refused: it wants to run posix.mkdir"
    assert not mark.exists() and not (tmp_path / "export").exists()


def _republish(folder: Path) -> None:
    """As one would who wants planted files to be taken for good ones."""
    manifest = read(folder)
    (folder / "manifest.json").unlink()
    publish(folder, replace(manifest, files={name: describe_file(folder / name) for name in manifest.files}))


def _edit_metadata(folder: Path, what: str) -> None:
    """Makes an entry one that DCP unpickles freely, or lets it point into another checkpoint."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if what == "entry":
        metadata.state_dict_metadata["a"] = BytesStorageMetadata()
    else:
        next(iter(metadata.storage_data.values())).relative_path = "../step_2.a1/__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    _republish(folder)


def test_every_wrong_tensor_is_listed_on_every_rank(run: RunDir) -> None:
    for problems in run_world(2, ranks.load_wrong_state, run.checkpoints / "step_4.a1"):
        said = "\n".join(problems)
        assert len(problems) == 4
        assert "mine is not in the checkpoint" in said
        assert "step is in the checkpoint, but the model has no such tensor" in said
        assert "a is float32 [5000], the model needs float32 [7]" in said
        assert "b is bfloat16 [5000], the model needs float16 [5000]" in said


def test_what_an_old_attempt_publishes_after_a_takeover_is_void(run: RunDir) -> None:
    add_attempt(run, 2, Base("step_2.a1", 2))
    choice = newest_verified(run)
    assert choice.checkpoint is not None and choice.checkpoint.path.name == "step_2.a1"
    assert "step_4.a1: void: attempt 2 started from step 2" in choice.passed_over[0]
    (run.path / "run.json").write_text("{}")
    with pytest.raises(InputError, match=r"the run has steps 2$"):
        resolve(f"{run.path}:4", "runs")


def test_only_the_owner_prunes_and_only_what_is_older_or_void(run: RunDir) -> None:
    first, second = run.attempt(1), add_attempt(run, 2, Base("step_2.a1", 2))
    stray = run.checkpoints / "step_5.a1"
    stray.mkdir()
    own = run.checkpoints / "step_6.a2"
    own.mkdir()
    assert remove_half_written(run, second) == [], "attempt 1 has not said that it ended"
    first.write_end("failed")
    assert prune(run, first, 1) == [] and remove_half_written(run, first) == []
    assert remove_half_written(run, second) == [stray]
    assert prune(run, second, 1) == [], "it has completed nothing yet"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_2.a1", "step_4.a1", "step_6.a2"]
    data = own / "__0_0.distcp"
    data.write_bytes(b"data")
    publish(
        own, replace(read(run.checkpoints / "step_2.a1"), step=6, attempt=2, files={data.name: describe_file(data)})
    )
    assert prune(run, second, 2) == [run.checkpoints / "step_4.a1"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_2.a1", "step_6.a2"]


def test_pruning_keeps_the_newest(run: RunDir) -> None:
    assert prune(run, run.attempt(1), 2) == []
    assert [path.name for path in prune(run, run.attempt(1), 1)] == ["step_2.a1"]
    assert [checkpoint.step for checkpoint in checkpoints(run)] == [4]


def test_a_manifest_appears_once_and_a_newer_format_is_refused(run: RunDir) -> None:
    folder = run.checkpoints / "step_4.a1"
    with pytest.raises(FileExistsError):
        publish(folder, read(folder))
    assert sorted(path.name for path in folder.iterdir())[:2] == [".metadata", "__0_0.distcp"]
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(InputError, match="format 99 is newer"):
        read(folder)


def test_a_manifest_that_the_disk_does_not_take_is_named(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run.checkpoints / "step_4.a1"
    manifest = read(folder)
    (folder / "manifest.json").unlink()
    full, real = os.open("/dev/full", os.O_WRONLY), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(full, data))
    with pytest.raises(OSError, match="No space left on device") as error:
        publish(folder, manifest)
    assert error.value.filename == str(folder / "manifest.json")
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def test_folders_that_were_deleted_or_are_none_are_told(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "run.json").write_text("{}")
    (run.checkpoints / "step_4.a1/manifest.json").unlink()
    (run.checkpoints / "step_4.a1/manifest.json").mkdir()
    assert verify(run.checkpoints / "step_4.a1") == [f"{run.checkpoints}/step_4.a1/manifest.json: Is a directory"]
    assert newest_verified(run).checkpoint == checkpoints(run)[1]
    run.checkpoints.rename(run.path / "moved")
    saves = f"{run.attempt(1).saves} says that it was saved"
    assert main(["checkpoint", "list", str(run.path)]) == 0
    assert f"step_4.a1  does not exist, though {saves}" in capsys.readouterr().out
    run.checkpoints.touch()
    assert main(["checkpoint", "list", str(run.path)]) == 2
    assert capsys.readouterr().err == f"error: {run.checkpoints}: Not a directory\n"


def test_diff_finds_a_last_bit_a_missing_key_and_a_changed_shape(tmp_path: Path) -> None:
    run = make_run(tmp_path, attempts=1)
    run_world(1, ranks.save_variants, run.path)
    base, same, nudged, fewer, longer = (run.checkpoints / f"step_1.a{attempt}" for attempt in range(1, 6))
    pairs = [(base, same), (base, nudged), (base, fewer), (fewer, base), (base, longer)]
    found = [comparison.differences for comparison in run_world(1, ranks.compare_all, pairs)[0]]
    assert found[0] == []
    (bit,) = found[1]
    assert (bit.key, bit.what, bit.elements) == ("a", "value", 1)
    assert bit.max_abs == 2.0**-19 and bit.max_rel == 2.0**-19 / 96  # 17 has an ulp of 2⁻¹⁹
    assert [(item.key, item.what) for item in found[2]] == [("step", "missing in B")]
    assert [(item.key, item.what) for item in found[3]] == [("step", "missing in A")]
    assert [(item.key, item.what, item.a, item.b) for item in found[4]] == [("b", "shape", "[5000]", "[3]")]


def test_diff_compares_bits_and_counts_what_is_not_a_number() -> None:
    zeros, nans = torch.tensor([0.0, 1.0]), torch.tensor([math.nan, 1.0])
    assert compare_values("x", nans, nans.clone()) is None
    signs = compare_values("x", zeros, torch.tensor([-0.0, 1.0]))
    assert signs is not None and (signs.elements, signs.max_abs, signs.max_rel) == (1, 0.0, 0.0)
    one = compare_values("x", zeros, nans)
    assert one is not None and one.elements == 1 and one.max_abs is not None and math.isnan(one.max_abs)
    infinite = torch.tensor([math.inf, 1.0])
    far = compare_values("x", infinite, torch.tensor([math.inf, 2.0]))
    assert far is not None and (far.elements, far.max_abs) == (1, 1.0)


def test_diff_of_two_steps_names_the_position(run: RunDir) -> None:
    pair = (run.checkpoints / "step_2.a1", run.checkpoints / "step_4.a1")
    (comparison,) = run_world(1, ranks.compare_all, [pair])[0]
    keys = [item.key for item in comparison.differences]
    assert keys == ["position.rows", "position.step", "a", "b", "step"] and comparison.exit_code == 1


def test_list_and_verify_from_the_command_line(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "run.json").write_text("{}")
    assert main(["checkpoint", "list", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    listed = [(item["step"], item["world"], item["tensors"], item["flaw"]) for item in found["checkpoints"]]
    assert listed == [(4, 2, 4, None), (2, 2, 4, None)] and found["others"] == []
    (run.checkpoints / "step_9.a1").mkdir()
    assert main(["checkpoint", "list", str(run.path)]) == 0
    assert "not usable:\n  step_9.a1  unfinished: it has no manifest.json" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run.path)]) == 0
    _cut(run.checkpoints / "step_2.a1/.metadata")
    assert main(["checkpoint", "list", str(run.path)]) == 0
    cut = capsys.readouterr().out
    assert "file sizes match; gemctl checkpoint verify" in cut and "step_4.a1" in cut
    assert f"step_2.a1  {run.checkpoints}/step_2.a1/.metadata: " in cut.partition("not usable:")[2]
    assert main(["checkpoint", "verify", str(run.path)]) == 1
    assert "step_2.a1/.metadata" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run.checkpoints / "step_4.a1")]) == 0
    assert main(["checkpoint", "verify", f"{run.path}:4"]) == 0
    assert main(["checkpoint", "diff", str(run.path), f"{run.path}:3"]) == 2
    assert "the run has steps 4, 2" in capsys.readouterr().err


@pytest.mark.slow
def test_diff_from_the_command_line(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "run.json").write_text("{}")
    assert main(["checkpoint", "diff", str(run.path), f"{run.path}:4"]) == 0
    assert "no difference: all 4 tensors are bit-identical" in capsys.readouterr().out
    assert main(["checkpoint", "diff", f"{run.path}:2", str(run.path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["differences"]) == 5
    _flip(run.checkpoints / "step_2.a1/__0_0.distcp")
    assert main(["checkpoint", "diff", f"{run.path}:2", str(run.path)]) == 2
    assert "__0_0.distcp: damaged" in capsys.readouterr().err
