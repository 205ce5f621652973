"""Every backend of every op against its plain definition in float64, and the definitions against padded formulas."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gemctl.kernels import dispatch
from gemctl.kernels.block_attention.op import block_attention
from gemctl.kernels.gdpa.activation import ACTIVATIONS, Activation
from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
from gemctl.kernels.pooled_attention.op import pooled_attention
from tests.kernels import cases
from tests.kernels.cases import Case

CASES = cases.all_cases()
SMALL = cases.small_cases()


@pytest.fixture(params=cases.backends())
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with dispatch.use(request.param):
        yield request.param


def expected(case: Case, inputs: list[Tensor]) -> dict[str, Tensor]:
    """What the definition gives in float64."""
    with dispatch.use("reference"):
        return case.results([x.detach().double().requires_grad_() for x in inputs])


@cache
def expected_of(index: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same for CASES[index] and its inputs rounded to `dtype`."""
    return expected(CASES[index], CASES[index].inputs(dtype))


def check_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float, name: str) -> None:
    """‖found − wanted‖ ≤ tolerance · max(1, ‖wanted‖), each; norms below 1 belong to gradients that cancel to 0."""
    for key, reference in wanted.items():
        assert found[key].shape == reference.shape, (name, key)
        error = (found[key].double() - reference).norm() / reference.norm().clamp(min=1)
        assert error <= tolerance, (name, key, error.item())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_equals_the_definition(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    rounded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    for index, case in enumerate(CASES):
        found = case.results(case.inputs(dtype))
        assert all(x.dtype == dtype for x in found.values()), case.name
        check_close(found, expected_of(index, rounded), tolerance, case.name)


def test_two_runs_are_bit_equal(backend: str) -> None:
    for case in CASES:
        inputs = case.inputs(torch.float32)
        first, second = case.results(inputs), case.results(inputs)
        assert all(torch.equal(first[key], second[key]) for key in first), case.name


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_gradients_by_finite_differences(backend: str, case: Case) -> None:
    assert torch.autograd.gradcheck(case.call, case.inputs(torch.float64))


def test_long_sequences(backend: str) -> None:
    """More scores than one piece may hold, beside short rows; windows and causal over many tiles."""
    offsets = cases.offsets([1500, 7, 0, 300])
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1807, 1, 4, generator=generator, dtype=torch.float64) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        args = (q, k, v, offsets, offsets, 1500, 1500)
        flash = [
            jagged_flash_attention(*args, window=w, causal=c) for w, c in ((None, False), (100, True), (70, False))
        ]
        scores = [gdpa(*args, activation="silu", causal=c, post_scale=1e-3) for c in (False, True)]
        return torch.cat([*flash, *scores, block_attention(q, k, v, offsets, 1500)])

    case = Case("long", call, {"q": q.shape, "k": k.shape, "v": v.shape})
    inputs = case.inputs(torch.float64)
    check_close(case.results(inputs), expected(case, inputs), 1e-12, "long")


def test_many_rows_of_one_length(backend: str) -> None:
    """A group larger than one batch of the CPU path may be."""
    offsets = torch.arange(301) * 20

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        args = (q, k, v, offsets, offsets, 20, 20)
        return torch.cat([jagged_flash_attention(*args), gdpa(*args, activation="relu")])

    case = Case("rows", call, dict.fromkeys("qkv", (6000, 2, 4)))
    inputs = case.inputs(torch.float64)
    check_close(case.results(inputs), expected(case, inputs), 1e-12, "rows")


def test_large_logits(backend: str) -> None:
    """Scores of ±30 and of thousands: no overflow, and the softmax of the definition."""
    for factor, shift in ((1.0, 30.0), (1.0, -30.0), (60.0, 0.0)):
        offsets = cases.offsets([5, 0, 40, 1])
        k = torch.randn(46, 1, 8, generator=torch.Generator().manual_seed(0)) * factor
        q = k * factor + shift / 8  # k's mean direction shifts all scores alike
        values = k.roll(1, 0)
        with dispatch.use("reference"):
            wanted = jagged_flash_attention(q.double(), k.double(), values.double(), offsets, offsets, 40, 40)
        found = jagged_flash_attention(q, k, values, offsets, offsets, 40, 40)
        assert (found - wanted).norm() <= 2e-5 * wanted.norm()


