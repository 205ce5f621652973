"""From the key press to the end of the first step: at most 0.75 of a bare torchrun script's time, measured in turns."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemctl.run.files import read_log

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = ["data.synthetic.rows=40000", "data.synthetic.eval_rows=1000", "train.steps=2"]
TURNS = 3


def _run(folder: Path, *command: str) -> tuple[float, str]:
    """When the command was started, and its stdout."""
    start = time.time()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return start, done.stdout


def _gemctl(folder: Path) -> float:
    start, _ = _run(folder, sys.executable, "-P", "-m", "gemctl", "train", *JOB, "--json")
    run = max((folder / "runs" / "synthetic").iterdir(), key=lambda path: path.stat().st_mtime)
    lines = read_log(run / "attempts" / "1" / "ranks" / "0.jsonl")
    return float(next(line["time"] for line in lines if line["stage"] == "data" and line["step"] == 1)) - start


def _bare(folder: Path) -> float:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    start, output = _run(folder, *torchrun, "-m", "tests.ranks.bare_start", "config.yaml")
    return float(output.rsplit("first step ended ", 1)[1].split()[0]) - start


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_first_step_comes_sooner_than_under_torchrun(tmp_path: Path) -> None:
    _run(
        tmp_path,
        sys.executable,
        "-P",
        "-m",
        "gemctl",
        "data",
        "synth",
        "data/synthetic",
        "--rows",
        "40000",
        "--eval-rows",
        "1000",
    )
    _run(tmp_path, sys.executable, "-P", "-m", "gemctl", "config", "export", *JOB, "-o", "config.yaml")
    turns = [(_gemctl(tmp_path), _bare(tmp_path)) for _ in range(TURNS)]
    ours, bare = (statistics.median(times) for times in zip(*turns, strict=True))
    print(f"first step after {ours:.2f} s, under torchrun {bare:.2f} s: ratio {ours / bare:.2f}")  # noqa: T201
    assert ours <= 0.75 * bare
