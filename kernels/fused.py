"""Dense softmax attention on CPU for one group of sequences, shared by the softmax ops' CPU backends.

PyTorch's fused kernel behind `scaled_dot_product_attention` is called by its own name because that returns the LSE.
All dense tensors are [batch, H, length, …] views of rows [batch · length, H, …] (gemctl/kernels/buckets.py).
"""

import torch
from torch import Tensor

from gemctl.kernels.buckets import Part
from gemctl.kernels.jagged import expand_heads, reduce_heads

fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def gather(x: Tensor, part: Part, heads: int, dtype: torch.dtype, fill: float | None = None) -> Tensor:
    """A group's rows of x [N, H or Hkv, …] as dense [batch, H, length, …] in the compute dtype; pads hold `fill`."""
    rows = expand_heads(part.gather(x, fill), heads)
    if rows.dtype != dtype:
        rows = rows.to(dtype)
    return rows.view(part.batch, part.length, *rows.shape[1:]).transpose(1, 2)


def scatter(x: Tensor, part: Part, dense: Tensor) -> None:
    """Writes dense [batch, H, length, …] to the group's rows of x [N, H or Hkv, …]."""
    rows = reduce_heads(dense.transpose(1, 2).flatten(0, 1), x.shape[1])
    part.scatter(x, rows if rows.dtype == x.dtype else rows.to(x.dtype))