def test_query_without_key_gives_zero_and_no_gradient(backend: str) -> None:
    ones = torch.ones(4, 1, 4, requires_grad=True)
    q, k = ones * 2, ones[:2] * 3
    rows, keys = cases.offsets([3, 1]), cases.offsets([0, 2])
    outputs = [
        jagged_flash_attention(q, k, k, rows, keys, 3, 2),
        gdpa(q, k, k, rows, keys, 3, 2, activation="identity"),
        pooled_attention(q, k, k, keys, 2)[:, :3].flatten(0, 1)[:4],
        jagged_flash_attention(q, k, k, cases.offsets([0, 4]), keys, 4, 2, causal=True)[[0, 1, 0, 2]],
    ]
    for output in outputs:
        assert torch.equal(output[:2], torch.zeros(2, 1, 4))
        assert output[3].abs().sum() > 0
    grads = torch.autograd.grad(sum((x[:2].sum() for x in outputs), start=q.sum() * 0), ones)
    assert torch.equal(grads[0], torch.zeros(4, 1, 4))


def test_hints_and_strides_do_not_matter(backend: str) -> None:
    offsets = cases.offsets([3, 0, 5, 17])
    fused = torch.randn(25, 3, 2, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    strided, dense = fused.unbind(1), [x.contiguous() for x in fused.unbind(1)]
    calls: list[Callable[..., Tensor]] = [
        lambda q, k, v, n: jagged_flash_attention(q, k, v, offsets, offsets, n, n, causal=True),
        lambda q, k, v, n: gdpa(q, k, v, offsets, offsets, n, n, activation="silu", window=2),
        lambda q, k, v, n: block_attention(q, k, v, offsets, n, block_size=4),
        lambda q, k, v, n: pooled_attention(q[:4], k, v, offsets, n),
    ]
    for call in calls:
        outputs = [call(*strided, 17), call(*dense, 17), call(*dense, 1), call(*dense, 10**6)]
        grads = [torch.autograd.grad(output.square().sum(), fused, retain_graph=True)[0] for output in outputs]
        assert all(torch.equal(outputs[0], output) for output in outputs)
        assert all(torch.equal(grads[0], grad) for grad in grads)


def test_candidates_that_share_keys_are_one_longer_row(backend: str) -> None:
    """Offsets of candidates by request, applied to the candidates' own offsets, give what repeated keys give."""
    candidates, requests = cases.offsets([2, 1, 3, 0, 2]), torch.tensor([0, 2, 5])  # 2 and 3 candidates
    keys, repeated = cases.offsets([4, 3]), cases.offsets([4, 4, 3, 3, 3])
    q, k = torch.randn(8, 2, 8), torch.randn(7, 2, 8)
    copies = torch.cat([k[:4], k[:4], k[4:], k[4:], k[4:]])
    shared = gdpa(q, k, k, candidates[requests], keys, 5, 4, activation="gelu_approx")
    assert torch.allclose(shared, gdpa(q, copies, copies, candidates, repeated, 3, 4, activation="gelu_approx"))


# The definitions themselves, against padded formulas with a mask made pair by pair.


def padded(x: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Jagged [N, H, D] as [B, H, longest, D], zeros behind."""
    rows = [functional.pad(row, (0, 0, 0, 0, 0, longest - len(row))) for row in x.tensor_split(offsets[1:-1])]
    return torch.stack(rows).transpose(1, 2)


def unpadded(x: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([row[:, :n].transpose(0, 1) for row, n in zip(x, offsets.diff().tolist(), strict=True)])


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 2), (True, 3)])
@pytest.mark.parametrize("lengths", ["self", "cross", "aligned"])
def test_definitions_equal_padded_formulas(lengths: str, causal: bool, window: int | None) -> None:
    shapes, q_offsets, k_offsets = cases._qkv(lengths, 2, 2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes.values())
    len_q, len_k = q_offsets.diff().tolist(), k_offsets.diff().tolist()
    longest_q, longest_k = max(len_q), max(len_k)
    seen = torch.zeros(len(len_q), 1, longest_q, longest_k, dtype=torch.bool)
    for b, (queries, keys) in enumerate(zip(len_q, len_k, strict=True)):
        for i in range(queries):
            for j in range(keys):
                later = j - (i + keys - queries)
                seen[b, 0, i, j] = not (causal and later > 0) and (window is None or abs(later) <= window)
    dense_q, dense_k, dense_v = (
        padded(q, q_offsets, longest_q),
        padded(k, k_offsets, longest_k),
        padded(v, k_offsets, longest_k),
    )
    args = (q, k, v, q_offsets, k_offsets, longest_q, longest_k)
    soft = functional.scaled_dot_product_attention(dense_q, dense_k, dense_v, seen) * seen.any(-1, keepdim=True)
    general = (functional.silu(dense_q @ dense_k.mT * 0.5) * seen * 0.25) @ dense_v
    with dispatch.use("reference"):
        flash = jagged_flash_attention(*args, causal=causal, window=window)
        scores = gdpa(*args, activation="silu", pre_scale=0.5, post_scale=0.25, causal=causal, window=window)
    assert torch.allclose(flash, unpadded(soft.nan_to_num(), q_offsets), rtol=0, atol=1e-13)
    assert torch.allclose(scores, unpadded(general, q_offsets), rtol=0, atol=1e-13)


def test_block_and_pooled_definitions_equal_padded_formulas() -> None:
    shapes, offsets, _ = cases._qkv("self", 2, 2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes.values())
    lengths, seeds = offsets.diff(), torch.randn(3, 2, cases.HEAD_DIM, generator=generator, dtype=torch.float64)
    real = torch.arange(70) < lengths[:, None]
    same_block = torch.arange(70)[:, None] // 16 == torch.arange(70) // 16
    angles = torch.rand(70, cases.HEAD_DIM // 2, generator=generator, dtype=torch.float64)
    rotation = torch.polar(torch.ones_like(angles), angles)
    dense = [padded(x, offsets, 70) for x in (q, k, v)]
    turned = [torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotation).flatten(-2) for x in dense]
    mask = (same_block & real[:, None])[:, None]
    wanted = functional.scaled_dot_product_attention(turned[0], turned[1], turned[2], mask)
    wanted_pooled = functional.scaled_dot_product_attention(
        seeds.transpose(0, 1).expand(len(lengths), 2, 3, cases.HEAD_DIM), dense[1], dense[2], real[:, None, None]
    )
    with dispatch.use("reference"):
        blocks = block_attention(q, k, v, offsets, 70, block_size=16, cos=angles.cos(), sin=angles.sin())
        found = pooled_attention(seeds, k, v, offsets, 70)
    assert torch.allclose(blocks, unpadded(wanted.nan_to_num(), offsets), rtol=0, atol=1e-13)
    assert torch.allclose(found, wanted_pooled.nan_to_num().transpose(1, 2), rtol=0, atol=1e-13)


def test_activations_are_their_formulas() -> None:
    x = torch.linspace(-40, 40, 2001, dtype=torch.float64)
    tanh = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    formulas = {
        Activation.IDENTITY: x,
        Activation.GELU: 0.5 * x * torch.erfc(-x / 2**0.5),
        Activation.GELU_APPROX: tanh,
        Activation.FAST_GELU: tanh,
        Activation.RELU: x.clamp(min=0),
        Activation.RELU_SQUARE: x.clamp(min=0) ** 2,
        Activation.LEAKY_RELU: torch.where(x > 0, x, 0.01 * x),
        Activation.SILU: x / (1 + torch.exp(-x)),
        Activation.HARDSWISH: x * (x + 3).clamp(0, 6) / 6,
    }
    assert formulas.keys() == ACTIVATIONS.keys() == set(Activation)
    for activation, wanted in formulas.items():
        assert torch.allclose(ACTIVATIONS[activation](x), wanted, rtol=1e-12, atol=1e-14), activation
