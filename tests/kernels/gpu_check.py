"""The Triton backend on a GPU against the plain definitions in float64; not collected by itself, for CI has no GPU.

    python -m pytest tests/kernels/gpu_check.py -n 12      # -n: kernels compile in parallel, where pytest-xdist is

Random jagged batches with empty, 1-token and 10,000-token sequences, every buffer poisoned and between guard zones of
64 KiB, every result computed twice and equal bit for bit. Tolerances: ‖found − wanted‖ ≤ 5e-3 · max(1, ‖wanted‖) for
bfloat16 and float16, 1e-5 for float32; for GDPA's output ‖ |act(S)| |V| ‖ stands in for ‖wanted‖.
"""

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gemctl.errors import InputError
from gemctl.kernels import dispatch
from gemctl.kernels.block_attention.op import block_attention
from gemctl.kernels.gdpa.activation import ACTIVATIONS, Activation
from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
from gemctl.kernels.pooled_attention.op import pooled_attention
from tests.kernels.guarded import guarded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 5e-3, FP16: 5e-3, FP32: 1e-5}
ROWS = [0, 1, 333, 64, 129, 0, 1000, 17, 63, 65, 1, 255, 2, 700]
KEYS = [5, 1, 200, 0, 129, 0, 256, 17, 640, 1, 64, 255, 333, 128]
LONG = [10_000, 0, 1, 77, 3333]
Options = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One op on one batch; `extra` adds to the inputs, `scale` multiplies q, k and v, `shift` moves all logits."""

    op: str
    dtype: torch.dtype = BF16
    heads: tuple[int, int] = (2, 2)
    dim: int = 64
    len_q: list[int] = field(default_factory=lambda: ROWS)
    len_k: list[int] | None = None
    options: Options = field(default_factory=dict)
    seeds: int = 0
    biased: bool = False
    hidden: int = 0  # first keys of every row that a bias of −inf hides
    rotary: bool = False
    scale: float = 1.0
    shift: float = 0.0

    def __str__(self) -> str:
        marks = [f"x{self.scale}" * (self.scale != 1), f"shift{self.shift}" * (self.shift != 0)]
        marks += [
            "biased" * self.biased,
            f"hidden{self.hidden}" * (self.hidden > 0),
            "rotary" * self.rotary,
            f"seeds{self.seeds}" * (self.seeds > 0),
        ]
        kind = (
            f"{self.heads[0]}/{self.heads[1]}x{self.dim}-{len(self.len_q)}{'self' if self.len_k is None else 'cross'}"
        )
        options = [f"{key}={value}" for key, value in self.options.items()]
        return "-".join([self.op, str(self.dtype)[6:], kind, *options, *filter(None, marks)])


def flash(**given: Any) -> Check:
    return Check("flash", **given)


def score(activation: str = "fast_gelu", **given: Any) -> Check:
    options = {"activation": activation, "pre_scale": 0.125} | given.pop("options", {})
    return Check("gdpa", options=options, **given)


def checks() -> list[Check]:
    found = []
    for dtype in (BF16, FP16, FP32):
        found += [flash(dtype=dtype, dim=dim) for dim in (64, 96, 128)]
        found += [score(dtype=dtype, dim=dim, len_k=KEYS) for dim in (64, 96, 128)]
        found += [flash(dtype=dtype, biased=True), flash(dtype=dtype, len_k=KEYS, options={"causal": True})]
        found += [flash(dtype=dtype, len_q=LONG), score("silu", dtype=dtype, len_q=LONG, options={"causal": True})]
        found += [Check("block", dtype, dim=dim, rotary=rotary) for dim in (64, 128) for rotary in (False, True)]
        found += [Check("pooled", dtype, len_k=KEYS, seeds=4), Check("pooled", dtype, len_k=LONG, seeds=4, dim=128)]
        found += [score(activation, dtype=dtype, len_k=KEYS) for activation in Activation]
    for options in ({"window": 37}, {"window": 100, "causal": True}, {"window": 0}):
        found += [
            flash(options=options),
            flash(options=options, len_k=KEYS),
            score("gelu", options=options, len_k=KEYS),
        ]
    found += [flash(heads=(4, 2), len_k=KEYS, dim=128), flash(heads=(4, 1), options={"causal": True}, biased=True)]
    found += [score(heads=(4, 2), len_k=KEYS), score(seeds=5, len_k=KEYS, heads=(4, 2))]
    found += [flash(dim=16, heads=(4, 4)), score("gelu_approx", dim=16), flash(dim=128, len_q=LONG)]
    found += [flash(dtype=dtype, len_q=[300, 700], biased=True, hidden=130) for dtype in (BF16, FP32)]
    found += [  # queries that see no key but hidden ones
        flash(dtype=dtype, len_q=rows, biased=True, hidden=hidden, options=options)
        for dtype in (BF16, FP32)
        for rows, hidden in (([2, 1], 1), ([300, 150, 1], 130), ([40, 3], 50))
        for options in ({}, {"causal": True}, {"window": 20})
    ]
    found += [flash(len_q=[1, 2, 3, 1, 1, 5, 7, 1], heads=(4, 1), dim=dim, options=options)  # short rows
              for dim in (64, 128) for options in ({}, {"causal": True}, {"window": 2})]  # fmt: skip
    found += [flash(options={"scale": scale}) for scale in (-0.125, 0.0)]
    found += [Check("pooled", len_k=KEYS, seeds=seeds, heads=(4, 2), options={"scale": -0.1}) for seeds in (4, 100)]
    found += [score(seeds=5, len_k=[0, 0, 0]), Check("pooled", len_k=[0, 0, 0], seeds=4)]
    found += [flash(options={"scale": 0.125}, shift=shift) for shift in (30.0, -30.0)]
    found += [flash(options={"scale": 0.125, "causal": True}, shift=shift) for shift in (30.0, -30.0)]
    found += [
        score(activation, scale=scale, dim=128) for activation in ("fast_gelu", "gelu", "silu") for scale in (0.1, 4)
    ]
    found += [
        score(len_q=LONG, dim=128),
        score(len_q=LONG, options={"window": 300}),
        Check("block", len_q=LONG, dim=128),
    ]
    found += [flash(dim=dim, len_q=rows, len_k=keys) for dim in (64, 128) for rows, keys in (([3, 0, 70], [0, 0, 0]), ([0, 0], [5, 0]))]  # fmt: skip # noqa: E501
    found += [score(dim=128, len_q=rows, len_k=keys) for rows, keys in (([3, 0, 70], [0, 0, 0]), ([0, 0], [5, 0]))]
    found += [flash(dim=128, len_q=rows, heads=(3, 3), options=options)  # whole blocks, rows for one consumer
              for rows in ([128, 256, 64], [1, 64, 65, 200, 190, 1]) for options in ({}, {"causal": True})]  # fmt: skip
    found += [score("silu", dim=128, len_q=[1, 64, 65, 200, 190, 1000, 1], options={"causal": True, "post_scale": 0.1})]
    found += [score(name, dim=128, len_k=KEYS, options={"window": 100}) for name in ("gelu_approx", "leaky_relu")]
    found += [flash(dim=128, len_q=LONG, options={"causal": True}), flash(dim=128, len_k=KEYS, options={"window": 70})]
    found += [
        flash(dim=64, heads=(8, 2), len_k=KEYS, options={"causal": True}),
        score(dim=128, heads=(6, 2), len_k=KEYS),
    ]
    found += [Check("block", heads=(4, 2), options={"block_size": size}) for size in (16, 48, 128)]
    found += [Check("pooled", len_k=KEYS, seeds=seeds, heads=(4, 2)) for seeds in (1, 20, 100)]
    return found


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0)


def inputs(check: Check) -> dict[str, Tensor]:
    """The tensors that the op is differentiated in, rounded to the check's dtype."""
    generator = torch.Generator("cuda").manual_seed(0)
    (heads, key_heads), dim = check.heads, check.dim
    len_k = check.len_q if check.len_k is None or check.op == "block" else check.len_k
    queries = check.seeds or sum(check.len_q)
    shapes = {"q": (queries, heads, dim), "k": (sum(len_k), key_heads, dim), "v": (sum(len_k), key_heads, dim)}
    if check.biased:
        shapes["bias"] = (heads, max(check.len_q) + 1, max(len_k) + 2)
    found = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator, device="cuda")
        x = x if name == "bias" else x.mul_(check.scale)
        if check.shift and name in "qk":  # one column whose product is the shift, exact in every dtype
            x[..., -1] = check.shift * 2 if name == "q" else 4.0
        if name == "bias":
            x[:, :, : check.hidden] = -torch.inf
        found[name] = x.to(check.dtype)
    return found


