"""Which keys a query sees: the one rule of all ops, and the tiles that cover it with little waste.

Query i of a sequence with `len_q` queries and `len_k` keys stands at key position `i + len_k − len_q`: the last query
beside the last key (for len_q = len_k simply i). With `causal` it sees no later key, with `window` w only the keys
within ±w of its position. A query may see no key at all: then its output and its gradients are zero.

    python -c "from gemctl.kernels.visibility import visible; print(visible(2, 4, causal=True).int())"
"""

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

# What one dense call costs on CPU beside its scores, forward and backward, counted in scores: once a call, and once
# for each of its matrices (sequence and head). Measured on one core with a head dimension of 16.
CALL_SCORES = 12000
MATRIX_SCORES = 300
CACHED_MASK = 1 << 16  # elements; larger masks cost little beside the work on their tile


@dataclass(frozen=True)
class Tile:
    """Rows row0 … row1−1 see keys within key0 … key1−1: all of them, unless `partial`."""

    row0: int
    row1: int
    key0: int
    key1: int
    partial: bool


def visible(
    len_q: int, len_k: int, causal: bool = False, window: int | None = None, device: torch.device | None = None
) -> Tensor:
    """Bool [len_q, len_k]: True where the query sees the key."""
    position = torch.arange(len_q, device=device)[:, None] + (len_k - len_q)
    return _sees(position, torch.arange(len_k, device=device), causal, window)


def _sees(position: Tensor, key: Tensor, causal: bool, window: int | None) -> Tensor:
    seen = torch.ones(position.shape[0], key.shape[0], dtype=torch.bool, device=key.device)
    if causal:
        seen &= key <= position
    if window is not None:
        seen &= (position - key).abs() <= window
    return seen


@lru_cache(maxsize=4096)
def tiles(
    len_q: int,
    len_k: int,
    causal: bool = False,
    window: int | None = None,
    matrices: int = 1,
    max_rows: int | None = None,
) -> tuple[Tile, ...]:
    """Row tiles of at most `max_rows` that cover all visible pairs; rows that see no key are in none.

    A tile of t rows computes at most t−1 keys a row beyond the visible ones. Its height is the one that costs least
    when `matrices` sequences and heads go through each call together: some 20 rows for many, 100 for one. One
    tile where everything is visible, and where cutting costs more than it saves.
    """
    shift = len_k - len_q
    behind = len_q + len_k if window is None else window  # len_q + len_k: beyond both ends
    ahead = 0 if causal else behind
    first_row = max(0, -shift - ahead)
    if len_k == 0 or first_row >= len_q:
        return ()
    rows = min(_height(len_q, len_k, causal, window, matrices), max_rows or len_q)
    found = []
    for row0 in range(first_row, len_q, rows):
        row1 = min(row0 + rows, len_q)
        key0, key1 = max(0, row0 + shift - behind), min(len_k, row1 + shift + ahead)
        partial = row1 - 1 + shift - behind > key0 or row0 + shift + ahead + 1 < key1
        found.append(Tile(row0, row1, key0, key1, partial))
    return tuple(found)


def _height(len_q: int, len_k: int, causal: bool, window: int | None, matrices: int) -> int:
    """Rows of a tile: n tiles cost n · call + the scores that they compute."""
    call = MATRIX_SCORES + CALL_SCORES // matrices
    if window is not None and window < len_k:
        span = window + 1 if causal else 2 * window + 1
        rows = isqrt(call)
        scores = len_q * min(len_k, span + rows - 1)
    elif causal:
        rows = isqrt(2 * call)
        scores = len_q * (len_k - len_q // 2 + rows // 2)
    else:
        return len_q
    tiled = -(-len_q // rows) * call + scores
    return rows if tiled < call + len_q * len_k else len_q


def tile_hidden(
    tile: Tile, len_q: int, len_k: int, causal: bool, window: int | None, added: bool = False
) -> Tensor | None:
    """Where a tile's rows do not see its keys, on the CPU; None where they see all.

    Bool [rows, keys], True where hidden; with `added` float32 to add to the scores, −inf where hidden, else 0.
    """
    if not tile.partial:
        return None
    rows, keys = tile.row1 - tile.row0, tile.key1 - tile.key0
    make = _cached_hidden if rows * keys <= CACHED_MASK else _hidden
    return make(rows, keys, tile.row0 + len_k - len_q - tile.key0, causal, window, added)


def _hidden(rows: int, keys: int, position: int, causal: bool, window: int | None, added: bool) -> Tensor:
    """For `keys` keys from 0 on and `rows` queries from `position` on."""
    hidden = ~_sees(torch.arange(position, position + rows)[:, None], torch.arange(keys), causal, window)
    return torch.zeros(rows, keys).masked_fill_(hidden, -torch.inf) if added else hidden


_cached_hidden = lru_cache(maxsize=512)(_hidden)
