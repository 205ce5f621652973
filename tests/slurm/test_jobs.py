"""Jobs from their submission to their report, and where on the network they lie."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from gemctl.mesh.groups import Mesh, groups
from tests.slurm.cluster import Cluster, missing
from tests.slurm.desk import Command, Desk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def submit_to_report(desk: Desk) -> None:
    """Two hosts of two ranks, in the foreground; then all that a user asks of a run."""
    done = desk.start("train", *desk.words("train.steps=12", "data.eval=log/eval.parquet")).done()
    assert done.code == 0, done.told
    assert "step 12/12" in done.told
    run = desk.newest()
    mesh = Mesh.from_json(json.loads(run.attempt(1).mesh.read_text()))
    assert [len(ranks) for ranks in mesh.ranks_by_host().values()] == [2, 2]
    assert desk.ended(run, 1)["outcome"] == "finished"
    assert run.saved()[0] == 12
    desk.job_ended(run.job(), "COMPLETED")
    report = desk.gemctl("report", run.id, "--json").json()
    assert (report["outcome"], report["step"], report["attempts"][0]["ranks"]) == ("finished", 12, 4)
    assert run.id in desk.gemctl("list").out
    status = desk.gemctl("status", run.id, "--json").json()
    assert status["state"] == "finished"
    assert "finished at step 12" in desk.gemctl("logs", run.id).out


def test_two_hosts_of_two_ranks_from_submit_to_report(desk: Desk) -> None:
    submit_to_report(desk)


def test_the_same_without_accounting() -> None:
    if (why := missing()) is not None:
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="gemctl-slurm-") as root:
        folder = Path(root) / "desk"
        folder.mkdir()
        with Cluster(Path(root) / "cluster", accounting=False) as cluster:
            submit_to_report(Desk(cluster, folder))
            assert "disabled" in cluster.run("sacct").stderr


def test_accounting_has_the_job(desk: Desk) -> None:
    lines = desk.cluster.must("sacct", "-n", "-X", "-P", "-o", "State,NNodes").splitlines()
    assert "COMPLETED|2" in lines


def test_mesh_lies_inside_one_leaf_where_a_node_is_busy(desk: Desk) -> None:
    """n2 is busy, so two nodes are n1 and n3, of leaf 1."""
    desk.cluster.must("sbatch", "--nodelist=n2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 100")
    run = desk.train("train.steps=2")
    assert desk.ended(run, 1)["outcome"] == "finished"
    assert run.hosts(1) == ["n1", "n3"]


def test_ranks_of_four_hosts_follow_the_network_not_the_names(desk: Desk) -> None:
    run = desk.train(
        "train.steps=2", "launcher.nodes=4", "launcher.ranks_per_node=1", "topology.dp_replicate=2",
        "topology.mp_replicate=2",
    )  # fmt: skip
    assert desk.ended(run, 1)["outcome"] == "finished"
    mesh = Mesh.from_json(json.loads(run.attempt(1).mesh.read_text()))
    names = [host.name for host in mesh.hosts]
    assert names == ["n1", "n3", "n2", "n4"]
    shards = [{names[rank] for rank in ranks} for ranks in groups(mesh.topology)["dp_shard"].tolist()]
    assert shards == [{"n1", "n3"}, {"n2", "n4"}]


def test_sweep_of_four_runs_as_one_array(desk: Desk) -> None:
    done = desk.gemctl(
        "train", "-m", *desk.words("launcher.nodes=1", "launcher.ranks_per_node=1", "topology.dp_replicate=1"),
        "train.steps=2,3", "run.seed=1,2", "--json",
    )  # fmt: skip
    assert done.code == 0, done.told
    swept = done.json()["runs"]
    assert [one["settings"] for one in swept] == [
        [f"train.steps={steps}", f"run.seed={seed}"] for steps in (2, 3) for seed in (1, 2)
    ]
    runs = {run.id: run for run in desk.runs()}
    for one in swept:
        run = runs[one["run"]]
        assert desk.ended(run, 1)["outcome"] == "finished"
        assert f"train.steps={run.saved()[0]}" == one["settings"][0]
        desk.job_ended(one["job"], "COMPLETED")
    assert len({one["job"].split("_")[0] for one in swept}) == 1


def test_torchx_runs_a_component_of_two_replicas_as_one_job(desk: Desk) -> None:
    torchx = str(Path(sys.executable).with_name("torchx"))
    component = ["utils.sh", "--num_replicas", "2", "echo", "replica", "${replica_id}"]
    run = [torchx, "run", "-s", "gemctl_slurm", "-cfg", "partition=main,exclusive=true", "--wait", "--log", *component]
    done = Command(desk.cluster.start(*run, folder=desk.folder)).done()
    assert done.code == 0, done.told
    assert "Job finished: SUCCEEDED" in done.told
    job = done.out.split()[0].removeprefix("gemctl_slurm://torchx/")
    assert "NumNodes=2 " in desk.cluster.must("scontrol", "-o", "show", "job", job)
    lines = [(desk.folder / f"slurm-{job}-{replica}.log").read_text() for replica in range(2)]
    assert lines == ["replica 0\n", "replica 1\n"]
    assert "sh/1 replica 1" in done.told + done.out
