"""The Triton backend in Triton's interpreter on the CPU: run by test_triton.py in processes of their own.

The interpreter has to be asked for before Triton is imported, and one process cannot have both. It multiplies bfloat16
matrices wrongly, so float32 and float16 stand in; a program takes some milliseconds, so batches are small.
"""

import os
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemctl import env
from gemctl.kernels import dispatch
from tests.kernels import cases
from tests.kernels.cases import Case, block, flash, generalised, pooled

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
Rows = tuple[list[int], list[int] | None]
# More than two tiles of 64 rows on either side, so that blocks are seen whole, in part and not at all.
EXTRA: dict[str, Rows] = {
    "long": ([150, 0, 1], None),
    "longer keys": ([70, 3], [200, 0]),
    "many keys": ([1, 1], [70, 3]),
}


def start() -> None:
    """Turns this process into one where Triton interprets: its Python part is imported anew if others imported it."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
        del sys.modules[name]
    cases.LENGTHS.update(EXTRA)


def fast_cases() -> list[Case]:
    """Each op once."""
    return cases.small_cases()


def slow_cases() -> list[Case]:
    """Every branch of the kernels."""
    from gemctl.kernels.gdpa.activation import Activation  # noqa: PLC0415

    found = [
        flash("aligned"),
        flash("longer keys"),
        flash("empty"),
        flash("no query"),
        flash("no key"),
        flash("no row"),
    ]
    positions: list[dict[str, Any]] = [{"causal": True}, {"window": 70}, {"window": 40, "causal": True}, {"window": 0}]
    found += [flash("long", 1, 1, **options) for options in positions]
    found += [flash("longer keys", 2, 1, causal=True), flash("aligned", 4, 2, window=5)]
    found += [flash("aligned", bias=True), flash("longer keys", 1, 1, bias=True, causal=True, window=150)]
    found += [flash("self", 1, 1, bias=True, hides=4, **options) for options in positions[:2]]
    found += [flash("longer keys", 2, 1, bias=True, hides=150), flash("aligned", bias=True, hides=9, causal=True)]
    found += [flash("cross", scale=scale, **options) for scale in (-0.3, 0.0) for options in ({}, {"causal": True})]
    found += [generalised("aligned", activation=activation, pre_scale=0.7, post_scale=0.3) for activation in Activation]
    found += [generalised("longer keys", 2, 1, activation="silu", **options) for options in positions]
    found += [
        generalised("small", 4, 2, 3, activation="gelu"),
        generalised("small", seeds=3, activation="relu", window=1),
    ]
    found += [generalised("no row", activation="relu"), generalised("no key", activation="relu")]
    found += [block("aligned", 4, 2, block_size=size, rotary=rotary) for size in (4, 16) for rotary in (False, True)]
    found += [block("long", 1, 1), block("no row"), block("empty")]
    found += [pooled("cross", 2, 1), pooled("many keys", 4, 2, seeds=5), pooled("small", seeds=70), pooled("no row")]
    found += [pooled("small", seeds=70, scale=scale) for scale in (-0.5, 0.0)]
    found += [pooled("no key"), pooled("small", 2, 1, seeds=0)]
    return found


def some_cases() -> list[Case]:
    """Every third of the slow ones."""
    return slow_cases()[::3]


def failures(name: str, dtype: torch.dtype, share: int = 0, shares: int = 1) -> list[str]:
    """What is wrong with this share of the cases that the function `name` gives; run in a process of its own."""
    start()
    from gemctl.kernels.pooled_attention import triton as pooling  # noqa: PLC0415

    pooling.CHUNK = 16  # so that short rows have several
    chosen: list[Case] = {"fast": fast_cases, "slow": slow_cases, "some": some_cases}[name]()[share::shares]
    return [text for case in chosen for text in _failures_of(case, dtype)]


def failures_of_rank(name: str, dtype: torch.dtype) -> list[str]:
    """The same for this rank's share."""
    return failures(name, dtype, env.rank(), env.world_size())


def _failures_of(case: Case, dtype: torch.dtype) -> list[str]:
    from tests.kernels.guarded import guarded  # noqa: PLC0415

    inputs = case.inputs(dtype)
    with dispatch.use("reference"):
        wanted = case.results([x.detach().double().requires_grad_() for x in inputs])
    try:
        with dispatch.use("triton"), guarded() as guards:
            found = case.results([guards.copy(x.detach()).requires_grad_() for x in inputs])
    except AssertionError as error:
        return [f"{case.name}: {error}"]
    return [f"{case.name}: {text}" for text in _differences(found, wanted, dtype)]


def _differences(found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    texts = []
    for key, reference in wanted.items():
        error = ((found[key].double() - reference).norm() / reference.norm().clamp(min=1)).item()
        if not error <= TOLERANCE[dtype] or found[key].dtype != dtype:
            texts.append(f"{key} is off by {error:.1e}, in {found[key].dtype}")
    return texts


def scores_far_below_zero() -> list[float]:
    """Errors of softmax rows whose scores are all near −30, beside 31 padded keys of score 0: by dtype."""
    start()
    from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention  # noqa: PLC0415

    errors = []
    for dtype in (torch.float32, torch.float16):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(33, 1, 8, generator=generator) for _ in range(3))
        q[..., -1], k[..., -1] = -7.5, 4.0
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        rows = cases.offsets([33])
        with dispatch.use("reference"):
            wanted = jagged_flash_attention(q.double(), k.double(), v.double(), rows, rows, 33, 33, scale=1.0)
        with dispatch.use("triton"):
            found = jagged_flash_attention(q, k, v, rows, rows, 33, 33, scale=1.0)
        errors.append(((found.double() - wanted).norm() / wanted.norm()).item())
    return errors


def hiding_bias() -> list[str]:
    """What is wrong where a bias of −inf hides keys, among them whole blocks from some rows."""
    start()
    from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention  # noqa: PLC0415

    bias = torch.zeros(1, 6, 70)
    bias[:, :3, :40] = bias[:, :, 64:] = -torch.inf
    rows, keys = cases.offsets([6]), cases.offsets([70])

    def call(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_flash_attention(q, k, v, rows, keys, 6, 70, causal=causal, bias=bias)

    shapes: dict[str, tuple[int, ...]] = {"q": (6, 1, 8), "k": (70, 1, 8), "v": (70, 1, 8)}
    found = [Case(f"bias of −inf, causal={causal}", partial(call, causal), shapes) for causal in (False, True)]
    return [text for case in found for text in _failures_of(case, torch.float32)]


def bfloat16_is_refused() -> str:
    """The reason that dispatch gives in the interpreter."""
    start()
    return dispatch.options("gdpa", torch.zeros(1, dtype=torch.bfloat16))["triton"]


def short_tables() -> list[bool]:
    """Whether a bias and angles that are too short give NaN where they are missed, and only there."""
    start()
    from gemctl.kernels.block_attention.op import block_attention  # noqa: PLC0415
    from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention  # noqa: PLC0415

    rows = cases.offsets([40])
    q = torch.randn(40, 1, 8)
    with dispatch.use("triton"):
        flash_output = jagged_flash_attention(q, q, q, rows, rows, 40, 40, bias=torch.zeros(1, 33, 40))
        block_output = block_attention(q, q, q, rows, 40, block_size=32, cos=torch.ones(33, 4), sin=torch.zeros(33, 4))
    return [bool(x[33:].isnan().all()) and bool(x[:32].isfinite().all()) for x in (flash_output, block_output)]
