"""Every variant of the Triton kernels compiled for Hopper (sm_90), without a GPU: the ops run on CPU tensors with
`launch` replaced by the compiler."""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gemctl import env
from gemctl.kernels.gdpa.activation import Activation
from tests.kernels import cases
from tests.support.world import run_world

SHARED_MEMORY = 227 << 10  # bytes a block may have on sm_90
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPES = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
Variant = tuple[str, torch.dtype, int, dict[str, Any]]


def variants() -> list[Variant]:
    """(op, dtype, head dimension, options)."""
    found: list[Variant] = []
    for dtype, dims in ((BF16, (64, 96, 128)), (FP16, (128,)), (FP32, (128,))):
        for dim in dims:
            found += [("flash", dtype, dim, {}), ("gdpa", dtype, dim, {"activation": "fast_gelu"})]
            found += [("block", dtype, dim, {"rotary": rotary}) for rotary in (False, True)]
            found += [("pooled", dtype, dim, {})]
    found += [("gdpa", BF16, 64, {"activation": str(activation)}) for activation in Activation]
    found += [(op, BF16, 128, {"length": 1000}) for op in ("flash", "gdpa")]
    found += [("flash", BF16, 128, {"causal": True}), ("flash", FP32, 64, {"causal": True})]
    found += [("flash", BF16, 64, {"bias": True}), ("flash", BF16, 128, {"bias": True, "causal": True})]
    found += [("gdpa", BF16, 128, {"activation": "silu", "causal": True}), ("gdpa", BF16, 64, {"broadcast": True})]
    found += [("block", BF16, 128, {"rotary": rotary, "grouped": True}) for rotary in (False, True)]
    return found


def run(variant: Variant) -> None:
    """Forward and backward of the op; nothing is computed."""
    from gemctl.kernels import schedule  # noqa: PLC0415
    from gemctl.kernels.block_attention import triton as block  # noqa: PLC0415
    from gemctl.kernels.gdpa import triton as gdpa  # noqa: PLC0415
    from gemctl.kernels.jagged_flash_attention import triton as flash  # noqa: PLC0415
    from gemctl.kernels.pooled_attention import triton as pooled  # noqa: PLC0415

    op, dtype, dim, options = variant
    rows = cases.offsets([options.get("length", 100)] * 2)
    q = torch.zeros(int(rows[-1]), 4, dim, dtype=dtype)
    tokens, seen = len(q), (options.get("causal", False), None)

    def tables(module: Any, size: int = 0, biased: bool = False) -> list[torch.Tensor]:
        found = module.tables(dtype, q.device, size, *seen, biased)
        return [*schedule.build(found, rows, rows, tokens, tokens), rows]

    if op == "flash":
        bias = torch.zeros(4, 100, 100) if options.get("bias") else None
        biased = bias is not None
        given: tuple[Any, ...] = rows, rows, tables(flash, biased=biased), 0.1, *seen, bias
        output, lse = flash.forward(q, q, q, *given)
        flash.backward(output, output, lse, *(q, q, q, *given, biased))
    elif op == "gdpa":
        offsets, own = (None, q[:20]) if options.get("broadcast") else (rows, q)
        given = offsets, rows, tables(gdpa), options.get("activation", "fast_gelu"), 0.1, 1.0, *seen
        output = gdpa.forward(own, q, q, *given)
        gdpa.backward(output, own, q, q, *given)
    elif op == "block":
        table = torch.zeros(100, dim // 2) if options["rotary"] else None
        k = q[:, :2] if options.get("grouped") else q
        given = rows, tables(block, 64), 64, 0.1, table, table
        output, lse = block.forward(q, k, k, *given)
        block.backward(output, output, lse, q, k, k, *given)
    else:
        given = rows, tables(pooled, 4), 0.1
        output, lse = pooled.forward(q[:4], q, q, *given)
        pooled.backward(output, output, lse, q[:4], q, q, *given)


def compiled(kernel: Any, tiling: Any, args: tuple[Any, ...], constants: tuple[Any, ...]) -> Any:
    """The kernel for sm_90, specialised as Triton would for these arguments."""
    import triton  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    names = kernel.arg_names
    signature, attributes = dict.fromkeys(names, "constexpr"), {}
    fixed = {(len(args) + index,): value for index, value in enumerate(constants)}
    assert len(args) + len(constants) == len(names)
    for index, value in enumerate(args):
        if kernel.params[index].do_not_specialize:
            signature[names[index]] = "i32"
        elif isinstance(value, int) and value == 1:
            fixed[index,] = 1
        elif isinstance(value, float):
            signature[names[index]] = "fp32"
        else:
            signature[names[index]] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, attributes)
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def stack_bytes(binary: bytes) -> int:
    """Bytes of each thread's stack, where registers are spilled to."""
    import triton  # noqa: PLC0415

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])


def compile_share(folder: str) -> list[tuple[str, int, int]]:
    """This rank's kernels: (variant and kernel, bytes of shared memory, bytes of stack)."""
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/{env.rank()}"
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for variant in variants()[env.rank() :: env.world_size()]:
            for kernel, *rest in recorded(patch, partial(run, variant)):
                result = compiled(kernel, *rest)
                name = f"{variant} {kernel.__name__}"
                found.append((name, result.metadata.shared, stack_bytes(result.asm["cubin"])))
    return found


def recorded(patch: pytest.MonkeyPatch, call: Callable[[], None]) -> Iterator[tuple[Any, ...]]:
    """(kernel, tiling, arguments, constants) of every launch in a call."""
    from tests.kernels.guarded import MODULES  # noqa: PLC0415

    launches = []

    def record(
        kernel: Any, programs: int, tiling: Any, tensors: Any, numbers: Any, constants: Any, varying: Any = ()
    ) -> None:
        launches.append((kernel, tiling, (*tensors, *numbers, *varying), tuple(constants)))

    for module in MODULES:
        patch.setattr(module, "launch", record)
    call()
    yield from launches


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_variant_compiles_for_hopper(tmp_path: Path) -> None:
    shares = run_world(2, compile_share, str(tmp_path), timeout=840, gloo=False)
    found = [kernel for share in shares for kernel in share]
    assert len(found) > 100
    assert [name for name, shared, _ in found if shared > SHARED_MEMORY] == []
    # The kernels that decide the speed keep everything in registers.
    hot = [
        stack for name, _, stack in found if re.search(r"(flash|gdpa)', torch.bfloat16, 128, .*length.*_kernel", name)
    ]
    assert len(hot) == 6
    assert hot == [0] * 6
