"""Random jagged inputs of the four ops, and what is compared: the output and every gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemctl.kernels import dispatch
from gemctl.kernels.block_attention.op import block_attention
from gemctl.kernels.gdpa.activation import Activation
from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
from gemctl.kernels.pooled_attention.op import pooled_attention

HEAD_DIM = 8

# (queries, keys) of each row: empty rows on either side, rows of one token, very uneven ones, no token, no row
LENGTHS = {
    "self": ([3, 0, 5, 1, 40, 70, 3, 1], None),
    "alike": ([9, 8, 8, 7, 10, 9, 12, 11, 9, 2, 3, 2], None),
    "cross": ([3, 2, 0, 100, 5, 0, 1, 7], [8, 0, 4, 30, 50, 0, 1, 130]),
    "aligned": ([3, 4, 5, 6, 2, 20], [5, 6, 7, 8, 4, 22]),
    "longer queries": ([5, 6, 9, 8, 10, 7], [3, 4, 7, 6, 8, 5]),
    "small": ([2, 0, 3, 1], [3, 1, 2, 0]),
    "empty": ([0, 0], [0, 0]),
    "no query": ([0], [3]),
    "no key": ([3], [0]),
    "no row": ([], []),
}


@dataclass(frozen=True)
class Case:
    """One call of an op; `inputs(seed, dtype)` makes the tensors that it is differentiated in."""

    name: str
    call: Callable[..., Tensor]  # of the inputs
    shapes: dict[str, tuple[int, ...]]

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        draws = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes.values())
        # rounded to float32 first, so that all dtypes but the short ones see the same numbers
        return [draw.float().to(dtype).requires_grad_() for draw in draws]

    def results(self, inputs: list[Tensor]) -> dict[str, Tensor]:
        """Output and gradients, by name; the output's gradient is a fixed pattern."""
        output = self.call(*inputs)
        pattern = torch.sin(torch.arange(output.numel(), dtype=torch.float64).view(output.shape)).to(output.dtype)
        grads = torch.autograd.grad(output, inputs, pattern, allow_unused=True)
        named = zip(self.shapes, inputs, grads, strict=True)
        found = {f"grad_{name}": torch.zeros_like(x) if grad is None else grad for name, x, grad in named}
        return {"output": output.detach(), **found}


