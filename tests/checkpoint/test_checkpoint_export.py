"""Exported safetensors files, read by a reader of the format's definition; differences with names of any length."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemctl.cli import main
from gemctl.render.checkpoint import comparison
from gemctl.run.checkpoints import Comparison, Difference
from gemctl.run.manifest import read
from tests.checkpoint import checkpoint_ranks as ranks
from tests.checkpoint.checkpoint_world import make_run
from tests.support.world import run_world

WIDTH = {"F32": 4, "BF16": 2}


def read_file(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name → dtype, shape and bytes of every tensor. Headers and offsets are checked on the way."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__")["format"] == "pt" and length % 8 == 0
    body, found, ends = data[8 + length :], {}, []
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        assert end - start == WIDTH[entry["dtype"]] * int(np.prod(entry["shape"], dtype=int))
        found[name] = (entry["dtype"], entry["shape"], body[start:end])
        ends.append((start, end))
    ends.sort()
    assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])] and ends[-1][1] == len(body)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run saved by two ranks, and its full values."""
    path = make_run(tmp_path_factory.mktemp("runs") / "saved").path
    (path / "run.json").write_text("{}")
    return path, run_world(2, ranks.save_for_export, path)[0]


def test_files_hold_every_weight_whole(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """FSDP2's shards, row-wise and table-wise tables, bfloat16 and a tensor without elements; split by size."""
    path, full = saved
    folder = path / "checkpoints/step_2.a1"
    run_world(1, ranks.export_to, folder, tmp_path / "all", 10**9, True)
    run_world(1, ranks.export_to, folder, tmp_path / "split", 400, False)
    assert [file.name for file in (tmp_path / "all").iterdir()] == ["model.safetensors"]
    whole = read_file(tmp_path / "all/model.safetensors")
    assert whole.keys() == full.keys() == read(folder).objects.keys()
    for name, (dtype, shape, data) in whole.items():
        assert (dtype, tuple(shape), data) == full[name], name

    index = json.loads((tmp_path / "split/model.safetensors.index.json").read_text())
    names = sorted({*index["weight_map"].values()})
    assert names == sorted(file.name for file in (tmp_path / "split").glob("*.safetensors")) and len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    parts = [read_file(tmp_path / "split" / name) for name in names]
    assert {key: value for part in parts for key, value in part.items()} == {
        key: value for key, value in whole.items() if not key.startswith("optim.")
    }
    assert all(index["weight_map"][key] == name for name, part in zip(names, parts, strict=True) for key in part)
    sizes = [[len(data) for _, _, data in part.values()] for part in parts]
    assert all(sum(size) <= 400 or len(size) == 1 for size in sizes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))


def test_an_export_that_fails_leaves_nothing(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    said = run_world(1, ranks.export_with_a_lost_value, saved[0] / "checkpoints/step_2.a1", tmp_path / "out")[0]
    assert said == "scale: the exported values are not those that were saved"
    assert list(tmp_path.iterdir()) == []


def test_where_an_export_goes(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["checkpoint", "export", str(saved[0])]
    assert main([*asked, str(tmp_path), "--file-gb", "0"]) == 2
    said = capsys.readouterr().err
    assert "exists already" in said and "--file-gb 0.0: must be above 0" in said
    assert main(["checkpoint", "export", f"{saved[0]}:3", str(tmp_path / "x")]) == 2
    assert "the run has steps 2" in capsys.readouterr().err
    assert main([*asked, str(saved[0] / "checkpoints/step_9.a1")]) == 2
    assert "whose folders are managed by gemctl" in capsys.readouterr().err


def test_an_export_to_a_folder_that_is_closed_is_refused_at_once(
    saved: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert main(["checkpoint", "export", str(saved[0]), str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'x'}: cannot be written: Permission denied\n"


@pytest.mark.slow
def test_export_from_the_command_line(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "export", f"{saved[0]}:2", str(tmp_path / "a/b"), "--optimizer", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["files"] == ["model.safetensors"] and done["tensors"] == len(saved[1])
    assert read_file(tmp_path / "a/b/model.safetensors").keys() == saved[1].keys()


def test_differences_show_names_of_any_length() -> None:
    name = "optim.dense.layers.11.interaction." + "very_long_name." * 12 + "exp_avg_sq"
    shown = comparison(
        Comparison(
            "a",
            "b",
            1,
            2,
            2,
            2,
            [Difference(name, "value", elements=7, max_abs=0.5, max_rel=0.25), Difference("x", "shape", "[1]", "[2]")],
        )
    )
    assert any(line.startswith(name + "  value") for line in shown.splitlines())
