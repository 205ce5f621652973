"""The ops in compiled and exported graphs: one graph for all lengths, results of eager calls, tables made once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.export import Dim
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from gemctl.kernels.block_attention.op import block_attention
from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged import every
from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
from gemctl.kernels.pooled_attention.op import pooled_attention
from tests.kernels import cases, interpreted
from tests.support.world import run_world

Op = Callable[..., Tensor]  # of q, k, v and offsets
BATCHES = [[5, 0, 3, 7], [9, 8, 7], [1, 30, 2, 2, 9], [0, 4], [700, 0, 900]]


def flash(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return jagged_flash_attention(q, k, v, rows, rows, 1, 1, causal=True)


def score(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    keys, count = every(2, rows), 2 * (rows.shape[0] - 1)
    return gdpa(q, k[:count], v[:count], rows, keys, 1, 2, activation="fast_gelu", pre_scale=0.1)


def shared(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return gdpa(q[:3], k, v, None, rows, 3, 1, activation="silu", broadcast_q=True)


def block(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return block_attention(q, k, v, rows, 1, block_size=4)


def pooled(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return pooled_attention(q[:3], k, v, rows, 1)


OPS: list[Op] = [flash, score, shared, block, pooled]


def inputs(lengths: list[int], strided: bool = False) -> list[Tensor]:
    """q, k, v [N, 2, 8]; `strided`: parts of a tensor that holds all three."""
    generator = torch.Generator().manual_seed(sum(lengths))
    packed = torch.randn(sum(lengths), 3, 2, 8, generator=generator)
    return [x if strided else x.contiguous() for x in packed.unbind(1)]


def results(op: Op, x: list[Tensor], rows: Tensor, wanted: tuple[int, ...] = (0, 1, 2)) -> list[Tensor]:
    """The output and the gradients of some of the inputs."""
    leaves = [y.detach().requires_grad_(i in wanted) for i, y in enumerate(x)]
    output = op(*leaves, rows)
    pattern = torch.sin(torch.arange(output.numel())).view(output.shape)
    return [output.detach(), *torch.autograd.grad(output, [leaves[i] for i in wanted], pattern)]


def check_compiled(op: Op, backend: Any, batches: list[list[int]] = BATCHES, **given: Any) -> None:
    """One graph, and what it gives is equal to what eager calls give."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend=backend)
    for lengths in batches:
        x, rows = inputs(lengths), cases.offsets(lengths)
        for found, wanted in zip(results(compiled, x, rows, **given), results(op, x, rows, **given), strict=True):
            assert torch.equal(found, wanted), lengths
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("op", OPS)
def test_one_graph_for_all_lengths(op: Op) -> None:
    check_compiled(op, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_one_inductor_graph_for_all_lengths(op: Op) -> None:
    check_compiled(op, "inductor")


@pytest.mark.parametrize(("op", "wanted"), [(flash, (0,)), (score, (2,)), (block, (1, 2))])
def test_gradients_of_some_inputs_only(op: Op, wanted: tuple[int, ...]) -> None:
    check_compiled(op, "aot_eager", BATCHES[:2], wanted=wanted)


def test_inputs_with_strides_and_batches_without_tokens() -> None:
    compiled = torch.compile(flash, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([2, 3], [0, 0], []):
        x, rows = inputs(lengths, strided=True), cases.offsets(lengths)
        for found, wanted in zip(results(compiled, x, rows), results(flash, x, rows), strict=True):
            assert torch.equal(found, wanted), lengths


@pytest.mark.parametrize("op", [flash, score, block])
def test_checkpointed_calls_give_the_same(op: Op) -> None:
    """Checkpointing hands out what is saved for the backward only once."""

    def checkpointed(*args: Tensor) -> Any:
        return checkpoint(op, *args, use_reentrant=False)

    x, rows = inputs([5, 3]), cases.offsets([5, 3])
    for found, wanted in zip(results(checkpointed, x, rows), results(op, x, rows), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("op", OPS)
def test_exports_with_any_number_of_rows(op: Op) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
            return op(q, k, v, rows)

    example = *inputs([5, 3, 7]), cases.offsets([5, 3, 7])
    exported = torch.export.export(Module(), example, dynamic_shapes=[{0: Dim.DYNAMIC}] * 4).module()
    for lengths in BATCHES:
        x, rows = inputs(lengths), cases.offsets(lengths)
        assert torch.equal(exported(*x, rows), op(*x, rows)), lengths


def layers(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    for _ in range(2):
        q = score(flash(q, k, v, rows), k, v, rows)
    return q


def tables_made() -> list[int]:
    """In the graphs of the forward and the backward of `layers`, in Triton's interpreter."""
    interpreted.start()
    from gemctl.kernels import dispatch  # noqa: PLC0415

    made: list[int] = []

    def count(graph: GraphModule, _: Any) -> Callable[..., Any]:
        made.append(sum("tile_tables" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)  # as Inductor does
    with dispatch.use("triton"):
        check_compiled(layers, backend, [[3, 1]])
    return made


def test_compiled_layers_make_the_tables_of_their_batch_once() -> None:
    """Those of flash attention and those of GDPA; the backward has them from the forward."""
    assert run_world(1, tables_made, gloo=False) == [[2, 0]]


def compiled_in_the_interpreter() -> None:
    interpreted.start()
    from gemctl.kernels import dispatch  # noqa: PLC0415

    with dispatch.use("triton"):
        for op in OPS:
            check_compiled(op, "aot_eager", [[5, 0, 4], [1, 12]])


@pytest.mark.slow
def test_compiles_with_the_triton_backend() -> None:
    """Whose tables have the sizes that the graph was made for."""
    run_world(1, compiled_in_the_interpreter, gloo=False)
