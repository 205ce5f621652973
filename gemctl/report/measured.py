"""How fast a configuration's layers are alone: what `gemctl bench layers` measured, and the cache that reports read.

    layers, note = cached(config, spec)

One file a measurement, `<cache>/layers/<key>.json`, where <cache> is $XDG_CACHE_HOME/gemctl or ~/.cache/gemctl. The key
is a hash of all that the times depend on: model and feature spec, precision, data, rows of a rank, the machine's
processor and how ranks share it, versions, and the source of kernels and modules.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
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
"""How far the two ways to the scaling ratio may be apart, relative to the first."""


@dataclass(frozen=True)
class LayerTime:
    """One module: useful FLOPs of forward and backward over all batches measured, and its seconds for them, means over
    the ranks. `inside`: it is part of another row, so it is not summed.
    """

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
    """A measurement. `subject`: what it depends on; `peak`: FLOP/s of one rank while all did this; `together`: seconds
    of the whole dense part in one go; `lengths`: where the histories' lengths are from.
    """

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
        """Σ of the layers' own seconds."""
        return sum(layer.forward + layer.backward for layer in self.layers if not layer.inside)

    @property
    def local_mfu(self) -> float:
        """Σ F / (peak · Σ t)."""
        return self.flops / (self.peak * self.seconds)


@dataclass(frozen=True)
class Race:
    """What `gemctl bench model` steps over: global batches of `rows` rows, whose histories are up to `longest` events
    long and `fill` · longest on average; `threads` of a rank; `repeats` turns.
    """

    rows: int
    longest: int
    fill: float
    threads: int
    repeats: int


@dataclass(frozen=True)
class ModelBench:
    """A race of the jagged and the padded model. `events`, `flops`: of one global batch; `peak`: FLOP/s of all ranks;
    `seconds` of each turn of `batches` steps and `parts` of all turns by part of the ledger, by contender; `apart`:
    largest relative difference of their results.
    """

    race: Race
    model: str
    device: str
    ranks: int
    events: float
    flops: float
    peak: float
    batches: int
    seconds: dict[str, list[float]]
    parts: dict[str, dict[str, float]]
    apart: float

    def examples_per_s(self, contender: str) -> float:
        """Median over the turns."""
        return self.batches * self.race.rows / median(self.seconds[contender])

    def mfu(self, contender: str) -> float:
        """Useful FLOPs (of real events) over the ranks' peaks."""
        return self.flops * self.batches / (self.peak * median(self.seconds[contender]))

    @property
    def ratio(self) -> float:
        """Examples/s of the jagged model over those of the padded one: the median of the turns' ratios."""
        return median(b / a for a, b in zip(self.seconds["jagged"], self.seconds["padded"], strict=True))


def worlds(config: Config) -> tuple[int, int]:
    """Ranks of the world, and those of them that share a host."""
    launcher, world = config.launcher, config.topology.world_size
    ranks = launcher.nodes * launcher.ranks_per_node if world == "auto" else world
    return ranks, min(ranks, launcher.ranks_per_node)


def subject(config: Config, spec: FeatureSpec) -> dict[str, Any]:
    """All that the layers' times depend on, as JSON has it."""
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
    """The processor that a rank computes on, by its maker's name."""
    host = this_host(gpus=config.cluster.device == "cuda")
    if config.cluster.device == "cuda":
        return config.cluster.gpu or (host.gpus[0].name if host.gpus else "no GPU here")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else 'CPU'}, {host.cores} cores"


def cache_file(of: dict[str, Any]) -> Path:
    """Where the measurement of a subject lies, or will."""
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
    return env.cache_folder() / "layers" / f"{key}.json"


def cached(config: Config, spec: FeatureSpec) -> tuple[Layers | None, str | None]:
    """The measurement of a configuration, if there is one; or why its file cannot be used."""
    of = subject(config, spec)
    file = cache_file(of)
    if not paths.is_file(file):
        return None, None
    try:
        return from_json(read_json(file)), None
    except InputError as error:
        return None, f"the measured layers cannot be used: {error.problems[0]}"
    except TypeError as error:
        return None, f"the measured layers cannot be used: {file}: {error!r}"


def keep(of: dict[str, Any], found: dict[str, Any]) -> None:
    """Writes a measurement to the cache; one that is there is replaced."""
    file = cache_file(of)
    with paths.writing(str(file)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        create_json(file, found)


def from_json(found: dict[str, Any]) -> Layers:
    """The measurement in a file's object; InputError or TypeError where it is none."""
    return Layers(**{**found, "layers": [LayerTime(**layer) for layer in found["layers"]]})


def _made(url: DataPath) -> list[int] | None:
    """Number, size and newest time of local files: another log under the same name has other lengths."""
    try:
        stats = [Path(file.path).stat() for file in find_files(url).files if file.local]
    except InputError:
        return None
    return [len(stats), sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)]


def _source(cuda: bool) -> str:
    """A hash of the code that runs in a layer; Triton's only where it does."""
    package = Path(__file__).resolve().parent.parent
    files = sorted(file for part in ("kernels", "model", "specs") for file in (package / part).rglob("*.py"))
    digest = hashlib.sha256()
    for file in files if cuda else [file for file in files if "triton" not in file.name]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
