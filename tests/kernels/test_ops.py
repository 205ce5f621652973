"""The ops as PyTorch sees them: schema, fake kernels, compilation, what is refused, and which backend runs."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from gemctl.errors import InputError
from gemctl.kernels import dispatch
from gemctl.kernels.block_attention.op import block_attention
from gemctl.kernels.gdpa.activation import ScoreFunction
from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged import every, kept
from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
from gemctl.kernels.pooled_attention.op import pooled_attention
from tests.kernels import cases
from tests.kernels.cases import Case

SMALL = cases.small_cases()
OFFSETS = cases.offsets([2, 0, 3])


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def op_calls() -> list[tuple[Any, tuple[Any, ...]]]:
    """Each forward and backward op with real arguments."""
    q, k, v, bias, seeds = tensors((5, 2, 4), (5, 1, 4), (5, 1, 4), (2, 3, 3), (2, 2, 4))
    ops, schedule = torch.ops.gemctl, [OFFSETS]  # which the CPU does not read
    rows = OFFSETS, OFFSETS, schedule
    options = *rows, 0.5, True, 1, None
    score = ("gelu_approx", 0.5, 2.0, False, None, None)
    block = (q, k, v, OFFSETS, schedule, 2, 0.5, torch.ones(3, 2), torch.zeros(3, 2), None)
    output, lse = (x.detach() for x in ops.jagged_flash_attention(q, k, v, bias, *options))
    pooled = [x.detach() for x in ops.pooled_attention(seeds, k, v, OFFSETS, schedule, 0.5, None)]
    grad = torch.randn(5, 2, 4)
    tables = (5, 5, torch.float32, 4, 0, False, None, False, None)
    return [
        (ops.jagged_flash_attention, (q, k, v, bias, *options)),
        (ops.jagged_flash_attention, (q, k, v, None, *options)),
        (ops.jagged_flash_attention_backward, (grad, output, lse, q, k, v, bias, *rows, True, *options[3:])),
        (ops.jagged_flash_attention_backward, (grad, output, lse, q, k, v, None, *rows, False, *options[3:])),
        (ops.gdpa, (q, k, v, *rows, *score)),
        (ops.gdpa, (seeds, k, v, None, OFFSETS, schedule, *score)),
        (ops.gdpa_backward, (grad, q, k, v, *rows, *score)),
        (ops.block_attention, block),
        (ops.block_attention_backward, (grad, output, lse, *block)),
        (ops.pooled_attention, (seeds, k, v, OFFSETS, schedule, 0.5, None)),
        (ops.pooled_attention_backward, (pooled[0], *pooled, seeds, k, v, OFFSETS, schedule, 0.5, None)),
        (ops.tile_tables, (OFFSETS, OFFSETS, "gdpa", *tables)),
    ]


def permuted(x: Tensor) -> Tensor:
    """The same values, the last two dimensions swapped in memory."""
    return x.mT.contiguous().mT if x.dim() > 1 else x


def test_schema_and_fake_kernels() -> None:
    """Shapes, dtypes and strides, also for inputs with strides of their own."""
    for op, args in op_calls():
        backward = op.__name__.endswith("backward")
        plain = tuple(x.detach() if backward and isinstance(x, Tensor) else x for x in args)
        strided = tuple(permuted(x.detach()) if isinstance(x, Tensor) else x for x in args)
        for inputs in (plain, strided):
            torch.library.opcheck(op.default, inputs, test_utils=("test_schema", "test_faketensor"))
        if not backward:
            torch.library.opcheck(op.default, plain, test_utils="test_autograd_registration")


@pytest.mark.parametrize("index", [0, 4, 5, 7, 9])
def test_traces_with_dynamic_shapes(index: int) -> None:
    op, args = op_calls()[index]
    torch.library.opcheck(op.default, args, test_utils="test_aot_dispatch_dynamic")


def test_fake_tensors_and_meta_tensors_have_the_shapes() -> None:
    for case in SMALL:
        wanted = case.results(case.inputs(torch.bfloat16))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            found = case.results([mode.from_tensor(x).requires_grad_() for x in case.inputs(torch.bfloat16)])
        assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
            name: (x.shape, x.dtype) for name, x in wanted.items()
        }, case.name
    q, offsets = torch.empty(5, 2, 4, device="meta"), OFFSETS.to("meta")
    assert pooled_attention(q, q, q, offsets, 3).shape == (3, 5, 2, 4)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_second_and_forward_mode_derivatives_are_refused(case: Case) -> None:
    inputs = case.inputs(torch.float64)
    grads = torch.autograd.grad(case.call(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once, not twice"):
        torch.autograd.grad(grads[0].sum(), inputs)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in inputs]
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            case.call(*duals)


def test_no_shared_query_has_gradients_of_zero() -> None:
    q, k = tensors((0, 2, 4), (5, 2, 4))
    output = gdpa(q, k, k, None, OFFSETS, 0, 3, activation="relu", broadcast_q=True)
    grads = torch.autograd.grad(output.sum(), (q, k))
    assert grads[0].shape == (0, 2, 4)
    assert torch.equal(grads[1], torch.zeros(5, 2, 4))


def test_bias_and_key_gradients_only_where_asked() -> None:
    q, k, v, bias = tensors((5, 2, 4), (5, 2, 4), (5, 2, 4), (2, 3, 3))
    output = jagged_flash_attention(q, k.detach(), v.detach(), OFFSETS, OFFSETS, 3, 3, bias=bias.detach())
    output.sum().backward()
    assert q.grad is not None
    assert bias.grad is None


# (what is wrong, the call, the words of the message)
Q, K, BIAS = torch.zeros(5, 2, 4), torch.zeros(5, 2, 4), torch.zeros(2, 2, 3)
REFUSED: list[tuple[Callable[[], Tensor], str]] = [
    (lambda: jagged_flash_attention(Q[0], K, K, OFFSETS, OFFSETS, 3, 3), r"q must be \[tokens, heads, head_dim\]"),
    (lambda: jagged_flash_attention(Q, K[:, :, :3], K, OFFSETS, OFFSETS, 3, 3), "must have one shape; head_dim of q"),
    (lambda: pooled_attention(Q[:, :0], K, K, OFFSETS, 3), r"seeds needs at least one head .* not \[5, 0, 4\]"),
    (lambda: pooled_attention(Q, K[:, :0], K[:, :0], OFFSETS, 3), r"k needs at least one head .* not \[5, 0, 4\]"),
    (lambda: pooled_attention(Q[:, :, :0], K[..., :0], K[..., :0], OFFSETS, 3), "seeds needs .*; k needs at least one"),
    (lambda: gdpa(Q[:, :1], K, K, OFFSETS, OFFSETS, 3, 3, activation="silu"), r"heads of k and v \(2\) must divide"),
    (lambda: pooled_attention(Q.double(), K, K, OFFSETS, 3), "seeds, k, v must have one floating dtype"),
    (lambda: pooled_attention(Q, K, K, OFFSETS.int(), 3), r"k_offsets must be int64 \[B\+1\]"),
    (lambda: pooled_attention(Q, K, K, OFFSETS.repeat_interleave(2)[::2], 3), "contiguous, not of stride 2"),
    (lambda: gdpa(Q, K, K, OFFSETS[:3], OFFSETS, 3, 3, activation="silu"), "offsets of one batch have one length"),
    (lambda: gdpa(Q, K, K, OFFSETS, OFFSETS, 3, 3, activation="sigmoid"), "one of identity, gelu.* not 'sigmoid'"),
    (lambda: gdpa(Q, K, K, None, OFFSETS, 3, 3, activation="silu"), "q_offsets must be None with broadcast_q"),
    (lambda: gdpa(Q, K, K, OFFSETS, OFFSETS, 3, 3, activation="silu", window=-1), "window must be ≥ 0"),
    (lambda: jagged_flash_attention(Q, K, K, OFFSETS, OFFSETS, 3, 3, bias=Q[0]), "bias must be"),
    (lambda: jagged_flash_attention(Q[0, 0], K, K, OFFSETS, OFFSETS, 3, 3, bias=BIAS), r"q must be .* not \[4\]"),
    (lambda: jagged_flash_attention(Q, K, K, OFFSETS, OFFSETS, 3, 3, bias=BIAS > 0), "bias must be floating"),
    (lambda: jagged_flash_attention(Q, K, K, OFFSETS, OFFSETS, 3, 3, bias=BIAS), "short of the longest"),
    (lambda: block_attention(Q, K, K, OFFSETS, 3, block_size=0), "block_size must be ≥ 1"),
    (lambda: block_attention(Q, K, K, OFFSETS, 3, cos=torch.ones(3, 2)), "cos and sin come together"),
    (lambda: block_attention(Q, K, K, OFFSETS, 3, cos=torch.ones(2, 2), sin=torch.ones(2, 2)), "short of the longest"),
    (
        lambda: block_attention(Q, K, K, OFFSETS, 3, cos=torch.ones(3, 2), sin=torch.ones(2, 2)),
        r"sin \[2, 2\] are short",
    ),
    (lambda: block_attention(Q[0, 0, 0], K, K, OFFSETS, 3), r"q must be .* not \[\]"),
    (lambda: block_attention(Q, K, K, OFFSETS, 3, cos=torch.ones(3, 1), sin=torch.ones(3, 2)), "cos must be"),
    (lambda: block_attention(Q, K[:4], K[:4], OFFSETS, 3), "q has 5 tokens, k 4"),
    (lambda: block_attention(Q, K, K, OFFSETS + 1, 3), "offsets must rise from 0 to the 5 tokens"),
    (lambda: jagged_flash_attention(Q, K, K, OFFSETS, OFFSETS.flip(0), 3, 3), "k_offsets must rise from 0"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_wrong_inputs_are_refused_by_name(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_all_violations_come_at_once() -> None:
    with pytest.raises(ValueError, match=r"window .*activation|activation .*window"):
        gdpa(Q, K, K, OFFSETS, OFFSETS, 3, 3, activation="exp", window=-1)


def test_rotary_tables_that_want_a_gradient_are_refused() -> None:
    tables = {"cos": torch.ones(3, 2, requires_grad=True), "sin": torch.zeros(3, 2)}
    with pytest.raises(ValueError, match="cos requires a gradient"):
        block_attention(Q, K, K, OFFSETS, 3, **tables)  # type: ignore[arg-type]


def test_an_activation_that_is_not_zero_at_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"act\(0\) must be 0.*0\.5"):
        ScoreFunction(torch.sigmoid)


def test_backends() -> None:
    pooled_attention(Q, K, K, OFFSETS, 3)
    assert dispatch.used()["pooled_attention on cpu"] == "cpu"
    triton = "needs tensors on a GPU, not on cpu"
    hopper = "needs tensors on a Hopper GPU (sm_90), not on cpu"
    found = {"cpu": "available", "hopper": hopper, "triton": triton, "reference": "only by name"}
    assert dispatch.options("gdpa", Q) == found
    with pytest.raises(InputError, match="unknown kernel backend 'tritno': there are cpu, triton, hopper, reference"):
        dispatch.use("tritno").__enter__()
    elsewhere = torch.device("meta"), torch.float32, 4
    reasons = r"\(cpu: needs tensors on the CPU.*triton: needs.*hopper: needs"
    with pytest.raises(InputError, match=f"no backend for gdpa on meta {reasons}"):
        dispatch.load("gdpa", *elsewhere, None)
    with pytest.raises(InputError, match="no backend for gdpa on meta named 'cpu'"):
        dispatch.load("gdpa", *elsewhere, "cpu")


def test_backward_runs_on_the_forwards_backend() -> None:
    (q,) = tensors((5, 2, 4))
    with dispatch.use("cpu"):
        output = pooled_attention(q, q, q, OFFSETS, 3)
    with dispatch.use("reference"):
        output.sum().backward()  # the definition has no backward op: this would fail if it were asked for
    assert q.grad is not None


def test_what_offsets_alone_decide_is_kept_for_the_same_offsets() -> None:
    made: list[int] = []

    def of(offsets: Tensor, other: Tensor | None = None, key: str = "a") -> int:
        def make() -> int:
            made.append(len(made))
            return made[-1]

        return kept(key, make, offsets, other)

    rows, other = torch.tensor([0, 4, 5]), torch.tensor([0, 1, 2])
    assert [of(rows), of(rows), of(rows, key="b"), of(rows)] == [0, 0, 1, 0]
    assert [of(rows.clone()), of(rows)] == [2, 0]
    assert [of(rows, other), of(rows, other), of(rows, rows), of(rows, other.clone())] == [3, 3, 4, 5]
    rows[1] = 3
    assert [of(rows), of(rows)] == [6, 6]
    assert of(rows, other) == 7
    other[1] = 2
    assert of(rows, other) == 8


def test_nothing_is_kept_of_inference_mode_or_under_a_dispatch_mode() -> None:
    rows = torch.tensor([0, 4, 5])
    assert every(3, rows).tolist() == [0, 3, 6]
    assert every(3, rows) is every(3, rows)
    with torch.inference_mode():
        assert every(7, rows).is_inference()
        unversioned = rows.clone()
        assert every(7, unversioned) is not every(7, unversioned)
    assert every(7, unversioned) is not every(7, unversioned)
    assert not every(7, rows).is_inference()
    with FakeTensorMode():
        assert isinstance(every(9, torch.zeros(3, dtype=torch.int64)), FakeTensor)


def test_what_is_kept_goes_with_the_offsets() -> None:
    rows = torch.tensor([0, 4, 5])
    gone = ref(every(2, rows))
    assert gone() is not None
    del rows
    assert gone() is None


def test_offsets_of_equal_lengths_do_not_break_a_compiled_graph() -> None:
    def step(offsets: Tensor) -> Tensor:
        return every(3, offsets) + offsets

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    for lengths in ([2, 0, 5], [1] * 7, []):
        rows = cases.offsets(lengths)
        assert torch.equal(compiled(rows), 3 * torch.arange(len(lengths) + 1) + rows)
