"""Whether memory suffices: the usable share, whose memory counts, and what is said of an overflow."""

from typing import Any

import pytest

from gemctl.cluster import hardware
from gemctl.cluster.host import Host, HostGpu
from gemctl.config.schema import MOST_NODES, ClusterConfig, Config, DataConfig, LauncherConfig, SlurmConfig
from gemctl.mesh.topology import Topology
from gemctl.plan import fit
from gemctl.plan.fit import Memory, Need, cluster_memory, explain, judge, nearest_change, needs
from gemctl.plan.memory import DEVICE, HOST, HOST_RESERVE, MemoryObject, RankClass

GIB = 1 << 30
TOPOLOGY = Topology(4, 1, 4, 1, 1, 4, 2)  # two hosts of two ranks
OBJECTS = [
    MemoryObject("weights", DEVICE, "dp_shard", [[3, 4 * GIB], [1, 5 * GIB]], ""),
    MemoryObject("inputs", HOST, None, [[1, GIB]], ""),
]


def config_of(launcher: LauncherConfig | None = None, **cluster: Any) -> Config:
    data = DataConfig(spec="unused", train="unused")
    return Config(data=data, cluster=ClusterConfig(**cluster), launcher=launcher or LauncherConfig(nodes=2))


@pytest.mark.parametrize(
    ("needed", "available", "fits"), [(90, 100, True), (91, 100, False), (900, 1000, True), (1, None, None)]
)
def test_a_plan_may_fill_nine_tenths_of_the_memory(needed: int, available: int | None, fits: bool | None) -> None:
    assert Need("host0", needed, available).fits is fits


@pytest.mark.parametrize(
    ("verdicts", "whole"), [((True, True), True), ((True, None), None), ((None, False), False), ((), True)]
)
def test_one_overflow_is_an_overflow_and_one_unknown_is_unknown(
    verdicts: tuple[bool | None, ...], whole: bool | None
) -> None:
    sizes = {True: 100, False: 1, None: None}
    assert judge([Need("", 90, sizes[verdict]) for verdict in verdicts]) is whole


def test_the_fullest_host_and_the_fullest_gpu_need_memory() -> None:
    cpu = needs(OBJECTS, TOPOLOGY, config_of(device="cpu"), Memory(64 * GIB, None, 1))
    assert cpu == [Need("host1", 11 * GIB + HOST_RESERVE, 64 * GIB)]
    cuda = needs(OBJECTS, TOPOLOGY, config_of(device="cuda"), Memory(64 * GIB, 8 * GIB, 1))
    assert cuda == [
        Need("host0", 2 * GIB + HOST_RESERVE, 64 * GIB),
        Need("the fullest GPU", 5 * GIB, 8 * GIB),
    ]


def test_hosts_on_one_machine_add_up() -> None:
    (shared,) = needs(OBJECTS, TOPOLOGY, config_of(device="cpu"), Memory(64 * GIB, None, 2))
    assert shared.pool == "this machine (ranks of 2 hosts)"
    assert shared.needed == 21 * GIB + 2 * HOST_RESERVE


HERE = Host(2, 32 * GIB, 20 * GIB, GIB, [HostGpu("a", 24 * GIB, "1"), HostGpu("b", 16 * GIB, "1")])
SLURM = LauncherConfig(kind="slurm", nodes=2, slurm=SlurmConfig(memory_gb=8))
H100 = hardware.CATALOGUE["H100"].memory


@pytest.mark.parametrize(
    ("config", "memory"),
    [
        (config_of(device="cpu"), Memory(32 * GIB, None, 2)),  # the GPUs that are here are not used
        (config_of(device="cuda"), Memory(32 * GIB, 16 * GIB, 2)),  # the smallest one
        (config_of(device="cuda", gpu="H100"), Memory(32 * GIB, H100, 2)),
        (config_of(device="cuda", gpu="H100", memory_gb=50), Memory(50 * 10**9, H100, 1)),
        (config_of(device="cpu", memory_gb=50), Memory(50 * 10**9, None, 1)),
        (config_of(SLURM, device="cpu"), Memory(8 * GIB, None, 1)),
        (config_of(SLURM, device="cuda", gpu="H100", memory_gb=50), Memory(50 * 10**9, H100, 1)),
        (config_of(SLURM, device="cuda"), Memory(8 * GIB, None, 1)),  # this machine's GPUs are not the nodes'
    ],
)
def test_the_configuration_goes_before_this_machine(config: Config, memory: Memory) -> None:
    assert cluster_memory(config, HERE) == memory


