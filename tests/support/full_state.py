"""The full, unsharded state on rank 0 and its hash, whatever the world and the sharding. Collective; CPU groups."""

import base64
import hashlib
import pickle
from collections.abc import Mapping

import torch
from torch import Tensor

from gemctl.checkpoint.pieces import state_pieces
from gemctl.parallel.exchange import broadcast_json, gather_json


def full_state_hash(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over the keys in order, each with dtype, shape and bytes of its full tensor; the same on every rank."""
    digest = hashlib.sha256()
    for key, full in sorted(gather_full(state).items()):
        digest.update(f"{key} {full.dtype} {list(full.shape)}\n".encode())
        digest.update(full.view(-1).view(torch.uint8).numpy().data)
    return str(broadcast_json(digest.hexdigest()))


def gather_full(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every full tensor, on rank 0; nothing elsewhere."""
    mine = {
        key: [(piece.offsets, piece.tensor.cpu(), piece.full) for piece in pieces]
        for key, pieces in state_pieces(state).items()
    }
    texts = gather_json(base64.b64encode(pickle.dumps(mine)).decode())
    parts = [pickle.loads(base64.b64decode(text)) for text in texts or []]
    found: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for key, (offsets, values, full) in ((k, box) for part in parts for k, boxes in part.items() for box in boxes):
        place = tuple(slice(start, start + size) for start, size in zip(offsets, values.shape, strict=True))
        found.setdefault(key, torch.empty(full, dtype=values.dtype))[place] = values
        filled.setdefault(key, torch.zeros(full, dtype=torch.bool))[place] = True
    assert all(bool(mask.all()) for mask in filled.values()), "parts of a tensor are on no rank"
    return found
