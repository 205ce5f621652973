"""How the Hopper kernels are called: descriptors, sizes and the launch, for both ops."""

from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from gemctl.kernels.hopper.backward import grad_kernel
from gemctl.kernels.hopper.forward import forward_kernel
from gemctl.kernels.hopper.pipeline import HEIGHT, ROWS
from gemctl.kernels.hopper.ragged import descriptor, packed, tensor_map
from gemctl.kernels.hopper.scores import folded
from gemctl.kernels.tables import Table, is_long, slots
from gemctl.kernels.triton_launch import FAR, empty, reach

REGISTERS = 168  # of a thread at the start: 384 threads, which then give to each other (setmaxnreg)
SLOTS = {64: 4, 128: 2}  # blocks of keys, and of values, in flight by head dimension: what shared memory holds
GRAD_SLOTS = {64: 6, 128: 3}  # the same of the backward: pairs of blocks
HOPPER_MULTIPROCESSORS = 132  # where there is no GPU (the kernels are compiled)


def tables(causal: bool, window: int | None) -> tuple[Table, ...]:
    """Those of the tiles of queries, for the forward and their gradient, and of keys; of all tiles a row sees all."""
    height = _height(causal or window is not None)
    return Table(False, height, height, FAR, FAR), Table(True, height, height, FAR, FAR)


