"""Requests as values: what is submitted for a configuration, whole, and what is chosen from what nodes answer."""

import json
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torchx.components.dist import ddp
from torchx.runner import Runner
from torchx.specs import AppDef, Resource, Role

from gemctl.cli import main
from gemctl.cluster.checks import Check
from gemctl.cluster.node import NodeReport, check_node, read_report
from gemctl.config.compose import compose, to_yaml
from gemctl.config.overrides import expand
from gemctl.config.schema import Config
from gemctl.errors import InputError, TooFewHosts
from gemctl.launchers import slurm, slurm_agents, slurm_client
from gemctl.launchers.api import from_json, request, to_json
from gemctl.launchers.slurm_agents import PORTS, check_enough, check_nodes, choose, port, task_ends
from gemctl.launchers.slurm_job import shell_word, step
from gemctl.launchers.slurm_scheduler import create_scheduler
from gemctl.plan.fit import cluster_memory

RUN = Path("/scratch/runs/gem/7")
EVERYTHING = [
    "launcher=slurm",
    "launcher.nodes=3",
    "launcher.ranks_per_node=8",
    "cluster=cuda",
    "cluster.gpu=H100",
    "launcher.slurm.partition=gpu",
    "launcher.slurm.account=ads",
    "launcher.slurm.qos=high",
    "launcher.slurm.constraint=rack1|rack2",
    "launcher.slurm.reservation=week",
    "launcher.slurm.time_limit=1-12:00:00",
    "launcher.slurm.save_before_limit=300",
    "launcher.slurm.dependency='afterok:41'",
    "launcher.slurm.cpus_per_rank=6",
    "launcher.slurm.memory_gb=1500",
    "launcher.slurm.cpu_bind=cores",
    "launcher.slurm.mem_bind=local",
    "launcher.slurm.exclusive=true",
    "launcher.slurm.exclude=[bad1,bad2]",
    "launcher.slurm.spare_nodes=1",
    "launcher.slurm.switches='1@30:00'",
    "launcher.slurm.segment=2",
    "launcher.slurm.interface=eth0",
    "launcher.slurm.ib_hca='mlx5_0,mlx5_1'",
    "launcher.slurm.env={NCCL_DEBUG: WARN, NOTE: 'two words'}",
    "launcher.slurm.setup=['module load cuda/13']",
    "launcher.slurm.container_image=/images/gemctl.sqsh",
    "launcher.slurm.container_mounts=['/scratch:/scratch','/data:/data:ro']",
    "launcher.slurm.container_workdir=/scratch",
]
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=7
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --output=/scratch/runs/gem/7/submissions/2/supervisor.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --partition=gpu
#SBATCH --account=ads
#SBATCH --qos=high
#SBATCH --constraint=rack1|rack2
#SBATCH --reservation=week
#SBATCH --time=1-12:00:00
#SBATCH --dependency=afterok:41
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=48
#SBATCH --mem=1536000M
#SBATCH --exclude=bad1,bad2
#SBATCH --switches=1@30:00
#SBATCH --segment=2
#SBATCH --requeue
#SBATCH --exclusive
#SBATCH --no-kill