def call(check: Check, given: dict[str, Tensor]) -> Tensor:
    """The op of a check on its inputs."""
    q, k, v = given["q"], given["k"], given["v"]
    rows = offsets(check.len_q)
    keys = rows if check.len_k is None else offsets(check.len_k)
    if check.op == "flash":
        return jagged_flash_attention(q, k, v, rows, keys, 1, 1, bias=given.get("bias"), **check.options)
    if check.op == "gdpa":
        return gdpa(q, k, v, None if check.seeds else rows, keys, 1, 1, broadcast_q=check.seeds > 0, **check.options)
    if check.op == "pooled":
        return pooled_attention(q, k, v, keys, 1, **check.options)
    cos = sin = None
    if check.rotary:
        positions = torch.arange(max(check.len_q), device="cuda")[:, None]
        angles = positions * 0.9 ** torch.arange(q.shape[2] // 2, device="cuda")
        cos, sin = angles.cos(), angles.sin()
    return block_attention(q, k, v, rows, 1, cos=cos, sin=sin, **check.options)


def results(check: Check, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output and gradients by name; the output's gradient is a fixed random one."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    output = call(check, leaves)
    grad = torch.randn(output.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(check.dtype)
    grads = torch.autograd.grad(output, list(leaves.values()), grad.to(output.dtype))
    return {"output": output.detach()} | {f"grad_{name}": x for name, x in zip(leaves, grads, strict=True)}


def wanted(check: Check, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The definition in float64."""
    with dispatch.use("reference"):
        return results(check, {name: x.double() for name, x in given.items()})


def magnitude(check: Check, given: dict[str, Tensor]) -> Tensor:
    """‖ |act(S)| |V| ‖ of a GDPA check: what the output would be if nothing cancelled."""
    act = ACTIVATIONS[Activation(check.options["activation"])].function
    absolute = dict(given, v=given["v"].abs())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ACTIVATIONS, Activation(check.options["activation"]), lambda x: act(x).abs())
        with dispatch.use("reference"):
            return call(check, {name: x.double() for name, x in absolute.items()}).norm()


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("check", checks(), ids=str)
def test_equals_the_definition(check: Check) -> None:
    given = inputs(check)
    reference = wanted(check, given)
    for backend in backends(check, given["q"]):
        with dispatch.use(backend), guarded() as guards:
            guarded_inputs = {name: guards.copy(x) for name, x in given.items()}
            found, again = results(check, guarded_inputs), results(check, guarded_inputs)
        errors = {}
        for name, x in reference.items():
            assert torch.equal(found[name], again[name]), f"{backend}: {name} differs between two runs"
            size = magnitude(check, given) if (check.op, name) == ("gdpa", "output") else x.norm()
            size = size.clamp(min=1)  # norms below 1 belong to gradients that cancel to 0
            errors[name] = ((found[name].double() - x).norm() / size).item()
        report(f"{check}, {backend}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
        assert all(error <= TOLERANCE[check.dtype] for error in errors.values()), (backend, errors)


def backends(check: Check, q: Tensor) -> list[str]:
    """Those that run the check on this GPU."""
    op = {"flash": "jagged_flash_attention", "gdpa": "gdpa"}.get(check.op, f"{check.op}_attention")
    available = dispatch.options(op, q)
    return [x for x in ("triton", "hopper") if available[x] == "available" and not (x == "hopper" and check.biased)]


@pytest.fixture
def alone() -> Iterator[None]:
    """One such test at a time: each takes a quarter of the GPU's memory."""
    with (Path(tempfile.gettempdir()) / "gemctl_gpu_check.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("op", ["flash", "gdpa", "block", "pooled"])
def test_more_than_2_31_elements(op: str) -> None:
    """The last sequences of tensors whose elements an int32 does not count."""
    length, dim, heads = 512, 128, 4
    batch = 2**31 // (heads * dim * length) + 3
    options = {"activation": "fast_gelu", "pre_scale": 0.1} if op == "gdpa" else {}
    lengths = [length] * batch
    check = Check(op, heads=(heads, heads), dim=dim, len_q=lengths, options=options, seeds=4 if op == "pooled" else 0)
    given = inputs(check)
    found = results(check, given)
    last = 2 * length
    cut = Check(op, heads=(heads, heads), dim=dim, len_q=[length] * 2, options=options, seeds=check.seeds)
    part = {name: x if name == "q" and check.seeds else x[-last:] for name, x in given.items()}
    # Not through `results`, whose gradient of the output is drawn anew.
    leaves = {name: x.double().requires_grad_() for name, x in part.items()}
    with dispatch.use("reference"):
        output = call(cut, leaves)
    rows = output.shape[0]
    grad = torch.randn(found["output"].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    grads = torch.autograd.grad(output, list(leaves.values()), grad[-rows:].to(BF16).double())
    for name, x in zip(["output", *(f"grad_{name}" for name in leaves)], [output, *grads], strict=True):
        if not (check.seeds and name == "grad_q"):  # the whole batch's
            error = ((found[name][-len(x) :].double() - x).norm() / x.norm()).item()
            report(f"2^31 {op} {name} {error:.1e}")
            assert error <= 5e-3, name


def test_hopper_refuses_a_bias_by_name() -> None:
    rows = offsets([100])
    q = torch.randn(100, 2, 128, device="cuda", dtype=BF16)
    if dispatch.options("gdpa", q)["hopper"] != "available":
        pytest.skip("not a Hopper GPU, or another triton")
    with dispatch.use("hopper"):
        jagged_flash_attention(q, q, q, rows, rows, 1, 1)
        assert dispatch.used()["jagged_flash_attention on cuda"] == "hopper"
        with pytest.raises(InputError, match="it has a bias"):
            jagged_flash_attention(q, q, q, rows, rows, 1, 1, bias=torch.zeros(2, 100, 100, device="cuda"))


def test_strided_inputs() -> None:
    """Slices of one projection, transposed heads, an expanded gradient: the same as of contiguous copies."""
    rows = offsets([100, 3, 0, 260])
    fused = torch.randn(363, 3 * 4 * 64, device="cuda", dtype=BF16)
    q, k, v = (x.view(363, 4, 64) for x in fused.split(256, 1))
    turned = [torch.randn(4, 363, 64, device="cuda", dtype=BF16).transpose(0, 1) for _ in range(3)]
    for given in ((q, k, v), turned):
        found = []
        for copied in (False, True):
            a, b, c = ((x.contiguous() if copied else x).detach().requires_grad_() for x in given)
            output = jagged_flash_attention(a, b, c, rows, rows, 1, 1, causal=True)
            output = output + gdpa(a, b, c, rows, rows, 1, 1, activation="silu", pre_scale=0.1)
            found.append([output, *torch.autograd.grad(output.sum(), (a, b, c))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_short_bias_or_table_gives_nan() -> None:
    """What the host cannot check without waiting for the lengths is at least seen."""
    rows = offsets([100])
    q = torch.randn(100, 2, 64, device="cuda", dtype=BF16)
    bias, angles = torch.zeros(2, 90, 100, device="cuda"), torch.zeros(90, 32, device="cuda")
    short: list[Callable[[], Tensor]] = [
        lambda: jagged_flash_attention(q, q, q, rows, rows, 1, 1, bias=bias),
        lambda: block_attention(q, q, q, rows, 1, cos=angles, sin=angles),
    ]
    for run in short:
        output = run()
        assert bool(output[95].isnan().all())
        assert bool(output[:64].isfinite().all())


def test_schedule_without_host_sync() -> None:
    rows = offsets(ROWS)
    q = torch.randn(sum(ROWS), 2, 64, device="cuda", dtype=BF16, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            jagged_flash_attention(q, q, q, rows, rows, 1, 1).sum().backward()
            pooled_attention(q[:2], q, q, rows, 1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def report(line: str) -> None:
    """Shown by pytest -rP and kept in the report of a failure."""
    import sys  # noqa: PLC0415

    sys.stdout.write(line + "\n")
