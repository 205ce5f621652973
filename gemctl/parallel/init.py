"""Initial values as a function of (seed, parameter name, global index), so that a rank computes only its own slice.

Meta-device init under FSDP2 would give every shard the same numbers. Here element i of a parameter is a counter-based
draw (SplitMix64 of key(seed, name) + i, Steele et al., OOPSLA 2014): the full state after init is the
same bit for bit for every world and sharding. Only integer operations and one rounded product are used, because the
last bit of vectorised logarithms depends on an element's position in memory.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from gemctl.model.init import InitRule

_CHUNK = 1 << 22
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True)
class Slice:
    """Rows `first_row` … of a full tensor: one rank's part of a parameter sharded along dim 0."""

    tensor: Tensor
    first_row: int


def key(seed: int, name: str) -> int:
    """64-bit signed key of one stream of draws."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little", signed=True)


def draw_bits(stream: int, start: int, count: int, device: torch.device) -> Tensor:
    """int64 [count]: 24 random bits for each of the indices start … start+count−1 of a stream."""
    index = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    z = index.mul_(_GOLDEN).add_(stream)
    z = (z ^ _shift(z, 30)).mul_(_MIX_1)
    z = (z ^ _shift(z, 27)).mul_(_MIX_2)
    return _shift(z ^ _shift(z, 31), 40)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@torch.no_grad()
def fill(part: Slice, rule: InitRule, seed: int, name: str) -> None:
    """Writes the initial values of parameter `name` into the slice, in place."""
    if rule.kind != "uniform":
        part.tensor.fill_(1.0 if rule.kind == "ones" else 0.0)
        return
    if part.tensor.numel() == 0:
        return
    row = part.tensor[0].numel()
    flat = part.tensor.view(-1)
    stream = key(seed, name)
    for start in range(0, flat.numel(), _CHUNK):
        count = min(_CHUNK, flat.numel() - start)
        bits = draw_bits(stream, part.first_row * row + start, count, flat.device)
        # odd integers in (−2²⁴, 2²⁴): exact in float32, symmetric around 0
        centred = bits.mul_(2).add_(1 - (1 << 24)).to(torch.float32)
        flat[start : start + count] = centred.mul_(rule.bound / (1 << 24)).to(flat.dtype)
