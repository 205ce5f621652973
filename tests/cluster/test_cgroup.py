"""Limits of control groups as SLURM, Kubernetes and systemd lay them, in a folder that stands for a machine's root."""

import os
from pathlib import Path

import pytest

from gemctl.cluster import host
from gemctl.cluster.host import Limits, limits, own_groups, whole_cores
from gemctl.config.compose import compose
from gemctl.launchers.api import request

GIB = 1 << 30
UNLIMITED = "9223372036854771712\n"
V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw shared:1 master:2 - cgroup cgroup rw,memory\n"
)


def machine(root: Path, cgroup: str, mountinfo: str, **files: str) -> Path:
    """`files`: path below sys/fs/cgroup, with __ for /, → text."""
    texts = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo}
    texts |= {f"sys/fs/cgroup/{path}": text for path, text in files.items()}
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


def test_slurm_job_under_version_2(tmp_path: Path) -> None:
    """The limit is the job's; the groups of its step and task below it say "max", as those above it do."""
    job = "system.slice/slurmstepd.scope/job_7"
    root = machine(
        tmp_path, f"0::/{job}/step_batch/user/task_0\n", V2,
        **{
            f"{job}/step_batch/user/task_0/memory.max": "max\n",
            f"{job}/memory.max": f"{GIB // 2}\n",
            f"{job}/memory.current": f"{GIB // 4 + 1000}\n",
            f"{job}/memory.stat": "anon 5\ninactive_file 1000\nactive_file 7\n",
            "system.slice/memory.max": "max\n",
            f"{job}/cpu.max": "150000 100000\n",
            "system.slice/cpu.max": "max 100000\n",
        },
    )  # fmt: skip
    assert limits(root) == Limits(GIB // 2, GIB // 4, 1.5)
    (chain,) = own_groups("memory", root)
    assert chain[0] == root / "sys/fs/cgroup" / job / "step_batch/user/task_0"
    assert chain[-1] == root / "sys/fs/cgroup"


def test_slurm_job_under_version_1(tmp_path: Path) -> None:
    job = "slurm/uid_1000/job_7"
    root = machine(
        tmp_path, f"4:memory:/{job}/step_0/task_0\n2:cpu,cpuacct:/{job}\n1:name=systemd:/x\n0::/\n", V1,
        **{
            f"memory/{job}/step_0/task_0/memory.limit_in_bytes": UNLIMITED,
            f"memory/{job}/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"memory/{job}/memory.usage_in_bytes": f"{GIB}\n",
            f"memory/{job}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
            "memory/slurm/memory.limit_in_bytes": f"{3 * GIB}\n",
            f"cpu,cpuacct/{job}/cpu.cfs_quota_us": "300000\n",
            f"cpu,cpuacct/{job}/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )  # fmt: skip
    assert limits(root) == Limits(2 * GIB, 3 * GIB // 2, 3.0)


@pytest.mark.parametrize("own", ["/", "/kubepods.slice/pod1/c1", "/../../kubepods/c1"])
def test_container_sees_its_own_group_as_the_root(own: str, tmp_path: Path) -> None:
    """With or without a namespace of its own for control groups, the mounted folder is what there is to see."""
    root = machine(tmp_path, f"0::{own}\n", V2, **{"memory.max": f"{GIB}\n", "cpu.max": "50000 100000"})
    assert limits(root) == Limits(GIB, GIB, 0.5)


def test_container_under_version_1_with_the_hosts_path(tmp_path: Path) -> None:
    """Docker and Kubernetes mount the container's folder of each hierarchy; its path is that of the host."""
    mounts = r"40 31 0:32 /kubepods/pod1/c1 /sys/fs/cgroup/mem\040ory ro - cgroup cgroup rw,memory" + "\n"
    root = machine(
        tmp_path, "4:memory:/kubepods/pod1/c1/sub\n", mounts,
        **{"mem ory/memory.limit_in_bytes": f"{GIB}\n", "mem ory/sub/memory.limit_in_bytes": f"{2 * GIB}\n"},
    )  # fmt: skip
    assert limits(root).memory == GIB


def test_the_smallest_limit_of_all_around_counts(tmp_path: Path) -> None:
    files = {"a/memory.max": f"{3 * GIB}", "a/b/memory.max": f"{GIB}", "a/b/c/memory.max": f"{2 * GIB}"}
    assert limits(machine(tmp_path, "0::/a/b/c\n", V2, **files)).memory == GIB


@pytest.mark.parametrize(("cgroup", "mounts"), [("0::/\n", V2), ("", ""), ("nonsense", "nonsense - \n"), ("0::/a", V1)])
def test_no_limit_is_none(cgroup: str, mounts: str, tmp_path: Path) -> None:
    assert limits(machine(tmp_path, cgroup, mounts)) == Limits(None, None, None)


def test_cores_are_those_of_the_quota_or_of_the_cpuset_if_fewer() -> None:
    assert [whole_cores(quota, 4) for quota in (None, 0.5, 1.0, 1.5, 4.0, 64.0)] == [4, 1, 1, 2, 4, 4]


def test_limits_are_what_this_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "limits", lambda: Limits(GIB // 2, GIB // 4, 0.5))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = host.this_host(gpus=False)
    assert (found.memory, found.memory_available, found.cores) == (GIB // 2, GIB // 4, 1)
    (role,) = request(Path("/r/1"), 1, compose(None, ["launcher.ranks_per_node=1"]).launcher).roles
    assert role.env["OMP_NUM_THREADS"] == "1"
    monkeypatch.setattr(host, "limits", lambda: Limits(None, None, None))
    assert host.this_host(gpus=False).cores == len(os.sched_getaffinity(0))
