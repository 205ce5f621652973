"""The time of each layer alone, as `gemctl bench layers` measures it, and the cache of it that reports read.

    layers, note = cached(config, spec)

A measurement is a file `<cache>/layers/<key>.json`, where <cache> is $XDG_CACHE_HOME/gemctl or ~/.cache/gemctl. The key
is a hash of everything that the times depend on: model, feature spec, precision, data, rows per rank, the processor and
how ranks share it, versions, and the source of kernels and modules.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemctl import env, paths
from gemctl.cluster.host import this_host
from gemctl.cluster.software import installed_version
from gemctl.config.schema import Config
from gemctl.data.files import DataPath, find_files
from gemctl.errors import InputError
from gemctl.run.files import create_json, read_json
from gemctl.specs.data import FeatureSpec

AGREEMENT = {"cpu": 0.10, "cuda": 0.05}
"""Largest expected difference of the two scaling ratios, relative to the one by division."""


@dataclass(frozen=True)
class LayerTime:
    """One module: useful FLOPs of forward and backward over all batches, and its seconds, means over the ranks.
    `inside`: part of another module, so it is not added up."""

    name: str
    flops: float
    forward: float
    backward: float
    inside: bool

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / (self.forward + self.backward)


@dataclass(frozen=True)
class Layers:
    """A measurement. `subject`: what it depends on; `peak`: FLOP/s of one rank while all ranks measured it;
    `together`: seconds of the whole dense part at once; `lengths`: the source of the history lengths."""

    subject: dict[str, Any]
    peak: float
    batches: int
    rows: int
    events: int
    lengths: str
    together: float
    layers: list[LayerTime]
    note: str | None = None

    @property
    def flops(self) -> float:
        """Useful FLOPs of all batches."""
        return sum(layer.flops for layer in self.layers if not layer.inside)

    @property
    def seconds(self) -> float:
        """Sum of the layers' seconds."""
        return sum(layer.forward + layer.backward for layer in self.layers if not layer.inside)

    @property
    def local_mfu(self) -> float:
        """Σ FLOPs / (peak · Σ seconds)."""
        return self.flops / (self.peak * self.seconds)


def worlds(config: Config) -> tuple[int, int]:
    """World size, and ranks per host."""
    launcher, world = config.launcher, config.topology.world_size
    ranks = launcher.nodes * launcher.ranks_per_node if world == "auto" else world
    return ranks, min(ranks, launcher.ranks_per_node)


def subject(config: Config, spec: FeatureSpec) -> dict[str, Any]:
    """Everything that the layers' times depend on, as JSON data."""
    world, local = worlds(config)
    data = config.data
    return {
        "model": asdict(config.model),
        "spec": asdict(spec),
        "precision": asdict(config.precision),
        "data": {
            "train": data.train, "made": _made(data.train), "order": data.order, "window": data.window,
            "histories": data.histories, "seed": config.run.seed,
            "synthetic": data.synthetic and asdict(data.synthetic),
        },
        "rows": max(1, config.train.global_batch // world // config.train.accumulate),
        "device": device(config),
        "ranks": local if config.cluster.device == "cpu" else 1,
        "threads": max(1, this_host(gpus=False).cores // local),
        "versions": {name: installed_version(name) for name in ("torch", "gemctl")},
        "source": _source(config.cluster.device == "cuda"),
    }  # fmt: skip


def device(config: Config) -> str:
    """The name of the processor that ranks compute on."""
    host = this_host(gpus=config.cluster.device == "cuda")
    if config.cluster.device == "cuda":
        return config.cluster.gpu or (host.gpus[0].name if host.gpus else "no GPU here")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else 'CPU'}, {host.cores} cores"


def cache_file(of: dict[str, Any]) -> Path:
    """The cache file of a subject."""
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
    return env.cache_folder() / "layers" / f"{key}.json"


def cached(config: Config, spec: FeatureSpec) -> tuple[Layers | None, str | None]:
    """The measurement of a configuration, if there is one; or why its file is not usable."""
    of = subject(config, spec)
    file = cache_file(of)
    if not paths.is_file(file):
        return None, None
    try:
        return from_json(read_json(file)), None
    except InputError as error:
        return None, f"the measured layers are not usable: {error.problems[0]}"
    except TypeError as error:
        return None, f"the measured layers are not usable: {file}: {error!r}"


def keep(of: dict[str, Any], found: dict[str, Any]) -> None:
    """Writes a measurement to the cache, and replaces the previous one."""
    file = cache_file(of)
    with paths.writing(str(file)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        create_json(file, found)


def from_json(found: dict[str, Any]) -> Layers:
    """The measurement in a file's JSON object. TypeError if it is not one."""
    return Layers(**{**found, "layers": [LayerTime(**layer) for layer in found["layers"]]})


def _made(url: DataPath) -> list[int] | None:
    """Number, total size and newest modification time of local files, as a new log has other lengths."""
    try:
        stats = [Path(file.path).stat() for file in find_files(url).files if file.local]
    except InputError:
        return None
    return [len(stats), sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)]


def _source(cuda: bool) -> str:
    """A hash of the code that runs in a layer, of the Triton kernels only on GPUs."""
    package = Path(__file__).resolve().parent.parent
    files = sorted(file for part in ("kernels", "model", "specs") for file in (package / part).rglob("*.py"))
    digest = hashlib.sha256()
    for file in files if cuda else [file for file in files if "triton" not in file.name]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
