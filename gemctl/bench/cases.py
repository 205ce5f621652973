"""The inputs of the kernel benchmark: jagged batches with the shapes of the published GEM benchmarks.

A peer is a function of a `Case`. It returns its forward as a callable without arguments, differentiable with respect to
the case's q, k and v, or None if it does not support the case:

    def my_peer(case: Case) -> Callable[[], Tensor] | None: ...
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gemctl.kernels.block_attention.op import block_attention
from gemctl.kernels.gdpa.op import gdpa
from gemctl.kernels.jagged_flash_attention.op import jagged_flash_attention
from gemctl.kernels.pooled_attention.op import pooled_attention
from gemctl.specs import flops

BLOCK = 64
SEEDS = 4
ACTIVATION = "fast_gelu"


@dataclass(frozen=True)
class Shape:
    """Lengths of a case: uniform on [1, longest], or all `longest` if `full`; `keys`: a fixed count of keys per row."""

    name: str
    longest: int
    full: bool = False
    keys: int | None = None
    causal: bool = False
    rows: float = 1.0  # fraction of the batch


SHAPES = (
    Shape("s=.5 L=256", 256),
    Shape("s=.5 L=512", 512),
    Shape("s=.5 L=1024", 1024),
    Shape("s=.5 L=2048", 2048),
    Shape("s=1 L=2048", 2048, full=True, rows=0.5),
    Shape("cross 1024 x 256", 1024, full=True, keys=256),
    Shape("causal s=.5 L=2048", 2048, causal=True),
)
SMALL = (Shape("s=.5 L=16", 16), Shape("cross 16 x 4", 16, full=True, keys=4))
OPS: dict[str, Callable[[Shape], bool]] = {
    "gdpa": lambda shape: True,
    "jagged_flash_attention": lambda shape: True,
    "block_attention": lambda shape: shape.keys is None and not shape.causal,
    "pooled_attention": lambda shape: shape.keys is None and not shape.causal,
}
MEMORY_BOUND = ("block_attention", "pooled_attention")


@dataclass(frozen=True)
class Case:
    """One op on one batch: q [ΣLq, H, D] (pooled: the seeds), k and v [ΣLk, H, D], their offsets int64 [B+1]."""

    op: str
    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    max_q: int
    max_k: int

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float(self.q.shape[-1] ** -0.5)

    def call(self) -> Tensor:
        """The output of gemctl's op."""
        both = self.q, self.k, self.v, self.q_offsets, self.k_offsets, self.max_q, self.max_k
        if self.op == "gdpa":
            return gdpa(*both, activation=ACTIVATION, pre_scale=self.scale, causal=self.shape.causal)
        if self.op == "jagged_flash_attention":
            return jagged_flash_attention(*both, causal=self.shape.causal)
        if self.op == "block_attention":
            return block_attention(self.q, self.k, self.v, self.k_offsets, self.max_k, block_size=BLOCK)
        return pooled_attention(self.q, self.k, self.v, self.k_offsets, self.max_k)

    def flops(self) -> int:
        """Useful FLOPs of a forward."""
        len_q, len_k = (x.diff().cpu().numpy() for x in (self.q_offsets, self.k_offsets))
        pairs = {
            "block_attention": lambda: flops.block_pairs(len_k, BLOCK),
            "pooled_attention": lambda: flops.pooled_pairs(SEEDS, len_k),
        }.get(self.op, lambda: flops.pairs(len_q, len_k, self.shape.causal))()
        return flops.attention_forward(pairs, self.q.shape[1], self.q.shape[2])

    def bytes(self, backward: bool) -> int:
        """Bytes of every tensor once: inputs and output; in the backward inputs, their gradients and the output's."""
        wide = self.k.nbytes * (2 if self.op == "pooled_attention" else 3)
        outer = self.q.nbytes * (len(self.k_offsets) - 1 if self.op == "pooled_attention" else 1)
        return 2 * wide + outer if backward else wide + outer


def make(op: str, shape: Shape, batch: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Random inputs, the same for every call."""
    generator = torch.Generator(device).manual_seed(0)
    rows = max(1, int(batch * shape.rows))
    lengths = torch.randint(1, shape.longest + 1, (rows,), generator=generator, device=device)
    lengths = torch.full_like(lengths, shape.longest) if shape.full else lengths
    keys = lengths if shape.keys is None else torch.full_like(lengths, shape.keys)
    q_offsets, k_offsets = (torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (lengths, keys))
    tokens, many = int(k_offsets[-1]), SEEDS if op == "pooled_attention" else int(q_offsets[-1])
    q, k, v = (
        torch.randn(n, heads, dim, generator=generator, device=device).to(dtype).requires_grad_()
        for n in (many, tokens, tokens)
    )
    return Case(op, shape, q, k, v, q_offsets, k_offsets, int(lengths.max()), int(keys.max()))
