"""Each module of the dense part alone, at a run's shapes: forward and backward time, useful FLOPs, local MFU.

    gemctl bench layers experiment=synthetic

A module's inputs are those that it had in a forward of the whole dense part over real batches of the run. It computes
them again and goes back through its own graph, without communication. On CPU as many ranks as share a host do this at
once, as they do in the run and when the peak is measured: local MFU then is what a rank gets out of its share of the
machine. The rows that are summed are the dense part's own steps: tokens, events, each layer, heads and the loss; what
is inside a layer has rows too.
"""

import numpy as np
import torch
import torch.distributed as dist

from gemctl.bench.alone import Times, time_modules
from gemctl.bench.batches import Ints, filled, random_batch
from gemctl.bench.ranks import on_ranks
from gemctl.config.schema import Config
from gemctl.data.batch import Batch
from gemctl.data.files import find_files, shown
from gemctl.data.loader import Loader
from gemctl.errors import InputError
from gemctl.model.gem import DenseModel
from gemctl.model.init import init_rules
from gemctl.parallel.init import Slice, fill
from gemctl.plan.data_facts import data_facts
from gemctl.report.measured import Layers, LayerTime, subject, worlds
from gemctl.specs.count import module_flops
from gemctl.specs.data import FeatureSpec
from gemctl.train.peak import measure_peak

BATCHES = 3
REPEATS = 5


def measure(config: Config, spec: FeatureSpec) -> Layers:
    """Forks the ranks and joins what they measured: means over the ranks."""
    of = subject(config, spec)
    found = on_ranks(of["ranks"], _measure_rank, config, spec, threads=of["threads"])
    times, peaks, flops, counts = zip(*found, strict=True)
    layers = [
        LayerTime(
            name,
            float(np.mean([_within(own, name) for own in flops])),
            float(np.mean([own.forward[name] for own in times])),
            float(np.mean([own.backward[name] for own in times])),
            inside=name not in times[0].summed,
        )
        for name in times[0].forward
    ]
    result = Layers(
        subject=of, peak=float(np.mean(peaks)), batches=BATCHES, rows=counts[0][0], events=counts[0][1],
        lengths=counts[0][2], together=float(np.mean([own.together for own in times])), layers=layers,
    )  # fmt: skip
    missing = float(np.mean([sum(own.values()) for own in flops])) - result.flops
    if abs(missing) > 1e-6 * result.flops:
        raise RuntimeError(f"{missing:.0f} of the model's FLOPs belong to no module that was timed")
    return result


Measured = tuple[Times, float, dict[str, float], tuple[int, int, str]]


def _measure_rank(config: Config, spec: FeatureSpec) -> Measured:
    """This rank's times, its peak, FLOPs by module, and (rows, events, where their lengths are from)."""
    device = torch.device("cuda", 0) if config.cluster.device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if config.precision.dense == "bf16" else torch.float32
    batches, lengths = _batches(config, spec, dist.get_rank())
    dense = _dense(config, spec).to(device, dtype)
    peaks = [measure_peak(device)]
    times = time_modules(dense, spec, [batch.to(device) for batch in batches], config.model.dim, REPEATS)
    peaks.append(measure_peak(device))
    flops: dict[str, float] = {}
    for batch in batches:
        of_rows = {name: events.offsets.diff().numpy() for name, events in batch.sequences.items()}
        for name, forward in module_flops(config.model, spec, len(batch), of_rows).items():
            flops[name] = flops.get(name, 0.0) + 3.0 * forward
    counts = sum(map(len, batches)), sum(batch.tokens() for batch in batches), lengths
    return times, sum(peaks) / len(peaks), flops, counts


def _dense(config: Config, spec: FeatureSpec) -> DenseModel:
    """The whole dense part with its initial values."""
    dense = DenseModel(config.model, spec)
    rules = init_rules(dense)
    for name, parameter in dense.named_parameters():
        fill(Slice(parameter.detach(), 0), rules[name], config.run.seed, f"dense.{name}")
    return dense


def _within(flops: dict[str, float], name: str) -> float:
    """FLOPs of a module and all in it."""
    return sum(own for key, own in flops.items() if key == name or key.startswith(f"{name}."))


def _batches(config: Config, spec: FeatureSpec, rank: int) -> tuple[list[Batch], str]:
    """The first micro-batches of a rank, and where their histories' lengths are from."""
    world, _ = worlds(config)
    data = config.data
    rows = subject(config, spec)["rows"]
    try:
        find_files(data.train)
    except InputError:  # not there yet
        facts = data_facts(data, spec)

        def lengths(seed: int) -> dict[str, Ints]:
            return {s.name: _lengths(rows, facts.mean_events[s.name], s.max_length, seed) for s in spec.sequences}

        return [random_batch(spec, lengths(seed), seed) for seed in range(BATCHES)], facts.source
    loader = Loader(data, spec, global_batch=config.train.global_batch, seed=config.run.seed, rank=rank, world=world)
    try:
        return [next(loader)[1].slice(0, rows) for _ in range(BATCHES)], shown(data.train)
    finally:
        loader.close()


def _lengths(rows: int, mean: float, longest: int, seed: int) -> Ints:
    """Lengths with the plan's mean: all alike where that is the longest or nothing."""
    if not 0 < mean < longest:
        return np.full(rows, round(mean), np.int64)
    return filled(rows, longest, mean / longest, seed)
