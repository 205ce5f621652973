"""The whole command line: every command, its summary and its arguments. What a command does is in the module of its
name, gemctl/commands/NAME.py, which is imported only when the command runs.

    COMMANDS["train"].add_arguments(parser)

Importing this module is cheap, so that `gemctl COMMAND --help` is quick.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

BENCH_OPS = ("gdpa", "jagged_flash_attention", "block_attention", "pooled_attention")
LISTED_RUNS = 50  # runs that `gemctl list` shows unless told otherwise
SYNTHETIC_SIZES = {
    "rows": "training rows",
    "eval-rows": "evaluation rows",
    "users": "users",
    "items": "items",
    "seed": "seed",
}


class Command(NamedTuple):
    """`summary`: one line, without a full stop."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="FILE.yaml | GROUP=CHOICE | KEY=VALUE",
        help="a file of your own, group choices and values; docs/reference.md lists them all, "
        "`gemctl train --cfg` prints the resulting configuration",
    )
    parser.add_argument("--config-dir", metavar="DIR", help="folder with more choices, as DIR/GROUP/CHOICE.yaml")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of the id")
    _add_root(parser)


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", default="runs", metavar="DIR", help="folder that holds the runs (default: runs)")


def _add_detach(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--detach", action="store_true", help="return once the run has started or is queued; it outlives the shell"
    )


def _train(parser: argparse.ArgumentParser) -> None:
    _add_configuration(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--cfg", action="store_true", help="print the composed configuration, without starting anything"
    )
    instead.add_argument(
        "--dry-run", action="store_true", help="print the plan and the launch request, without starting anything"
    )
    _add_detach(instead)
    parser.add_argument(
        "-m", "--multirun", action="store_true",
        help="KEY=A,B,…: one run per combination of values, submitted as one array (launcher=slurm)",
    )  # fmt: skip


def _resume(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "changes",
        nargs="*",
        default=[],
        metavar="KEY=VALUE | GROUP=CHOICE",
        help="what to change; docs/reference.md lists the keys that may change",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="KEY",
        help="accept a change to this key, or to the files it names, even if it alters the loss curve; repeatable",
    )
    parser.add_argument(
        "--from-scratch", action="store_true", help="start again from step 0; existing checkpoints are kept"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="print what would be loaded, moved and lost, and stop")
    _add_detach(instead)


