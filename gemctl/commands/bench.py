"""`gemctl bench`: how fast parts of gemctl are here, each beside what it competes with.

gemctl bench kernels --op gdpa --peer fa2=gemctl.bench.peers:fa2_varlen
gemctl bench layers --run RUN                                  # then gemctl report RUN has local MFU
gemctl bench model model=gem_tiny --longest 512 --fill 0.3     # beside the same model on padded batches
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemctl.commands.configured import add_configuration, composed, note_modules, spec_of
from gemctl.errors import GemctlError, InputError

if TYPE_CHECKING:
    from gemctl.bench.results import KernelBench
    from gemctl.config.schema import Config
    from gemctl.report.measured import Layers, ModelBench

HELP = "Measure how fast kernels, layers and whole models are on this machine."
OPS = ("gdpa", "jagged_flash_attention", "block_attention", "pooled_attention")


def arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    kernels = parts.add_parser("kernels", help="the jagged ops, forward and backward, beside peers on the same inputs")
    kernel_arguments(kernels)
    layers = parts.add_parser("layers", help="each module of a model alone, at a run's shapes: local MFU")
    add_configuration(layers)
    layers.add_argument("--run", metavar="RUN", help="measure at this run's configuration and data, for its report")
    layers.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")
    layers.add_argument("--again", action="store_true", help="measure although the cache has it")
    model = parts.add_parser("model", help="a whole training step, beside the same model on padded batches")
    add_configuration(model)
    model.add_argument("--rows", type=int, default=64, metavar="N", help="rows of a global batch (64)")
    model.add_argument("--longest", type=int, default=512, metavar="N", help="events of the longest history (512)")
    model.add_argument("--fill", type=float, default=0.3, metavar="F", help="mean length over the longest (0.3)")
    model.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of this machine (1)")
    model.add_argument("--threads", type=int, metavar="N", help="threads of a rank (default: the cores, shared out)")
    model.add_argument("--repeats", type=int, default=7, metavar="N", help="turns of both, four steps each (7)")


def kernel_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command and the process that it starts take alike."""
    parser.add_argument("--op", action="append", default=[], choices=OPS, help="an op (default: all); may be repeated")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="a shape (default: all)")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=module:function",
        help="something to measure beside; gemctl/bench/peers.py has some, gemctl/bench/cases.py says how to write one",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=1152, metavar="ROWS", help="rows of a batch (1152)")
    parser.add_argument("--heads", type=int, default=4, help="heads (4)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="head dimension (128)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="(bfloat16)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of all contenders (5)")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that it works")


def run(args: argparse.Namespace) -> "KernelBench | Layers | ModelBench":
    parts: dict[str, Callable[[argparse.Namespace], KernelBench | Layers | ModelBench]] = {
        "kernels": bench_kernels,
        "layers": bench_layers,
        "model": bench_model,
    }
    return parts[args.part](args)


def bench_kernels(args: argparse.Namespace) -> "KernelBench":
    """What `gemctl.bench.kernels` found."""
    from gemctl.bench.results import KernelBench, Timing

    found = _measured("gemctl.bench.kernels", None, [word for word in args.command_line[3:] if word != "--json"])
    timings = [Timing(**timing) for timing in found.pop("timings")]
    return KernelBench(**{**found, "timings": timings, "command": args.command_line})


def bench_layers(args: argparse.Namespace) -> "Layers":
    """The layers' times from the cache, else measured now and kept there."""
    from dataclasses import replace

    from gemctl.report.measured import cache_file, cached, from_json, keep, subject
    from gemctl.terminal import note

    config = _of_run(args) if args.run is not None else composed(args)
    spec = spec_of(config)
    of = subject(config, spec)
    layers, fault = cached(config, spec)
    if layers is not None and not args.again:
        return replace(layers, note=f"from the cache, {cache_file(of)}; --again measures anew")
    if fault is not None:
        note(f"{fault}; measuring anew")
    found = _measured("gemctl.bench.layers", config, [])
    keep(of, found)
    return replace(from_json(found), note=f"kept in {cache_file(of)}")


def bench_model(args: argparse.Namespace) -> "ModelBench":
    """A race of the jagged and the padded model; with local MFU where the layers were measured."""
    from gemctl.cluster.host import this_host
    from gemctl.report.measured import ModelBench, Race

    _check_race(args)
    args.words += [
        f"launcher.ranks_per_node={args.ranks}", "launcher.nodes=1", "topology.world_size=auto",
        "topology.dp_replicate=1", "topology.dp_shard=auto", f"train.global_batch={args.rows}", "train.accumulate=1",
    ]  # fmt: skip
    threads = args.threads or max(1, this_host(gpus=False).cores // args.ranks)
    race = [args.rows, args.longest, args.fill, threads, args.repeats]
    found = _measured("gemctl.bench.model", composed(args), [str(number) for number in race])
    return ModelBench(**{**found, "race": Race(**found["race"])})


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


def _of_run(args: argparse.Namespace) -> "Config":
    from gemctl.config.compose import from_yaml
    from gemctl.run.directory import find
    from gemctl.run.files import read_text
    from gemctl.run.inputs import here

    if args.words:
        raise InputError(f"{' '.join(args.words)}: --run has a configuration already")
    run = find(args.run, args.root)
    attempt = run.configured()
    if attempt is None:
        raise InputError(f"{run.path}: no attempt has left a configuration here")
    config = from_yaml(read_text(attempt.config), str(attempt.config))
    note_modules(config, run)
    return replace(config, data=here(config.data, attempt.path, run.path))


def _measured(module: str, config: "Config | None", words: list[str]) -> dict[str, Any]:
    """The object that `python -m module [CONFIG.yaml] RESULT.json words` writes; its problems become this command's."""
    from gemctl.config.compose import to_yaml
    from gemctl.process import run_module
    from gemctl.run.files import read_json

    with tempfile.TemporaryDirectory(prefix="gemctl-bench-") as folder:
        result, file = Path(folder) / "result.json", Path(folder) / "config.yaml"
        if config is not None:
            file.write_text(to_yaml(config), encoding="utf-8")
        arguments = [str(result)] if config is None else [str(file), str(result)]
        code = run_module(module, *arguments, *words).returncode
        found = read_json(result) if result.exists() else {}
    if code == InputError.exit_code and "problems" in found:
        raise InputError(found["problems"])
    if code != 0:
        raise GemctlError(f"the measuring process ended with exit code {code}; see above")
    return found
