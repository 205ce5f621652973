"""Faults of gemctl that the chaos suite has found, with the right behaviour."""

from pathlib import Path

import pytest

from gemctl.errors import InputError
from gemctl.launch.supervise import supervise
from gemctl.run.attempt import claim
from gemctl.run.directory import RunDir
from gemctl.run.submission import submit
from tests.chaos.layouts import CONFIG


def test_of_two_resumes_at_once_one_is_refused(tmp_path: Path) -> None:
    """Both resumes saw that attempt 1 was dead; the slower one must not take over the faster one's live attempt 2."""
    run = RunDir.create(str(tmp_path), "two", ["test"])
    dead = claim(run.path, 1, nodes=1, ranks_per_node=1, heartbeat=0.1)
    claim(run.path, 2, nodes=1, ranks_per_node=1, heartbeat=0.1)
    data = {"spec": "spec.yaml", "train": "train.parquet"}
    text = str({**CONFIG, "data": data, "optim": {}})
    submission = submit(run, text, "{}", {"kind": "local", "app": {}, "base": None})
    with pytest.raises(InputError, match="attempt 2 was started by another process just now"):
        supervise(run, submission, dead)
    assert [attempt.number for attempt in run.attempts()] == [1, 2]