set -euo pipefail
trap '' USR1
export OMP_NUM_THREADS=6
export PYTORCH_NVML_BASED_CUDA_CHECK=1
export NCCL_SOCKET_IFNAME=eth0
export GLOO_SOCKET_IFNAME=eth0
export NCCL_IB_HCA=mlx5_0,mlx5_1
export NCCL_DEBUG=WARN
export NOTE='two words'
module load cuda/13
exec PYTHON -P -m gemctl supervise /scratch/runs/gem/7 --submission 2
"""
STEP = [
    "srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--overlap", "--mem=0", "--no-kill",
    "--kill-on-bad-exit=0", "--wait=0", "--input=none", "--export=ALL",
    "--nodelist=n1,n2,n4", "--cpus-per-task=48", "--cpu-bind=cores", "--mem-bind=local",
    "--container-image=/images/gemctl.sqsh", "--container-mounts=/scratch:/scratch,/data:/data:ro",
    "--container-workdir=/scratch", "bash", "-c",
    'export GEMCTL_TOPOLOGY_ADDRESS="${SLURM_TOPOLOGY_ADDR:-}"; exec PYTHON -P -m gemctl.ranks.agent '
    '/scratch/runs/gem/7 --attempt 5 --node "$SLURM_PROCID"',
]  # fmt: skip


def app_of(config: Config, attempt: int = 1) -> AppDef:
    return request(RUN, attempt, config.launcher, config.cluster.device)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_every_option_is_in_the_batch_script() -> None:
    config = compose(None, EVERYTHING)
    form = slurm.script(app_of(config), config, RUN / "submissions" / "2")
    assert form == SCRIPT.replace("PYTHON", sys.executable)


def test_agents_are_one_step_on_named_nodes() -> None:
    config = compose(None, EVERYTHING)
    (role,) = app_of(config, 5).roles
    words = step(role, slurm.options(config), ["n1", "n2", "n4"])
    assert words == [word.replace("PYTHON", sys.executable) for word in STEP]


def test_what_is_not_asked_for_is_not_in_the_script() -> None:
    config = compose(None, ["launcher=slurm", "launcher.slurm.requeue=false"])
    lines = slurm.script(app_of(config), config, RUN / "submissions" / "1").splitlines()
    assert [line for line in lines if "SBATCH" in line] == [
        "#SBATCH --job-name=7",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --output=/scratch/runs/gem/7/submissions/1/supervisor.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --no-requeue",
    ]


def test_variables_are_passed_by_name_and_their_values_are_nowhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    config = compose(None, ["launcher=slurm", "launcher.slurm.env_from=[WANDB_API_KEY,HF_TOKEN]"])
    app = app_of(config)
    script = slurm.script(app, config, RUN / "submissions" / "1")
    assert "#SBATCH --export=ALL,WANDB_API_KEY,HF_TOKEN\n" in script
    assert "--export=ALL" in step(app.roles[0], slurm.options(config))  # from the job to its steps
    assert "hunter2" not in script + json.dumps(to_json(app)) + to_yaml(config)
    with pytest.raises(InputError) as error:
        slurm.check_here(config)
    assert error.value.problems == ["launcher.slurm.env_from: HF_TOKEN is not set in this shell"]
    twice = ["launcher.slurm.env={A: x}", "launcher.slurm.env_from=[A]"]
    assert main(["train", "launcher=slurm", *twice]) == 2
    assert "launcher.slurm.env_from: A is set in launcher.slurm.env too" in capsys.readouterr().err
    assert main(["train", "launcher=slurm", "launcher.slurm.env_from=['A=x']"]) == 2
    assert "env_from" in capsys.readouterr().err


def test_gres_stands_over_the_gpus_of_the_ranks() -> None:
    config = compose(None, ["launcher=slurm", "cluster=cuda", "cluster.gpu=H100", "launcher.slurm.gres='gpu:h100:8'"])
    assert "--gres=gpu:h100:8\n" in slurm.script(app_of(config), config, RUN / "submissions" / "1")


def test_request_survives_its_file() -> None:
    app = app_of(compose(None, EVERYTHING))
    assert from_json(json.loads(json.dumps(to_json(app)))) == app


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launcher.slurm.partion=x"], "unknown key 'launcher.slurm.partion'; did you mean launcher.slurm.partition?"),
        (["launcher.slurm.time_limit=soon"], "launcher.slurm.time_limit=soon: must be a string that matches"),
        (["launcher.slurm.account='a b'"], "launcher.slurm.account='a b': must be a string that matches"),
        (["launcher.slurm.cpus_per_rank=0"], "launcher.slurm.cpus_per_rank=0: must be an integer ≥ 1"),
    ],
)
def test_options_are_checked_before_anything_starts(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "launcher=slurm", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("2", 120),
        ("1:59", 119),
        ("0:01:40", 100),
        ("0-0:02", 120),
        ("0", None),
        ("3", None),
        ("1-0", None),
        ("2:01", None),
    ],
)
def test_time_limit_that_leaves_no_time_before_the_save_is_refused(limit: str, seconds: int | None) -> None:
    config = compose(None, ["launcher=slurm", f"launcher.slurm.time_limit='{limit}'"])
    if seconds is None:
        return slurm.check(config)
    with pytest.raises(InputError, match=rf"save_before_limit=120: must be below .*={limit} \({seconds} s\)"):
        slurm.check(config)


def test_options_that_nothing_would_use_are_named() -> None:
    words = ["launcher.slurm.container_mounts=['/a:/a']", "launcher.slurm.env={1A: x}"]
    with pytest.raises(InputError) as caught:
        slurm.check(compose(None, ["launcher=slurm", *words]))
    assert len(caught.value.problems) == 2
    assert "no effect without launcher.slurm.container_image" in caught.value.problems[1]


def test_options_of_another_launcher_are_noted_as_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "launcher.slurm.partition=gpu", "--dry-run", "--json"]) == 0
    assert "launcher.slurm is ignored: launcher.kind=local" in capsys.readouterr().err


def test_memory_of_nodes_is_not_this_machines() -> None:
    assert cluster_memory(compose(None, ["launcher=slurm"])).host is None
    assert cluster_memory(compose(None, ["launcher=slurm", "launcher.slurm.memory_gb=2"])).host == 2 << 30


def test_words_keep_their_meaning_in_a_shell() -> None:
    assert shell_word("it's $HOME") == """'it'"'"'s $HOME'"""
    assert shell_word("--node=${replica_id}.log") == '--node="$SLURM_PROCID".log'
    assert shell_word("") == "''"


def test_ports_of_jobs_and_attempts_differ() -> None:
    ports = {port(job, attempt) for job in range(100, 400) for attempt in range(1, 31)}
    assert len(ports) == 9000
    assert min(ports) >= 20_000 and max(ports) < 20_000 + PORTS


def test_ends_of_tasks_are_read_from_what_srun_says() -> None:
    text = "srun: error: n3: task 1: Killed\nsrun: error: n[4-6]: tasks 2-3,5: Exited with exit code 1\nsrun: other\n"
    code = "exited with exit code 1"
    assert task_ends(text) == {1: "killed", 2: code, 3: code, 5: code}
    over = "slurmstepd-n3: error: StepId=20.1 exceeded memory limit (1457 > 1214), being killed\n"
    assert task_ends(over + text) == {
        1: "killed (SLURM: exceeded memory limit (1457 > 1214))",
        2: code,
        3: code,
        5: code,
    }


def test_a_clients_message_is_quoted_without_its_name_before_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    client = tmp_path / "sbatch"
    client.write_text(
        "#!/bin/sh\necho 'sbatch: error: no such partition' >&2\necho 'sbatch: error: failed' >&2\nexit 1\n"
    )
    silent = tmp_path / "scontrol"
    silent.write_text("#!/bin/sh\necho 'Slurmctld(primary) at login is DOWN'\nexit 1\n")
    for file in (client, silent):
        file.chmod(0o755)
    with pytest.raises(slurm_client.SlurmError, match=r"^sbatch: no such partition; failed$"):
        slurm_client.call("sbatch")
    with pytest.raises(slurm_client.SlurmError, match=r"^scontrol: Slurmctld\(primary\) at login is DOWN$"):
        slurm_client.call("scontrol")


def test_srun_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(slurm_client.SlurmError, match="srun cannot be started on this node: No such file"):
        check_nodes([str(tmp_path / "srun")], tmp_path / "nodes", ["n1"], 1)


def test_a_silent_node_is_not_waited_for_once_enough_have_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_agents, "LATE_SECONDS", 0.1)
    (tmp_path / "made").mkdir()
    check_node(tmp_path / "made", memory=0, gpus=0)
    host, copy = socket.gethostname(), f"cp {tmp_path}/made/*.json {tmp_path}/nodes/"
    start = time.monotonic()
    reports = check_nodes(["sh", "-c", f"{copy}; exec sleep 60"], tmp_path / "nodes", [host, "n2"], wanted=1)
    assert list(reports) == [host]
    shutil.rmtree(tmp_path / "nodes")
    assert list(check_nodes(["sh", "-c", copy], tmp_path / "nodes", [host, "n2"], wanted=2)) == [host]  # the step ended
    assert time.monotonic() - start < 20


ADDRESSES = {"n1": "spine.leaf1.n1", "n2": "spine.leaf2.n2", "n3": "spine.leaf1.n3", "n10": "spine.leaf2.n10"}


@pytest.mark.parametrize(
    ("left_out", "wanted", "hosts"),
    [
        ([], 2, ["n1", "n3"]),
        (["n3"], 2, ["n2", "n10"]),  # not n1, which is first, as it is alone in its leaf
        (["n1"], 3, ["n2", "n3", "n10"]),
        ([], 4, ["n1", "n2", "n3", "n10"]),
    ],
)
def test_nodes_of_one_leaf_are_taken_before_others(left_out: list[str], wanted: int, hosts: list[str]) -> None:
    """In the scheduler's order, which numbers the tasks."""
    well = {host: address for host, address in ADDRESSES.items() if host not in left_out}
    assert choose(list(ADDRESSES), well, dict.fromkeys(left_out, "bad"), wanted).hosts == hosts


