"""One cluster for all tests of this suite; every test gets it with all nodes up and no job."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.desk import STEPS, Desk, Saved


@pytest.fixture(scope="session")
def shared_desk() -> Iterator[Desk]:
    if (why := missing()) is not None:
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="gemctl-slurm-") as root:  # short: sockets lie there
        folder = Path(root) / "desk"
        folder.mkdir()
        with Cluster(Path(root) / "cluster", accounting=True) as cluster:
            yield Desk(cluster, folder)


@pytest.fixture
def desk(shared_desk: Desk) -> Desk:
    shared_desk.cluster.heal()
    return shared_desk


@pytest.fixture(scope="session")
def undisturbed(shared_desk: Desk) -> Saved:
    """What a run of STEPS steps on two hosts of two ranks has in the end."""
    shared_desk.cluster.heal()
    run = shared_desk.train(f"train.steps={STEPS}")
    assert shared_desk.ended(run, 1)["outcome"] == "finished"
    return run.saved()
