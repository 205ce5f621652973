"""Whether a plan fits the cluster's memory; where it does not, what is largest and the nearest change that would fit.

gemctl plan experiment=synthetic cluster.memory_gb=1        # exit 3
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gemctl.cluster import hardware
from gemctl.cluster.host import Host, this_host
from gemctl.config.schema import MOST_NODES, Config
from gemctl.errors import DoesNotFit, InputError
from gemctl.mesh.topology import Topology, divisors
from gemctl.plan.memory import DEVICE, HOST, HOST_RESERVE, MemoryObject, RankClass, device_total, totals
from gemctl.units import binary, plural

USABLE = 0.9
"""Share of memory that a plan may fill; the rest is for the system, the page cache and what the estimates miss."""


@dataclass(frozen=True)
class Need:
    """Bytes needed from one pool of memory ("host0", "the fullest GPU") and its size; None: unknown.

    `note`: why this pool.
    """

    pool: str
    needed: int
    available: int | None
    note: str = ""

    @property
    def fits(self) -> bool | None:
        """None where the pool's size is unknown."""
        return None if self.available is None else self.needed <= USABLE * self.available


@dataclass(frozen=True)
class Fit:
    """`fits`: None if a pool's size is unknown. `message`: of a plan that does not fit, else empty."""

    fits: bool | None
    needs: list[Need]
    message: str = ""


@dataclass(frozen=True)
class Memory:
    """Memory per host and per GPU in bytes; None: unknown. `shared_by`: hosts of the plan that share one machine."""

    host: int | None
    gpu: int | None
    shared_by: int


def cluster_memory(config: Config, host: Host | None = None) -> Memory:
    """As configured, else that of this machine (on which the local launcher runs every host)."""
    if config.launcher.kind != "local":
        return _elsewhere(config)
    wants_gpu = config.cluster.device == "cuda" and config.cluster.gpu is None
    needs_host = config.cluster.memory_gb is None
    facts = host or (this_host(gpus=wants_gpu) if wants_gpu or needs_host else None)
    gpu = hardware.CATALOGUE[config.cluster.gpu].memory if config.cluster.gpu else None
    if wants_gpu and facts is not None and facts.gpus:
        gpu = min(found.memory for found in facts.gpus)
    if config.cluster.memory_gb is not None:
        return Memory(int(config.cluster.memory_gb * hardware.GB), gpu, 1)
    assert facts is not None
    return Memory(facts.memory, gpu, config.launcher.nodes)


def _elsewhere(config: Config) -> Memory:
    """As configured: this machine is none of the scheduler's nodes."""
    slurm = config.launcher.slurm
    host = None if slurm is None or slurm.memory_gb is None else int(slurm.memory_gb * hardware.GIB)
    if config.cluster.memory_gb is not None:
        host = int(config.cluster.memory_gb * hardware.GB)
    return Memory(host, hardware.CATALOGUE[config.cluster.gpu].memory if config.cluster.gpu else None, 1)


def needs(objects: list[MemoryObject], topology: Topology, config: Config, memory: Memory) -> list[Need]:
    """The needs of the fullest host (or of this machine) and of the fullest GPU."""
    cuda = config.cluster.device == "cuda"
    ranks = totals(objects, topology, HOST if cuda else None)
    hosts = ranks.reshape(-1, topology.ranks_per_node).sum(axis=1) + HOST_RESERVE
    shared = memory.shared_by > 1
    worst = int(hosts.argmax())
    pool = f"this machine (ranks of {memory.shared_by} hosts)" if shared else f"host{worst}"
    note = "the ranks of all hosts, as cluster.memory_gb (memory per host) is not set" if shared else ""
    found = [Need(pool, int(hosts.sum() if shared else hosts[worst]), memory.host, note)]
    if cuda:
        found.append(Need("the fullest GPU", int(totals(objects, topology, DEVICE).max()), memory.gpu))
    return found


def judge(found: list[Need]) -> bool | None:
    """False if any pool overflows, else None if any is unknown, else True."""
    verdicts = [need.fits for need in found]
    return False if False in verdicts else None if None in verdicts else True


def explain(found: list[Need], heaviest: RankClass, objects: list[MemoryObject], change: str | None) -> str:
    """The message of a plan that does not fit."""
    lines = [
        f"{need.pool} needs {binary(need.needed)}, but {USABLE:.0%} of its {binary(need.available)} is "
        f"{binary(int(USABLE * need.available))}"
        for need in found
        if need.fits is False and need.available is not None
    ]
    largest = sorted(heaviest.bytes.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {binary(size)}" for name, size in largest)
    total = device_total(heaviest, objects)
    lines.append(
        f"heaviest rank class (first rank {heaviest.first_rank}, {plural(heaviest.ranks, 'rank')}): "
        f"{binary(heaviest.total)} per rank, {binary(total)} of it on the device; largest: {parts}"
    )
    lines.append(f"nearest change that fits: {change}" if change else "no single change of the configuration fits")
    return "\n".join(lines)


def nearest_change(config: Config, fits: Callable[[Config], bool]) -> str | None:
    """The first single change that fits; changes that keep the loss curve are tried first."""
    for text, changed in _changes(config):
        try:
            if fits(changed):
                return text
        except (InputError, DoesNotFit):
            continue
    return None


def _changes(config: Config) -> Iterator[tuple[str, Config]]:
    train, topology, launcher = config.train, config.topology, config.launcher
    for factor in (2, 4, 8, 16):
        count = train.accumulate * factor
        yield f"train.accumulate={count}", _with(config, "train", accumulate=count)
    if train.recompute == "none":
        yield "train.recompute=layers", _with(config, "train", recompute="layers")
    if topology.dp_replicate != "auto":
        for replicas in reversed(divisors(topology.dp_replicate)[:-1]):
            text = f"topology.dp_replicate={replicas} topology.dp_shard=auto"
            yield text, _with(config, "topology", dp_replicate=replicas, dp_shard="auto")
    if topology.mp_replicate != "auto":
        for replicas in reversed(divisors(topology.mp_replicate)[:-1]):
            text = f"topology.mp_replicate={replicas} topology.mp_shard=auto"
            yield text, _with(config, "topology", mp_replicate=replicas, mp_shard="auto")
    for window in _halves(config.data.window):
        yield f"data.window={window}", _with(config, "data", window=window)
    wider_by = (2, 4, 8, 16, 32, 64, 128)
    for nodes in (launcher.nodes * factor for factor in wider_by if launcher.nodes * factor <= MOST_NODES):
        text = f"launcher.nodes={nodes} topology.world_size=auto topology.dp_shard=auto topology.mp_shard=auto"
        wider = _with(config, "topology", world_size="auto", dp_shard="auto", mp_shard="auto")
        yield text, _with(wider, "launcher", nodes=nodes)
    for ranks in _halves(launcher.ranks_per_node):
        text = f"launcher.ranks_per_node={ranks} topology=fsdp"
        degrees = {"dp_replicate": 1, "dp_shard": "auto", "mp_replicate": 1, "mp_shard": "auto"}
        fewer = _with(config, "topology", world_size="auto", **degrees)
        yield text, _with(fewer, "launcher", ranks_per_node=ranks)
    for rows in _halves(train.global_batch):
        yield f"train.global_batch={rows}", _with(config, "train", global_batch=rows)


def _halves(number: int) -> list[int]:
    return [number >> shift for shift in range(1, number.bit_length())]


def _with(config: Config, group: str, **values: object) -> Config:
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