def test_too_few_nodes_are_named() -> None:
    with pytest.raises(TooFewHosts, match=r"2 nodes are planned, 1 can take part \(n2: it did not report\)") as caught:
        check_enough(["n1"], {"n2": "it did not report"}, True, 2)
    assert caught.value.lost


def test_node_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    report = check_node(tmp_path, memory=1 << 50, gpus=100)
    assert read_report(tmp_path / f"{report.host}.json") == report
    assert {check.name for check in report.checks if check.status == "fail"} == {"memory", "gpus"}
    assert "gpus: 0 listed by nvidia-smi, 100 needed" in report.wrong
    assert check_node(tmp_path, memory=0, gpus=0).wrong == ""


def test_node_whose_clock_is_wrong_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr("gemctl.cluster.node.time.time", lambda: real() + 100)
    assert "clock: 100 s away" in check_node(tmp_path, memory=0, gpus=0).wrong


def test_report_without_failures_is_well() -> None:
    assert NodeReport("n1", "", 0.0, [Check("disk", "warn", "low")]).wrong == ""


def test_sweep_is_one_array_with_a_run_for_each_task() -> None:
    config = compose(None, ["launcher=slurm", "launcher.slurm.array_at_once=2"])
    script = slurm.array_script(app_of(config), config, [RUN / "submissions" / "1", Path("/r/b c/submissions/1")])
    assert "#SBATCH --array=0-1%2\n" in script
    assert script.endswith(
        "runs=(\n  /scratch/runs/gem/7\n  '/r/b c'\n)\nrun=${runs[SLURM_ARRAY_TASK_ID]}\n"
        'exec >>"$run/submissions/1/supervisor.log" 2>&1\n'
        f'exec {sys.executable} -P -m gemctl supervise "$run" --submission 1\n'
    )


