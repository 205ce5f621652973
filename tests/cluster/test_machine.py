"""Facts of a machine, its builds of torch and FBGEMM, and what `gemctl doctor` makes of them."""

import errno
import os
import socket
from importlib import metadata
from pathlib import Path

import pytest

from gemctl.cli import main
from gemctl.cluster import checks, software
from gemctl.cluster.checks import Check, Doctor
from gemctl.cluster.hardware import CATALOGUE, Tier, find, tier_of
from gemctl.cluster.host import Host, HostGpu, meminfo, parse_gpus, this_host
from gemctl.cluster.software import Builds, builds, off_pin, pins, problems
from gemctl.errors import GemctlError

CPU_SET = {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0", "fbgemm-gpu": "1.8.0+cpu", "torchrec": "1.8.0"}
CUDA_SET = {"torch": "2.11.0+cu130", "fbgemm-gpu": "1.6.0", "torchrec": "1.6.1"}


def found(**versions: str | None) -> list[str]:
    changed = {name.replace("_", "-"): version for name, version in versions.items()}
    return problems(builds((CPU_SET | changed).get))


def test_both_constraint_sets_have_no_problem() -> None:
    assert problems(builds(CPU_SET.get)) == [] == problems(builds(CUDA_SET.get))
    assert builds(CUDA_SET.get) == Builds("2.11.0+cu130", "cuda", "1.6.0", "cuda", "1.6.1")
    for build, local in (("cpu", "+cpu"), ("cuda", "+cu130")):
        path = software.constraints_file(build)
        assert path is not None
        pinned = pins(path)
        assert problems(builds({**pinned, "torch": pinned["torch"] + local}.get)) == []


def test_cuda_torch_with_cpu_fbgemm_is_refused_with_the_fix() -> None:
    (problem,) = found(torch="2.13.0+cu130")
    assert "torch 2.13.0+cu130 is a CUDA build, FBGEMM 1.8.0 a CPU build" in problem
    assert "pip uninstall fbgemm-gpu-cpu fbgemm-gpu, then pip install fbgemm-gpu==1.8.*" in problem


def test_cpu_torch_with_cuda_fbgemm_and_mixtures_are_refused() -> None:
    (problem,) = problems(builds({**CUDA_SET, "torch": "2.11.0+cpu"}.get))
    assert "is a CPU build, FBGEMM 1.6.0 a CUDA build" in problem and "fbgemm-gpu-cpu==1.6.*" in problem
    (problem,) = found(fbgemm_gpu="1.8.0")
    assert "overwrite each other" in problem


def test_versions_that_do_not_belong_together_are_refused() -> None:
    assert ["1.9.0 is not compatible with torch 2.13.0+cpu" in problem for problem in found(torchrec="1.9.0")] == [True]
    assert len(found(torch="2.14.0+cpu")) == 2
    assert "torch is not installed" in found(torch=None)[0]


def test_the_build_of_a_torch_without_local_version_is_read_from_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distribution:
        def locate_file(self, name: str) -> Path:
            return tmp_path / name

    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
    (tmp_path / "torch").mkdir()
    for line, build in (("cuda: Optional[str] = '13.0'", "cuda"), ("cuda: Optional[str] = None", "cpu")):
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
        assert builds({**CPU_SET, "torch": "2.13.0"}.get).torch_build == build


def test_this_environment_is_sound_and_pinned() -> None:
    software.require()
    path = software.constraints_file("cpu")
    assert path is not None
    other = {**pins(path), "numpy": "2.4.0", "torch": "2.13.0+cpu"}
    assert off_pin(path, other.get) == ["numpy 2.4.0 (pinned 2.3.5)"]
    assert off_pin(path, {**other, "triton": None, "numpy": "2.3.5"}.get) == []


def test_require_raises_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "builds", lambda: builds({**CPU_SET, "torch": "2.13.0+cu130"}.get))
    with pytest.raises(GemctlError) as caught:
        software.require()
    assert caught.value.exit_code == 1


def test_facts_of_this_host() -> None:
    host = this_host(gpus=False)
    assert host.cores == len(os.sched_getaffinity(0))
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    assert 0 < host.memory_available <= host.memory <= page * pages
    assert meminfo("MemTotal:  100 kB\nHugePages_Total: 3\n") == {"MemTotal": 102_400}


def test_nvidia_smi_lines() -> None:
    text = "NVIDIA H200, 143771, 570.1\nNVIDIA GB200, [N/A], 570.1\n"
    assert parse_gpus(text) == [HostGpu("NVIDIA H200", 143771 * 2**20, "570.1")]
    assert [find(name) for name in ("NVIDIA H200", "NVIDIA GB200", "NVIDIA H100 80GB HBM3", "Tesla T4")] == [
        CATALOGUE["H200"], CATALOGUE["GB200"], CATALOGUE["H100"], None,
    ]  # fmt: skip


def test_tiers_by_what_a_group_spans() -> None:
    spans = [(5, 5), (0, 7), (7, 8), (8, 15), (0, 31), (0, 32)]
    assert [tier_of(first, last, 8, 4) for first, last in spans] == [
        Tier.NONE, Tier.FAST, Tier.ZONE, Tier.FAST, Tier.ZONE, Tier.CROSS_ZONE,
    ]  # fmt: skip
    assert tier_of(0, 999, 8) == Tier.ZONE


def status_of(doctor: Doctor) -> dict[str, Check]:
    return {check.name: check for check in doctor.checks}


def test_doctor_passes_here_and_fails_on_wrong_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--root", str(tmp_path / "new" / "runs")]) == 0
    assert not (tmp_path / "new").exists()
    assert "torch 2." in capsys.readouterr().out
    monkeypatch.setattr(software, "builds", lambda: builds({**CPU_SET, "torch": "2.13.0+cu130"}.get))
    assert main(["doctor", "--json", "--root", str(tmp_path)]) == 1
    assert '"status": "fail"' in capsys.readouterr().out


def test_a_folder_without_hard_links_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    found = status_of(checks.check_machine(tmp_path))["run.root"]
    assert found.status == "warn" and found.found.endswith("no hard links") and "rename" in found.advice
    assert list(tmp_path.iterdir()) == []


def test_a_small_machine_gets_warnings_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Host(1, 2 << 30, 1 << 30, 64 << 20, [HostGpu("NVIDIA H200", 141 * 10**9, "570.1")])
    monkeypatch.setattr(checks, "this_host", lambda: small)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    (tmp_path / "file").write_text("")
    doctor = checks.check_machine(tmp_path / "file" / "runs")
    found = status_of(doctor)
    assert [found[name].status for name in ("cores", "memory", "/dev/shm")] == ["warn"] * 3
    assert found["gloo"].status == "fail" and "lo" in found["gloo"].advice
    assert found["run.root"].status == "fail" and "run.root" in found["run.root"].advice
    assert "1 × NVIDIA H200" in found["gpus"].found
    assert doctor.exit_code == 1
    assert all(check.advice for check in doctor.checks if check.status != "ok")


def test_a_host_name_without_an_address_of_its_own_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    gloo = status_of(checks.check_machine(tmp_path))["gloo"]
    assert gloo.status == "warn" and "GLOO_SOCKET_IFNAME" in gloo.advice


def test_half_a_scheduler_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "kubectl"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    found = status_of(checks.check_machine(tmp_path))
    assert found["SLURM"].status == "warn" and "srun" in found["SLURM"].found
    assert (found["Kubernetes"].status, found["Kubernetes"].found) == ("ok", "kubectl")