def _supervise(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--submission", type=int, metavar="N", help="this submission of the run (default: the newest)")


def _list(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    parser.add_argument(
        "--last", type=int, metavar="N", help=f"the newest N runs, 0 for all (default: {LISTED_RUNS}; all with --json)"
    )


def _logs(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="keep printing new lines, including those of later attempts, until the run ends",
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="default: the newest")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="only this rank")
    which.add_argument("--merged", action="store_true", help="all ranks, merged by time")
    parser.add_argument("--tail", type=int, metavar="N", help="the last N lines (with -f: then every new one)")


def _stop(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--now", action="store_true", help="end it immediately: steps since the last checkpoint are lost"
    )


def _report(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--html", metavar="FILE", help="also write the report as one HTML file")
    parser.add_argument("--diff", metavar="RUN", help="a second run to compare with")


def _eval(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "places",
        nargs="*",
        default=[],
        metavar="data.spec=PATH | data.train=PATH | data.eval=PATH",
        help="where the run's own data are now, if they have been moved",
    )
    parser.add_argument(
        "--data", metavar="PATH", action="append", help="file, folder or glob; repeatable (default: data.eval)"
    )
    parser.add_argument("--checkpoint", type=int, metavar="STEP", help="default: the newest that verifies")
    parser.add_argument(
        "--out", metavar="FILE", help="also write every row's scores to this Parquet file, replacing older scores"
    )


def _data(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    importing = actions.add_parser(
        "import", help="RecBole atomic files (*.inter, *.user, *.item) → train, valid and test Parquet with a spec"
    )
    importing.add_argument("source", metavar="SRC", help="folder with one *.inter file, or the file itself")
    importing.add_argument("out", metavar="OUT", help="folder to write to")
    importing.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=COLUMN>=NUMBER",
        help="a task; repeatable (default where there is a rating: liked=rating>=4, loved=rating>=5)",
    )
    importing.add_argument("--history", type=int, default=100, metavar="N", help="events kept per row (default: 100)")
    synth = actions.add_parser("synth", help="write the seeded synthetic click log")
    synth.add_argument("out", metavar="OUT", nargs="?", default="data/synthetic", help="folder (default: %(default)s)")
    for name, what in SYNTHETIC_SIZES.items():
        synth.add_argument(f"--{name}", type=int, metavar="N", help=what)
    spec = actions.add_parser("spec", help="draft a feature spec for Parquet files")
    spec.add_argument("data", metavar="PATH", nargs="+", help="files, folders or globs; fsspec URLs too")
    spec.add_argument("-o", "--out", metavar="SPEC.yaml", help="write the draft to this file instead of printing it")
    spec.add_argument("--label", action="append", default=[], metavar="COLUMN", help="a label column; repeatable")


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    what = "path of a checkpoint, RUN (its newest) or RUN:STEP"
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_run(actions.add_parser("list", help="all checkpoints of a run, newest first"))
    verifying = actions.add_parser("verify", help="check the hashes of a checkpoint's files, or of all of a run's")
    verifying.add_argument("checkpoint", metavar="PATH|RUN", help="path of a checkpoint, a run, or RUN:STEP")
    comparing = actions.add_parser("diff", help="compare two checkpoints bit for bit; exit code 1 if they differ")
    comparing.add_argument("a", metavar="A", help=what)
    comparing.add_argument("b", metavar="B", help=what)
    exporting = actions.add_parser("export", help="write the weights, embedding tables included, as safetensors files")
    exporting.add_argument("checkpoint", metavar="CHECKPOINT", help=what)
    exporting.add_argument("target", metavar="DIR", help="folder to create for the files")
    exporting.add_argument("--optimizer", action="store_true", help="include the optimizer state")
    exporting.add_argument(
        "--file-gb", type=float, default=5.0, metavar="GB", help="largest file, unless one tensor is larger (5)"
    )
    pruning = actions.add_parser("prune", help="delete what no attempt can start from; the run must not be running")
    _add_run(pruning)
    pruning.add_argument(
        "--unusable", action="store_true", required=True,
        help="folders that are unfinished, void, damaged, or unreadable by this gemctl or this user",
    )  # fmt: skip
    pruning.add_argument("--dry-run", action="store_true", help="print what would be deleted, and why, and stop")
    for action in (verifying, comparing, exporting):
        _add_root(action)


def _bench(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    kernels = parts.add_parser("kernels", help="the jagged ops, forward and backward, beside peers on the same inputs")
    kernels.add_argument(
        "--op", action="append", default=[], choices=BENCH_OPS, help="an op; repeatable (default: all)"
    )
    kernels.add_argument("--case", action="append", default=[], metavar="NAME", help="a shape (default: all)")
    kernels.add_argument(
        "--peer", action="append", default=[], metavar="NAME=module:function",
        help="something to measure beside; gemctl/bench/peers.py has some, gemctl/bench/cases.py says how to write one",
    )  # fmt: skip
    kernels.add_argument("--batch", type=int, default=1152, metavar="ROWS", help="rows of a batch (1152)")
    kernels.add_argument("--heads", type=int, default=4, help="heads (4)")
    kernels.add_argument("--head-dim", type=int, default=128, metavar="D", help="head dimension (128)")
    kernels.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="dtype (bfloat16)"
    )
    kernels.add_argument("--repeats", type=int, default=5, help="rounds over all contenders (5)")
    kernels.add_argument("--small", action="store_true", help="tiny shapes, to check that it works")
    layers = parts.add_parser("layers", help="each module of a model alone, at a run's shapes: local MFU")
    _add_configuration(layers)
    layers.add_argument("--run", metavar="RUN", help="measure with this run's configuration and data, for its report")
    _add_root(layers)
    layers.add_argument("--again", action="store_true", help="measure even if the cache has a result")
    model = parts.add_parser("model", help="a whole training step, beside the same model on padded batches")
    _add_configuration(model)
    model.add_argument("--rows", type=int, default=64, metavar="N", help="rows of a global batch (64)")
    model.add_argument("--longest", type=int, default=512, metavar="N", help="events of the longest history (512)")
    model.add_argument("--fill", type=float, default=0.3, metavar="F", help="mean length divided by the longest (0.3)")
    model.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks on this machine (1)")
    model.add_argument("--threads", type=int, metavar="N", help="threads per rank (default: cores divided by ranks)")
    model.add_argument("--repeats", type=int, default=7, metavar="N", help="rounds of both, four steps each (7)")


def _config(parser: argparse.ArgumentParser) -> None:
    what = "write the whole configuration as one YAML file that needs no groups"
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = commands.add_parser("export", help=what, description=sentence(what))
    _add_configuration(export)
    export.add_argument("-o", "--out", metavar="OUT", help="file to write (default: standard output)")


def _doctor(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    parser.add_argument(
        "--node",
        metavar="DIR",
        help="check only whether this node can serve a run, and write a report to the run's folder DIR",
    )
    parser.add_argument("--memory", type=int, default=0, metavar="BYTES", help="with --node: memory that must be free")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="with --node: GPUs that must be present")


COMMANDS = {
    "train": Command("train the model that a configuration describes", _train),
    "plan": Command(
        "show the mesh, the table shards and the memory of a configuration, without starting anything",
        _add_configuration,
    ),
    "resume": Command(
        "resume a run from its newest verified checkpoint, on the same or another number of ranks", _resume
    ),
    "supervise": Command("supervise a submitted run in this process; batch scripts and --detach start it", _supervise),
    "list": Command("list runs and what each is doing", _list),
    "status": Command("show what a run is doing", _add_run),
    "logs": Command("show the output and events of a run's processes; after a failure, its cause first", _logs),
    "stop": Command("ask a run to save and stop", _stop),
    "report": Command("show what a run achieved and where its time went", _report),
    "eval": Command("score a data set with a checkpoint", _eval),
    "data": Command("import a raw log, write the synthetic one, or draft a feature spec for Parquet files", _data),
    "checkpoint": Command("list, verify, compare, export and prune checkpoints", _checkpoint),
    "bench": Command("measure how fast kernels, layers and whole models are on this machine", _bench),
    "config": Command("export a configuration", _config),
    "doctor": Command("check this machine and what is installed on it", _doctor),
}


def sentence(summary: str) -> str:
    """A summary with a capital and a full stop."""
    return f"{summary[0].upper()}{summary[1:]}."
