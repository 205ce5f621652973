"""The scaling ratio of real trainings on 1, 2 and 4 ranks: by division by the layers' own times, and from the ledger.

python -m pytest tests/bench/test_bench_scaling.py -m slow
"""

import socket
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from gemctl.bench import layers
from gemctl.config.compose import from_yaml, to_yaml
from gemctl.config.schema import Config, DataConfig, LauncherConfig, SyntheticConfig, TopologyConfig, TrainConfig
from gemctl.data.synthetic import ensure
from gemctl.mesh.groups import HostReport
from gemctl.plan.build import build as plan
from gemctl.plan.build import to_json
from gemctl.plan.job import spec_of
from gemctl.ranks.worker import main
from gemctl.report.layers import keep, subject
from gemctl.report.report import Report, build
from gemctl.run.attempt import Base, claim
from gemctl.run.directory import RunDir
from gemctl.run.mesh import write_mesh
from tests.support.world import run_world

STEPS = 16


def configured(folder: Path, world: int) -> Config:
    data = DataConfig(
        str(folder / "spec.yaml"), str(folder / "train.parquet"),
        synthetic=SyntheticConfig(users=300, items=1000, rows=20_000, eval_rows=1),
    )  # fmt: skip
    return Config(
        data=data,
        train=TrainConfig(global_batch=512, steps=STEPS, log_every=4),
        topology=TopologyConfig(dp_shard="auto"),
        launcher=LauncherConfig(ranks_per_node=world),
    )


def train(path: str) -> None:
    """One rank of the run's first attempt."""
    main(path, 1)


def measure(text: str) -> dict[str, object]:
    """The layers' times, as `gemctl bench layers` keeps them."""
    config = from_yaml(text, "config.yaml")
    return asdict(layers.measure(config, spec_of(config)))


def reported(folder: Path, world: int) -> Report:
    """A training on `world` ranks, then its layers alone, then its report."""
    config = configured(folder, world)
    ensure(config.data)
    run = RunDir.create(str(folder / "runs"), f"world-{world}", ["gemctl", "train"])
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=world, heartbeat=1.0)
    attempt.config.write_text(to_yaml(config))
    attempt.plan.write_text(to_json(plan(config, spec_of(config))))
    attempt.write_base(Base(None, 0))
    write_mesh(attempt, [HostReport(socket.gethostname(), world, "")])
    run_world(world, train, str(run.path), gloo=False, timeout=250)
    keep(subject(config, spec_of(config)), run_world(1, measure, to_yaml(config), gloo=False, timeout=250)[0])
    return build(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_both_ways_agree_or_the_report_says_so(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that others use, too, both are noisy: the first of three that are close counts. Four ranks on two
    cores take each other's time inside of the layers, which only one of the ways sees."""
    bound = 0.3 if world <= 2 else 0.6
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    closest, ways = float("inf"), []
    for _ in range(3):
        report = reported(tmp_path, world)
        found = report.throughput
        assert found.effective_mfu and found.local_mfu and found.scaling_ratio and found.ledger_ratio
        assert found.effective_mfu == pytest.approx(found.local_mfu * found.scaling_ratio)
        assert sum(report.step_shares.values()) == pytest.approx(1, abs=0.02)
        assert 0 < found.ledger_ratio < 1
        apart = abs(found.ledger_ratio / found.scaling_ratio - 1)
        assert (apart > 0.1) == any("by division" in note for note in report.notes)
        closest = min(closest, apart)
        ways.append(f"{found.scaling_ratio:.3f} by division, {found.ledger_ratio:.3f} from the ledger")
        if closest <= bound:
            break
    sys.stdout.write(f"world {world}: {'; '.join(ways)}\n")  # pytest -rA shows it
    assert closest <= bound, f"world {world}: {ways}"
