"""FLOP formulas against pairs counted one by one, through FlopCounterMode on real jagged batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gemctl.kernels.block_attention.op import block_attention
from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
from gemctl.kernels.pooled_attention.op import pooled_attention
from gemctl.specs import flops
from tests.kernels import cases

LEN_Q, LEN_K = [3, 2, 0, 9, 5, 0, 1, 7, 4], [8, 0, 4, 3, 5, 0, 1, 7, 40]
POSITIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": 0},
    {"window": 3},
    {"window": 2, "causal": True},
    {"window": 100},
]


def brute_force(queries: int, keys: int, causal: bool = False, window: int | None = None) -> int:
    count = 0
    for i in range(queries):
        position = i + keys - queries
        for j in range(keys):
            count += not (causal and j > position) and (window is None or abs(j - position) <= window)
    return count


def counted(call: Callable[[], Tensor]) -> tuple[int, int]:
    """FLOPs of a call's forward and backward."""
    with FlopCounterMode(display=False) as forward:
        output = call()
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def qkv(queries: int, keys: int) -> list[Tensor]:
    """Four query heads, two key heads, head dimension 8."""
    return [torch.randn(n, heads, 8, requires_grad=True) for n, heads in ((queries, 4), (keys, 2), (keys, 2))]


def test_pairs_equal_a_count_one_by_one() -> None:
    for options in POSITIONS:
        for queries in range(9):
            for keys in range(9):
                assert flops.pairs([queries], [keys], **options) == brute_force(queries, keys, **options)
    assert flops.pairs([], []) == 0
    assert flops.pairs([3_000_000_000], [3_000_000]) == 9_000_000_000_000_000


@pytest.mark.parametrize("options", POSITIONS, ids=str)
def test_flash_and_gdpa(options: dict[str, Any]) -> None:
    pairs = sum(brute_force(a, b, **options) for a, b in zip(LEN_Q, LEN_K, strict=True))
    q, k, v = qkv(sum(LEN_Q), sum(LEN_K))
    args = (q, k, v, cases.offsets(LEN_Q), cases.offsets(LEN_K), 9, 40)
    wanted = (4 * 4 * 8 * pairs, 2 * 4 * 4 * 8 * pairs)
    assert counted(lambda: jagged_flash_attention(*args, **options)) == wanted
    assert counted(lambda: gdpa(*args, activation="silu", **options)) == wanted
    pairs = sum(brute_force(3, keys, **options) for keys in LEN_K)
    shared = (q[:3], k, v, None, args[4], 3, 40)
    flops_shared = counted(lambda: gdpa(*shared, activation="silu", broadcast_q=True, **options))
    assert flops_shared == (4 * 4 * 8 * pairs, 2 * 4 * 4 * 8 * pairs)


def test_block_and_pooled() -> None:
    q, k, v = qkv(sum(LEN_K), sum(LEN_K))
    offsets = cases.offsets(LEN_K)
    pairs = sum((i // 4) == (j // 4) for n in LEN_K for i in range(n) for j in range(n))
    wanted = (4 * 4 * 8 * pairs, 2 * 4 * 4 * 8 * pairs)
    assert counted(lambda: block_attention(q, k, v, offsets, 40, block_size=4)) == wanted
    pairs = 3 * sum(LEN_K)
    wanted = (4 * 4 * 8 * pairs, 2 * 4 * 4 * 8 * pairs)
    assert counted(lambda: pooled_attention(q[:3], k, v, offsets, 40)) == wanted


def test_fake_offsets_cannot_be_counted() -> None:
    q, k, v = qkv(5, 5)
    with FakeTensorMode() as mode, FlopCounterMode(display=False):
        fake_q, fake_k, fake_v, offsets = (mode.from_tensor(x) for x in (q, k, v, cases.offsets([2, 3])))
        with pytest.raises(ValueError, match="count FLOPs on a real batch"):
            pooled_attention(fake_q, fake_k, fake_v, offsets, 3)
