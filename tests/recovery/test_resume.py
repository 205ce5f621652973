"""Six steps are three, a resume, and three more: the whole tool on real processes, compared bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

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


def gemctl(folder: Path, *arguments: str, code: int = 0) -> str:
    """Runs the command line in `folder`; returns its stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "gemctl", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_resumed_run_equals_undisturbed_run(tmp_path: Path) -> None:
    gemctl(tmp_path, "train", *SMALL, "run.name=whole", "train.steps=6", "--json")
    gemctl(tmp_path, "train", *SMALL, "run.name=parts", "train.steps=3", "--json")
    run = next((tmp_path / "runs" / "parts").iterdir())
    gemctl(tmp_path, "resume", run.name, "train.steps=6")
    other = next((tmp_path / "runs" / "whole").iterdir())
    compared = json.loads(gemctl(tmp_path, "checkpoint", "diff", other.name, run.name, "--json"))
    assert compared["objects"] > 50
    # and the comparison can tell: step 3 is not step 6
    gemctl(tmp_path, "checkpoint", "diff", f"{run.name}:3", run.name, code=1)
    gemctl(tmp_path, "checkpoint", "verify", run.name)