def test_sweep_has_every_combination() -> None:
    found = expand(["a.b=1,2", "c=x", "d=range(0,2)", "e=[1,2]", "not hydra's"])
    assert found == [[f"a.b={b}", "c=x", f"d={d}", "e=[1,2]", "not hydra's"] for b in (1, 2) for d in (0, 1)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run.seed=1,2"], "launcher.kind=local: a sweep is submitted as a job array, which needs launcher=slurm"),
        (["launcher=slurm", "launcher.nodes=1,2"], "launcher.* has several values"),
        (["launcher=slurm", "run.seed=1,x"], "run.seed=x: must be an integer"),
    ],
)
def test_sweep_is_checked_before_any_run_is_made(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", *words]) == 2
    assert told in capsys.readouterr().err


def dryrun(app: AppDef, **options: Any) -> str:
    runner = Runner("session", {"gemctl_slurm": create_scheduler})
    return str(runner.dryrun(app, "gemctl_slurm", options))


def test_torchx_gets_one_job_of_one_component() -> None:
    app = ddp(script="train.py", j="2x8", image="", cpu=4, gpu=8, memMB=1024)
    script = dryrun(app, partition="gpu", time_limit="60")
    for line in ("--nodes=2", "--partition=gpu", "--time=60", "--gres=gpu:8", "--cpus-per-task=4", "--mem=1024M"):
        assert f"#SBATCH {line}\n" in script
    assert script.count("#SBATCH --nodes") == 1 and "hetjob" not in script
    assert "exec srun --nodes=2 --ntasks=2 --ntasks-per-node=1" in script
    assert "--rdzv_endpoint ${GEMCTL_FIRST_HOST:=localhost}:29500" in script
    assert 'export TORCHX_JOB_ID=gemctl_slurm://session/"$SLURM_JOB_ID"' in script


@pytest.mark.parametrize(
    ("options", "roles", "told"),
    [
        ({"partion": "x"}, 1, "partion: Unexpected keyword"),
        ({"cpus_per_rank": 2}, 1, "cpus_per_rank: not an option of gemctl_slurm"),
        ({}, 2, "a job has one role"),
    ],
)
def test_torchx_options_that_would_be_ignored_are_errors(options: dict[str, Any], roles: int, told: str) -> None:
    app = AppDef(
        "a", [Role(f"r{number}", "", entrypoint="true", resource=Resource(1, 0, 64)) for number in range(roles)]
    )
    with pytest.raises(ValueError, match=told):
        dryrun(app, **options)
