"""Six steps are three, a resume, and three more: the whole tool on real processes, compared bit for bit."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

# Four ranks, uneven rows, three accumulated micro-batches; a batch crosses from one epoch into the next.
SMALL = [
    "data.synthetic.users=50",
    "data.synthetic.items=200",
    "data.synthetic.rows=300",
    "data.synthetic.eval_rows=50",
    "train.global_batch=70",
    "train.accumulate=3",
    "train.log_every=2",
    "model.dim=8",
]


def gemctl(folder: Path, *arguments: str, code: int = 0, inject: str = "") -> str:
    """Runs the command line in `folder`; returns its stdout."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gemctl", *arguments],
        cwd=folder,
        env={**os.environ, "GEMCTL_INJECT": inject},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_resumed_run_equals_undisturbed_run(tmp_path: Path) -> None:
    gemctl(tmp_path, "train", *SMALL, "run.name=parts", "train.steps=3", "--json")
    run = next((tmp_path / "runs" / "parts").iterdir())
    with ThreadPoolExecutor() as pool:  # what does not depend on each other, to be done sooner
        whole = pool.submit(gemctl, tmp_path, "train", *SMALL, "run.name=whole", "train.steps=6", "--json")
        gemctl(tmp_path, "resume", run.name, "train.steps=6")
        whole.result()
        other = next((tmp_path / "runs" / "whole").iterdir())
        same = pool.submit(gemctl, tmp_path, "checkpoint", "diff", other.name, run.name, "--json")
        # and the comparison can tell: step 3 is not step 6
        other_step = pool.submit(gemctl, tmp_path, "checkpoint", "diff", f"{run.name}:3", run.name, code=1)
        gemctl(tmp_path, "checkpoint", "verify", run.name)
        other_step.result()
        assert json.loads(same.result())["objects"] > 50


@pytest.mark.slow
def test_killed_in_a_save_and_resumed_on_three_ranks(tmp_path: Path) -> None:
    """keep=1, four ranks, rank 1 killed as it enters the save of step 6; as the undisturbed run in the end.

    The save of step 4 may have been under way: then the one of step 2 is there.
    """
    gemctl(tmp_path, "train", *SMALL, "run.name=whole", "train.steps=6", "--json")
    asked = ["run.name=parts", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=1", "recover.budgets.crash=0"]
    gemctl(tmp_path, "train", *SMALL, *asked, "--json", code=1, inject="kill:rank=1,step=6,stage=save")
    run = next((tmp_path / "runs" / "parts").iterdir())
    three = [
        "launcher.ranks_per_node=3",
        "topology.dp_replicate=1",
        "topology.dp_shard=3",
        "topology.tables={user: table_wise}",
    ]
    ahead = json.loads(gemctl(tmp_path, "resume", run.name, *three, "--dry-run", "--json"))
    step = ahead["step"]
    assert step in {2, 4} and (ahead["ranks_before"], ahead["ranks"]) == (4, 3)
    assert ahead["lost"] == [f"steps {step + 1} to 6 are repeated: they are in no valid checkpoint"]
    assert len(ahead["passed_over"]) == len(list((run / "checkpoints").iterdir())) - 1
    report = json.loads(gemctl(tmp_path, "resume", run.name, *three, "--json"))
    assert report["outcome"] == "finished" and report["step"] == 6
    assert any(note.startswith(f"attempt 2 loaded step_{step}.a1: dense weights") for note in report["notes"])
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_6.a2"]
    other = next((tmp_path / "runs" / "whole").iterdir())
    compared = json.loads(gemctl(tmp_path, "checkpoint", "diff", other.name, run.name, "--json", code=1))
    weights = [one for one in compared["differences"] if not one["key"].startswith("optim.")]
    assert all(one["what"] == "value" and one["max_rel"] < 1e-3 for one in weights)  # sums in another order


@pytest.mark.slow
def test_a_new_run_begins_with_the_tables_of_another(tmp_path: Path) -> None:
    gemctl(tmp_path, "train", *SMALL, "run.name=first", "train.steps=2", "--json")
    first = next((tmp_path / "runs" / "first").iterdir())
    warm = [f"checkpoint.warm_start.source={first.name}", "checkpoint.warm_start.include=[tables.*]"]
    asked = [
        "run.name=second",
        "train.steps=1",
        "optim.tables.lr=1e-30",
        "launcher.ranks_per_node=2",
        "topology.dp_replicate=1",
    ]
    gemctl(tmp_path, "train", *SMALL, *asked, *warm, "--json")
    second = next((tmp_path / "runs" / "second").iterdir())
    loaded = json.loads((second / "attempts/1/loaded.json").read_text())
    assert set(loaded["tensors"]) == {"tables"} and loaded["checkpoint"] == str(first / "checkpoints/step_2.a1")
    compared = json.loads(gemctl(tmp_path, "checkpoint", "diff", first.name, second.name, "--json", code=1))
    differ = {one["key"] for one in compared["differences"]}
    assert not any(key.startswith("tables.") for key in differ)  # trained with a rate of nothing, so as they came
    assert any(key.startswith("dense.") for key in differ)
