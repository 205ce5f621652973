"""JSON values between the ranks of a group.

    all_gather_json(value, group)       # every rank's value, by rank
    gather_json(value, group)           # the same on rank 0, None elsewhere
    scatter_json(values, group)         # on rank r the value that rank 0 has at values[r]
    broadcast_json(value, group)        # rank 0's value

torch's object collectives unpickle what they receive, so anyone between two ranks could run code in them. Here bytes
travel as a tensor, padded with spaces to the longest. All functions are collective; with NCCL they use the current GPU.
Tuples arrive as lists, keys of objects as text. They raise GemctlError if what a rank sent is not JSON.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemctl.errors import GemctlError

Group = dist.ProcessGroup | None


def all_gather_json(value: Any, group: Group = None) -> list[Any]:
    mine = _padded(value, group)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [_parsed(part, rank) for rank, part in enumerate(parts)]


def gather_json(value: Any, group: Group = None) -> list[Any] | None:
    mine = _padded(value, group)
    if dist.get_rank(group) > 0:
        dist.gather(mine, group=group, group_dst=0)
        return None
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.gather(mine, parts, group=group, group_dst=0)
    return [_parsed(part, rank) for rank, part in enumerate(parts)]


def scatter_json(values: Sequence[Any] | None, group: Group = None) -> Any:
    texts = [_text(value) for value in values or []]
    size = _agreed(max(map(len, texts), default=0), group)
    mine = torch.empty(size, dtype=torch.uint8, device=_device(group))
    parts = [_tensor(text, size, group) for text in texts] if dist.get_rank(group) == 0 else None
    dist.scatter(mine, parts, group=group, group_src=0)
    return _parsed(mine, 0)


def broadcast_json(value: Any, group: Group = None) -> Any:
    text = _text(value) if dist.get_rank(group) == 0 else b""
    box = _tensor(text, _agreed(len(text), group), group)
    dist.broadcast(box, group=group, group_src=0)
    return _parsed(box, 0)


def _padded(value: Any, group: Group) -> Tensor:
    text = _text(value)
    return _tensor(text, _agreed(len(text), group), group)


def _agreed(size: int, group: Group) -> int:
    """The largest of all ranks' sizes."""
    box = torch.tensor([size], dtype=torch.int64, device=_device(group))
    dist.all_reduce(box, dist.ReduceOp.MAX, group=group)
    return int(box)


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _tensor(text: bytes, size: int, group: Group) -> Tensor:
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8).to(_device(group))


def _parsed(part: Tensor, rank: int) -> Any:
    try:
        return json.loads(part.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise GemctlError(f"what rank {rank} sent is not JSON: {error}") from None


def _device(group: Group) -> torch.device:
    cuda = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
