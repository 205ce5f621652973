"""A folder with a run and its data in it is renamed: every command finds the run where it is now."""

import json
import shutil
from pathlib import Path

import pytest

from gemctl.cli import main
from tests.launch.test_inputs import PLACES, TEXT, write_rows
from tests.launch.test_resume import gemctl

ASKED = [
    "experiment=parquet",
    "model=hstu_nano",
    "model.dim=8",
    *(f"data.{key}={name}" for key, name in PLACES.items()),
    "train.global_batch=40",
    "launcher.ranks_per_node=1",
    "topology.dp_replicate=1",
]


@pytest.mark.slow
@pytest.mark.timeout(300)  # nine commands, one after another
def test_every_command_works_on_a_moved_run(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "train").mkdir(parents=True)
    (old / "spec.yaml").write_text(TEXT)
    for seed, name in enumerate(("train/b", "train/d", "eval")):
        write_rows(old / f"{name}.parquet", seed)
    gemctl(old, "train", *ASKED, "run.name=whole", "train.steps=4", "--json")
    gemctl(old, "train", *ASKED, "run.name=parts", "train.steps=2", "--json")
    old.rename(new)
    (new / "spec.yaml").unlink()  # the run has a copy
    (run,) = (new / "runs/parts").iterdir()
    (whole,) = (new / "runs/whole").iterdir()
    report = json.loads(gemctl(tmp_path, "resume", str(run), "train.steps=4", "--json"))
    assert (report["outcome"], report["step"]) == ("finished", 4)
    gemctl(tmp_path, "checkpoint", "diff", str(whole), str(run))  # bit for bit, so the same rows in the same order
    scored = json.loads(gemctl(tmp_path, "eval", str(run), "--json"))
    assert scored["data"] == str(new / "eval.parquet") and scored["baseline"] is not None and scored["notes"] == []
    again = run.with_name("copy")
    shutil.copytree(run, again)
    (again / "attempts/2/end.json").unlink()  # as if its supervisor had died
    gemctl(tmp_path, "supervise", str(again))
    gemctl(tmp_path, "checkpoint", "export", f"{again}:2", str(tmp_path / "exported"))
    for command in ("status", "logs", "report", "checkpoint list", "checkpoint verify"):
        assert main([*command.split(), str(again)]) == 0
    own = [word.replace("=", f"={new}/") if word.startswith("data.") else word for word in ASKED]
    spec, warm = f"data.spec={run}/attempts/1/spec.yaml", f"checkpoint.warm_start.source={again}"
    words = [word for word in own if not word.startswith("data.spec")]
    assert main(["train", *words, spec, warm, f"run.root={new}/runs", "--dry-run"]) == 0
