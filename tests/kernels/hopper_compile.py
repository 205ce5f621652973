"""The Hopper kernels compiled for sm_90 without a GPU: the ops' host code runs on CPU tensors, its launches compile."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels import cases
from tests.kernels.test_triton_compile import TYPES


def run(kind: str, head: int, options: dict[str, Any]) -> None:
    """Calls the op's host code; nothing is computed."""
    from gemctl.kernels.gdpa import hopper as gdpa  # noqa: PLC0415
    from gemctl.kernels.jagged_flash_attention import hopper as flash  # noqa: PLC0415

    rows = cases.offsets([200, 70])
    q = torch.zeros(270, 2, head, dtype=torch.bfloat16)
    table = torch.zeros(4, dtype=torch.int64)
    given = [table, table]
    causal, window, broadcast = options.get("causal", False), options.get("window"), options.get("broadcast")
    if kind == "softmax":
        output, lse = flash.forward(q, q, q, rows, rows, given, 0.1, causal, window, None)
        flash.backward(output, output, lse, q, q, q, rows, rows, given, 0.1, causal, window, None, False)
    else:
        offsets, queries = (None, q[:20]) if broadcast else (rows, q)
        given += [rows] * bool(broadcast)
        output = gdpa.forward(queries, q, q, offsets, rows, given, kind, 0.1, 1.0, causal, window)
        gdpa.backward(output, queries, q, q, offsets, rows, given, kind, 0.1, 1.0, causal, window)


def launches(call: Callable[[], None]) -> list[tuple[Any, ...]]:
    """(kernel, places, tensors, described tensors, numbers, constants) of every launch in a call."""
    from gemctl.kernels.hopper import host  # noqa: PLC0415

    found: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "launch", lambda *args: found.append(args))
        call()
    return found


def compiled(kernel: Any, tensors: Any, described: Any, numbers: Any, constants: dict[str, Any]) -> Any:
    """The kernel for sm_90, as a launch would compile it."""
    import triton  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.experimental.gluon._runtime import GluonASTSource  # noqa: PLC0415

    from gemctl.kernels.hopper.host import REGISTERS  # noqa: PLC0415
    from gemctl.kernels.hopper.ragged import descriptor  # noqa: PLC0415

    maps = [descriptor(x, rows) for x, rows in described]
    types = [
        *[TYPES[x.dtype] for x in tensors],
        *[f"tensordesc<bf16{x.block_shape},{x.layout!r}>" for x in maps],
        *["fp32" if isinstance(x, float) else "i32" for x in (0, *numbers)],
        *["constexpr"] * len(constants),
    ]
    assert kernel.arg_names[-len(constants) :] == list(constants)
    signature = dict(zip(kernel.arg_names, types, strict=True))
    attributes = {(index,): [["tt.divisibility", 16]] for index in range(len(tensors))}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, fixed, attributes)
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(kind: str, head: int, options: dict[str, Any]) -> list[tuple[str, int, str]]:
    """(kernel, bytes of shared memory, what ptxas says) of a variant's Hopper kernels."""
    import triton  # noqa: PLC0415

    found = []
    for kernel, _, *rest in launches(partial(run, kind, head, options)):
        result = compiled(kernel, *rest)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        with tempfile.TemporaryDirectory() as folder:
            code = Path(folder) / "kernel.ptx"
            code.write_text(result.asm["ptx"])
            command = [str(tool), "-v", "--gpu-name=sm_90a", str(code), "-o", "/dev/null"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        found.append((kernel.__name__, result.metadata.shared, said))
    return found


def spilled(said: str) -> int:
    """Bytes that a kernel spills."""
    return sum(int(x) for x in re.findall(r"(\d+) bytes spill", said))
