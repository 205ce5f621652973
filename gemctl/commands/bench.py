"""`gemctl bench`: how fast parts of gemctl are on this machine, beside what they compete with.

gemctl bench kernels --op gdpa --peer fa2=gemctl.bench.peers:fa2_varlen
gemctl bench layers --run RUN                                  # then gemctl report RUN has local MFU
gemctl bench model model=gem_tiny --longest 512 --fill 0.3     # beside the same model on padded batches
"""

import argparse
import dataclasses
from dataclasses import replace

from gemctl import torch_call
from gemctl.bench.results import KernelBench, KernelSettings, ModelBench, Race
from gemctl.cluster.host import this_host
from gemctl.commands.configured import composed
from gemctl.config.compose import from_yaml
from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.plan.job import module_notes, spec_of
from gemctl.report.layers import Layers, cache_file, cached, keep, subject
from gemctl.run.directory import find
from gemctl.run.files import read_text
from gemctl.run.inputs import here
from gemctl.terminal import note


def run(args: argparse.Namespace) -> KernelBench | Layers | ModelBench:
    match args.part:
        case "kernels":
            return bench_kernels(args)
        case "layers":
            return bench_layers(args)
        case _:
            return bench_model(args)


def bench_kernels(args: argparse.Namespace) -> KernelBench:
    """All timings of the ops and their peers."""
    settings = KernelSettings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(KernelSettings)})
    found = torch_call.call("gemctl.bench.kernels:run", KernelBench, settings=settings)
    return replace(found, command=args.command_line)


def bench_layers(args: argparse.Namespace) -> Layers:
    """The layers' times from the cache, else measured now and cached."""
    config = _of_run(args) if args.run is not None else composed(args)
    spec = spec_of(config)
    of = subject(config, spec)
    layers, fault = cached(config, spec)
    if layers is not None and not args.again:
        return replace(layers, note=f"from the cache, {cache_file(of)}; --again measures again")
    if fault is not None:
        note(f"{fault}; measuring again")
    found = torch_call.call("gemctl.bench.layers:measure", Layers, config=config, spec=spec)
    keep(of, dataclasses.asdict(found))
    return replace(found, note=f"kept in {cache_file(of)}")


def bench_model(args: argparse.Namespace) -> ModelBench:
    """A race of the jagged and the padded model, with local MFU if the layers were measured."""
    _check_race(args)
    args.words += [
        f"launcher.ranks_per_node={args.ranks}", "launcher.nodes=1", "topology.world_size=auto",
        "topology.dp_replicate=1", "topology.dp_shard=auto", f"train.global_batch={args.rows}", "train.accumulate=1",
    ]  # fmt: skip
    threads = args.threads or max(1, this_host(gpus=False).cores // args.ranks)
    race = Race(args.rows, args.longest, args.fill, threads, args.repeats)
    config = composed(args)
    return torch_call.call("gemctl.bench.model:measure", ModelBench, config=config, spec=spec_of(config), race=race)


def _check_race(args: argparse.Namespace) -> None:
    least = {"rows": 1, "longest": 1, "ranks": 1, "repeats": 1}
    problems = [
        f"--{name} {getattr(args, name)}: must be at least {bound}"
        for name, bound in least.items()
        if getattr(args, name) < bound
    ]
    if not 0 < args.fill < 1:
        problems.append(f"--fill {args.fill}: must be between 0 and 1")
    if args.threads is not None and args.threads < 1:
        problems.append(f"--threads {args.threads}: must be at least 1")
    if args.ranks > 0 and args.rows % args.ranks:
        nearest = max(1, round(args.rows / args.ranks)) * args.ranks
        problems.append(f"--rows {args.rows}: must be a multiple of the {args.ranks} ranks; nearest: {nearest}")
    if problems:
        raise InputError(problems)


def _of_run(args: argparse.Namespace) -> Config:
    if args.words:
        raise InputError(f"{' '.join(args.words)}: --run has a configuration already")
    run = find(args.run, args.root)
    attempt = run.configured()
    if attempt is None:
        raise InputError(f"{run.path}: no attempt has left a configuration here")
    config = from_yaml(read_text(attempt.config), str(attempt.config))
    for line in module_notes(config, run.run_id):
        note(line)
    return replace(config, data=here(config.data, attempt.path, run.path))