def offsets(lengths: list[int]) -> Tensor:
    """int64 [B+1]."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def _qkv(lengths: str, heads: int, key_heads: int) -> tuple[dict[str, tuple[int, ...]], Tensor, Tensor]:
    len_q, len_k = LENGTHS[lengths]
    len_k = len_q if len_k is None else len_k
    q, kv = (sum(len_q), heads, HEAD_DIM), (sum(len_k), key_heads, HEAD_DIM)
    return {"q": q, "k": kv, "v": kv}, offsets(len_q), offsets(len_k)


def flash(lengths: str, heads: int = 2, key_heads: int = 2, bias: bool = False, hides: int = 0, **options: Any) -> Case:
    """`hides`: the bias is −inf for the first so many keys of every row."""
    shapes, q_offsets, k_offsets = _qkv(lengths, heads, key_heads)
    if bias:
        longest = [int(side.diff().max()) if len(side) > 1 else 0 for side in (q_offsets, k_offsets)]
        shapes["bias"] = (heads, longest[0] + 1, longest[1] + 2)

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        added = rest[0] if rest else None
        if added is not None and hides:
            added = added.masked_fill(torch.arange(added.shape[2]) < hides, -torch.inf)
        return jagged_flash_attention(q, k, v, q_offsets, k_offsets, 100, 130, bias=added, **options)

    added = "-bias" + (f" hides {hides}" if hides else "") if bias else ""
    return Case(f"flash-{lengths}-{heads}/{key_heads}{added}-{options}", call, shapes)


def generalised(lengths: str, heads: int = 2, key_heads: int = 2, seeds: int = 0, **options: Any) -> Case:
    shapes, q_offsets, k_offsets = _qkv(lengths, heads, key_heads)
    if seeds:
        shapes["q"] = (seeds, heads, HEAD_DIM)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = None if seeds else q_offsets
        return gdpa(q, k, v, rows, k_offsets, 100, 130, broadcast_q=seeds > 0, **options)

    return Case(f"gdpa-{lengths}-{heads}/{key_heads}-seeds{seeds}-{options}", call, shapes)


def block(lengths: str, heads: int = 2, key_heads: int = 2, rotary: bool = False, **options: Any) -> Case:
    shapes, row_offsets, _ = _qkv(lengths, heads, key_heads)
    shapes["k"] = shapes["v"] = (shapes["q"][0], key_heads, HEAD_DIM)
    angles = torch.arange(110)[:, None] * 0.3 ** torch.arange(HEAD_DIM // 2)
    cos, sin = (angles.cos(), angles.sin()) if rotary else (None, None)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(q, k, v, row_offsets, 100, cos=cos, sin=sin, **options)

    return Case(f"block-{lengths}-{heads}/{key_heads}{'-rotary' if rotary else ''}-{options}", call, shapes)


def pooled(lengths: str, heads: int = 2, key_heads: int = 2, seeds: int = 3, **options: Any) -> Case:
    shapes, _, k_offsets = _qkv(lengths, heads, key_heads)
    shapes = {"seeds": (seeds, heads, HEAD_DIM), "k": shapes["k"], "v": shapes["v"]}

    def call(query: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return pooled_attention(query, k, v, k_offsets, 130, **options)

    return Case(f"pooled-{lengths}-{heads}/{key_heads}-{seeds}-{options}", call, shapes)


def all_cases() -> list[Case]:
    """Every op with every kind of batch and every option."""
    positions: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"window": 0},
        {"window": 3},
        {"window": 20, "causal": True},
        {"window": 500},
    ]
    cases = []
    for lengths in LENGTHS:
        cases += [flash(lengths, **options) for options in positions]
        cases += [generalised(lengths, activation="silu", post_scale=0.1, **options) for options in positions]
        cases += [block(lengths, block_size=size) for size in (1, 4, 64)]
        cases += [block(lengths, rotary=True, block_size=32), pooled(lengths), pooled(lengths, seeds=1, scale=0.5)]
        cases += [flash(lengths, bias=True), flash(lengths, bias=True, causal=True, window=20)]
        cases += [flash(lengths, bias=True, hides=4, **options) for options in ({}, {"causal": True}, {"window": 3})]
        cases += [generalised(lengths, seeds=3, activation="gelu", causal=True)]
    cases += [generalised("cross", activation=activation, pre_scale=0.7) for activation in Activation]
    for key_heads in (1, 2):
        cases += [flash("cross", 4, key_heads, causal=True), generalised("self", 4, key_heads, activation="relu")]
        cases += [block("self", 4, key_heads, rotary=True), pooled("cross", 4, key_heads)]
        cases += [generalised("cross", 4, key_heads, 2, activation="relu_square", window=9)]
    cases += [flash("self", scale=0.1, bias=True, key_heads=1)]
    cases += [flash("alike", scale=scale, causal=True) for scale in (0.0, -0.5)]
    return cases


def backends() -> list[str]:
    """The backends that run on the CPU in float64, too; Triton's interpreter has tests of its own."""
    probe = torch.device("cpu"), torch.float64, HEAD_DIM
    return [backend.name for backend in dispatch.BACKENDS if backend.refuses("gdpa", *probe) is None]


def small_cases() -> list[Case]:
    """One call of each op with its options, few tokens."""
    return [
        flash("small", bias=True, causal=True, window=2),
        flash("small", 2, 1),
        generalised("small", 2, 1, activation="gelu_approx", pre_scale=0.5, post_scale=2.0, window=2),
        generalised("small", seeds=2, activation="silu", causal=True),
        block("small", 2, 1, rotary=True, block_size=2),
        pooled("small", 2, 1),
    ]