def _height(positional: bool) -> int:
    """Rows of a schedule's item: a tile, or a pair of them (gemctl/kernels/hopper/tiles.py)."""
    return HEIGHT.value * 2 if positional else HEIGHT.value


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    kind: str,
    scale: float,
    post_scale: float,
    causal: bool,
    window: int | None,
    broadcast: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(output [N, H, D], for softmax LSE [N, H] in float32, natural, −inf where a query sees no key; else None).

    q [N, H, D], with `broadcast` [S, H, D] of every sequence, where q_offsets are multiples of S and N = B·S. kind:
    "softmax" or an activation. As gdpa and jagged_flash_attention otherwise, in bfloat16.
    """
    q, scale = positive(q, scale)
    (heads, head), batch = q.shape[1:], k_offsets.shape[0] - 1
    tokens = q.shape[0] * (batch if broadcast else 1)
    output = empty((tokens, heads, head), q.dtype, q.device)
    lse = empty((tokens, heads), torch.float32, q.device) if kind == "softmax" else None
    if tokens == 0:
        return output, lse
    (behind, ahead), positional = reach(causal, window), causal or window is not None
    constants, order = folded(kind, scale), schedule[0]
    block = _block(kind, k.shape[0], batch)
    launch(
        forward_kernel,
        slots(tokens, _height(positional), batch) * heads,
        (order, q_offsets, k_offsets, order if lse is None else lse),
        [(q, ROWS.value), (k, block), (v, block), (output, ROWS.value)],
        (heads, heads // k.shape[1], constants.a, constants.b, constants.unit * post_scale, behind, ahead),
        {
            "KIND": kind,
            "POSITIONAL": positional,
            "BROADCAST": broadcast,
            "D": head,
            "BLOCK": block,
            "SLOTS": SLOTS[head] * 128 // block,
            "LOADED": block < 128,
        },
    )
    return output, lse


def backward(
    grad: Tensor,
    output: Tensor | None,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    schedule: list[Tensor],
    kind: str,
    scale: float,
    post_scale: float,
    causal: bool,
    window: int | None,
    broadcast: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given that of the output [N, H, D]; for softmax with the forward's output and LSE."""
    sign = (scale > 0) - (scale < 0)
    q, scale = positive(q, scale)
    heads, (key_heads, head), batch = q.shape[1], k.shape[1:], k_offsets.shape[0] - 1
    # Shared queries get a part from every row.
    grad_q, grad_k, grad_v = (empty(x.shape, x.dtype, x.device) for x in (grad, k, v))
    (behind, ahead), positional = reach(causal, window), causal or window is not None
    constants = folded(kind, scale)
    of_scores = scale * constants.slope_unit * post_scale
    scales = constants.a, constants.b, of_scores, constants.unit * post_scale
    rows, keys = (q, grad), (k, v)
    kinds = {"KIND": kind, "POSITIONAL": positional, "BROADCAST": broadcast}
    sizes = {"D": head, "SLOTS": GRAD_SLOTS[head]}
    delta = None if lse is None else empty(lse.shape, torch.float32, q.device)
    if grad.shape[0]:
        order = schedule[0]
        saved = [order if x is None else x for x in (lse, delta, output)]
        launch(
            grad_kernel,
            slots(grad.shape[0], _height(positional), batch) * heads,
            (order, q_offsets, k_offsets, *saved[:2], saved[2].contiguous()),
            [(x, ROWS.value) for x in (*rows, *keys, grad_q, grad_q)],
            (heads, heads // key_heads, *scales, behind, ahead),
            kinds | {"OF_KEYS": False} | sizes,
        )
    if k.shape[0]:
        order = schedule[1]
        saved = [order if x is None else x for x in (lse, delta)]
        launch(
            grad_kernel,
            slots(k.shape[0], _height(positional), batch) * key_heads,
            (order, k_offsets, q_offsets, *saved, order),
            [(x, ROWS.value) for x in (*keys, *rows, grad_k, grad_v)],
            (key_heads, heads // key_heads, *scales, ahead, behind),
            kinds | {"OF_KEYS": True} | sizes,
        )
    if broadcast:
        grad_q = grad_q.view(-1, *q.shape).sum(0, dtype=torch.float32).to(q.dtype)
    return grad_q if sign == 1 else grad_q * sign, grad_k, grad_v


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a scale above 0, which the kernels need."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def _block(kind: str, keys: int, batch: int) -> int:
    """Keys of a block of the forward. Few suit short rows; their queries then have room in registers."""
    return 128 if kind == "softmax" or is_long(keys, batch) else 64


_compiled: dict[tuple[Any, ...], Any] = {}
MOST_COMPILED = 1024  # kernels kept


def launch(
    kernel: Any,
    places: int,
    tensors: tuple[Tensor, ...],
    described: list[tuple[Tensor, int]],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
) -> None:
    """Starts a kernel, one program a multiprocessor, on the current stream of the tensors' device.

    Its arguments in their order: tensors, a schedule first; tensors that it gets as descriptors, with the rows of a
    block; `places`, tiles times heads; numbers; constexprs. Triton looks for the compiled kernel in some 50 µs, so it
    is kept here by all that it is compiled for.
    """
    index = tensors[0].get_device()
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(kernel, places, tensors, described, numbers, constants)
    programs = min(_multiprocessors(index), places)
    described = [(_some(x), rows) for x, rows in described]
    aligned = index >= 0 and reduce(or_, [x.data_ptr() for x in tensors]) % 16 == 0
    key = (kernel.fn, index, *constants.values())
    compiled = _compiled.get(key) if aligned else None
    if compiled is not None:
        maps = [tensor_map(x) for x, _ in described]
        stream, values = torch._C._cuda_getCurrentRawStream(index), constants.values()
        hooks = None, None, None
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(programs, 1, 1, stream, function, metadata, *hooks, *tensors, *maps, places, *numbers, *values)
        return None
    given = *tensors, *[descriptor(x, rows) for x, rows in described], places, *numbers
    # Four warps: those of the first consumer; the other roles' come on top.
    compiled = kernel[(programs,)](*given, **constants, num_warps=4, maxnreg=REGISTERS)
    if aligned:
        if len(_compiled) == MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled
    return None


def _some(x: Tensor) -> Tensor:
    """x as `packed` gives it; where it has no rows, anything that has an address, of which nothing is read."""
    return packed(x) if x.shape[0] else x.new_zeros(1, *x.shape[1:])


@cache
def _multiprocessors(index: int) -> int:
    if index < 0:
        return HOPPER_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
