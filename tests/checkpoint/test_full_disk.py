"""Real file systems that are full at each stage of a run: the error names the file, with the right exit code."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
JOB = [
    "data.synthetic.users=50", "data.synthetic.items=200", "data.synthetic.rows=3000", "data.synthetic.eval_rows=50",
    "train.global_batch=16", "train.steps=2", "model.dim=8", "launcher.ranks_per_node=1", "topology.dp_replicate=1",
    "topology.dp_shard=1", "recover.budgets.crash=0", "run.root=disk",
]  # fmt: skip
# The end of the error by tmpfs options, from the first file of a run to the last.
DISKS = {
    "size=4k": "No space left on device",
    "size=60k": "No space left on device",
    "size=120k": "No space left on device",
    "size=160k": "No space left on device",
    "size=260k": "No space left on device",
    "nr_inodes=5": "No space left on device",
    "nr_inodes=36": "No space left on device",
    "ro": "Read-only file system",
}


def _train(folder: Path, options: str) -> "subprocess.CompletedProcess[str]":
    """`gemctl train` with its run.root on a separate file system, which disappears with the process."""
    (folder / "disk").mkdir(parents=True)
    script = 'mount -t tmpfs -o "$0" none disk && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, options, sys.executable, "-m", "gemctl", "train", *JOB],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip


def test_full_disk_is_told_with_its_file(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        pytest.skip("no mount namespaces: needs root")
    folders = [tmp_path / str(number) for number in range(len(DISKS))]
    with ThreadPoolExecutor(2) as pool:
        ended = dict(zip(DISKS, pool.map(_train, folders, DISKS), strict=True))
    for options, done in ended.items():
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode in {1, 2}, (options, done.stderr)
        assert DISKS[options] in line and "disk" in line, (options, done.stderr)
        assert "Traceback" not in done.stderr.split("log: ")[0], (options, done.stderr)
