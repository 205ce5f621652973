"""Block attention on CPU: the blocks are sequences of their own to jagged flash attention.

Full blocks then form one group, and the last blocks at most `block_size` − 1 more.
"""

import numpy as np
import torch
from torch import Tensor

from gemctl.kernels.block_attention.rotary import positions, rotate
from gemctl.kernels.jagged import check_offsets, compute_dtype
from gemctl.kernels.jagged_flash_attention import cpu as flash


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    schedule: list[Tensor],
    block_size: int,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(output like q, LSE [ΣL, H] in float32, for float64 inputs float64)."""
    check_offsets("block_attention", offsets=(offsets, q.shape[0]))
    blocks = _block_offsets(offsets, block_size)
    angles = _angles(offsets, q, cos, sin)
    inputs = _rotated(q, angles), _rotated(k, angles), _rotated(v, angles)
    output, lse = flash.forward(*inputs, blocks, blocks, [], scale, False, None, None)
    return output.to(q.dtype), lse


def backward(
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    schedule: list[Tensor],
    block_size: int,
    scale: float,
    cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    blocks = _block_offsets(offsets, block_size)
    angles = _angles(offsets, q, cos, sin)
    rotated = _rotated(q, angles), _rotated(k, angles), _rotated(v, angles)
    grads = flash.backward(
        grad_output, output, lse, *rotated, blocks, blocks, [], scale, False, None, None, needs_bias_grad=False
    )
    back = None if angles is None else (angles[0], -angles[1])
    grad_q, grad_k, grad_v = (_rotated(grad, back).to(q.dtype) for grad in grads[:3])
    return grad_q, grad_k, grad_v


def _block_offsets(offsets: Tensor, block_size: int) -> Tensor:
    """Offsets [blocks+1] of all sequences' blocks."""
    lengths = np.diff(offsets.numpy())
    blocks = -(-lengths // block_size)
    first_block = np.cumsum(blocks) - blocks
    starts = np.repeat(offsets[:-1].numpy() - first_block * block_size, blocks) + np.arange(blocks.sum()) * block_size
    return torch.from_numpy(np.append(starts, offsets[-1].item()))


def _angles(offsets: Tensor, q: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """cos and sin [ΣL, D/2] of every token in the compute dtype, or None without rotation."""
    if cos is None or sin is None:
        return None
    longest = int(offsets.diff().max()) if offsets.shape[0] > 1 else 0
    if min(cos.shape[0], sin.shape[0]) < longest:
        shapes = f"cos {list(cos.shape)} and sin {list(sin.shape)}"
        raise ValueError(f"block_attention: {shapes} are short of the longest sequence {longest}")
    position, dtype = positions(offsets, q.shape[0]), compute_dtype(q.dtype)
    return cos.to(dtype)[position], sin.to(dtype)[position]


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """x rotated in the compute dtype, or x itself."""
    return x if angles is None else rotate(x.to(angles[0].dtype), *angles)