def test_an_overflow_is_explained_in_bytes() -> None:
    heaviest = RankClass(3, 1, {"weights": 5 * GIB, "inputs": GIB}, 6 * GIB)
    full = [Need("host0", GIB, 64 * GIB), Need("the fullest GPU", 5 * GIB, 4 * GIB)]
    lines = explain(full, heaviest, OBJECTS, "train.accumulate=2").splitlines()
    assert lines[0] == "the fullest GPU needs 5.0 GiB, but 90% of its 4.0 GiB is 3.6 GiB"
    assert "first rank 3, 1 rank)" in lines[1]
    assert "6.0 GiB" in lines[1] and "5.0 GiB of it on the device" in lines[1]
    assert lines[1].endswith("weights 5.0 GiB, inputs 1.0 GiB")
    assert lines[2:] == ["nearest change that fits: train.accumulate=2"]


def test_this_machine_is_asked_for_what_is_not_configured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def this_host(gpus: bool) -> Host:
        asked.append(gpus)
        return HERE

    monkeypatch.setattr(fit, "this_host", this_host)
    assert cluster_memory(config_of(device="cpu", memory_gb=50)) == Memory(50 * 10**9, None, 1)
    assert asked == []
    assert cluster_memory(config_of(device="cpu")) == Memory(32 * GIB, None, 2)
    assert asked == [False]
    assert cluster_memory(config_of(device="cuda", memory_gb=50)) == Memory(50 * 10**9, 16 * GIB, 1)
    assert asked == [False, True]


def offers(config: Config) -> list[str]:
    """Every change that is tried, in order, as if none before it were enough."""
    texts: list[str] = []
    while True:
        verdicts = iter([*[False] * len(texts), True])
        text = nearest_change(config, lambda changed, verdicts=verdicts: next(verdicts, False))  # type: ignore[misc]
        if text is None:
            return texts
        texts.append(text)


def test_the_nearest_change_keeps_the_loss_curve_if_it_can() -> None:
    config = config_of(LauncherConfig(nodes=MOST_NODES // 4, ranks_per_node=4), device="cpu")
    config.train.global_batch, config.data.window = 4, 2
    config.topology.dp_replicate, config.topology.mp_replicate = 4, "auto"
    wider = "topology.world_size=auto topology.dp_shard=auto topology.mp_shard=auto"
    assert offers(config) == [
        *(f"train.accumulate={count}" for count in (2, 4, 8, 16)),
        "train.recompute=layers",
        "topology.dp_replicate=2 topology.dp_shard=auto",
        "topology.dp_replicate=1 topology.dp_shard=auto",
        "data.window=1",
        f"launcher.nodes={MOST_NODES // 2} {wider}",
        f"launcher.nodes={MOST_NODES} {wider}",
        "launcher.ranks_per_node=2 topology=fsdp",
        "launcher.ranks_per_node=1 topology=fsdp",
        "train.global_batch=2",
        "train.global_batch=1",
    ]
    config.launcher.nodes, config.train.recompute, config.train.accumulate = 1, "layers", 3
    config.topology.dp_replicate, config.topology.mp_replicate = "auto", 2
    changed = offers(config)
    assert changed[:5] == [
        *(f"train.accumulate={3 * factor}" for factor in (2, 4, 8, 16)),
        "topology.mp_replicate=1 topology.mp_shard=auto",
    ]
    nodes = [text.split()[0] for text in changed if "nodes" in text]
    assert nodes == [f"launcher.nodes={count}" for count in (2, 4, 8, 16, 32, 64, 128)]
