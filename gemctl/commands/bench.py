"""`gemctl bench`: how fast parts of gemctl are here, each beside what it competes with.

gemctl bench kernels --op gdpa --peer fa2=gemctl.bench.peers:fa2_varlen
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl.errors import GemctlError, InputError

if TYPE_CHECKING:
    from gemctl.bench.results import KernelBench

HELP = "Measure how fast the kernels are on this machine."
OPS = ("gdpa", "jagged_flash_attention", "block_attention", "pooled_attention")


def arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    kernels = parts.add_parser("kernels", help="the jagged ops, forward and backward, beside peers on the same inputs")
    kernel_arguments(kernels)


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


def run(args: argparse.Namespace) -> "KernelBench":
    from gemctl.bench.results import KernelBench, Timing
    from gemctl.run.files import read_json
    from gemctl.run.process import run_module

    words = args.command_line[3:]
    with tempfile.TemporaryDirectory(prefix="gemctl-bench-") as folder:
        result = Path(folder) / "result.json"
        code = run_module("gemctl.bench.kernels", str(result), *(word for word in words if word != "--json")).returncode
        found = read_json(result) if result.exists() else {}
    if code == InputError.exit_code and "problems" in found:
        raise InputError(found["problems"])
    if code != 0:
        raise GemctlError(f"the measuring process ended with exit code {code}; see above")
    timings = [Timing(**timing) for timing in found.pop("timings")]
    return KernelBench(**{**found, "timings": timings, "command": args.command_line})
