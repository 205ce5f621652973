"""Which keys a query sees: the one rule of all ops, and the tiles that cover it with little waste.

Query i of a sequence with `len_q` queries and `len_k` keys stands at key position `i + len_k − len_q`: the last query
beside the last key (for len_q = len_k simply i). With `causal` it sees no later key, with `window` w only the keys
within ±w of its position. A query may see no key at all: then its output and its gradients are zero.

    python -c "from gemctl.kernels.visibility import visible; print(visible(2, 4, causal=True).int())"
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

CAUSAL_ROWS = 32
MIN_ROWS = 16
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
    len_q: int, len_k: int, causal: bool = False, window: int | None = None, max_rows: int | None = None
) -> tuple[Tile, ...]:
    """Row tiles of at most `max_rows` that cover all visible pairs; rows that see no key are in none.

    Tiles of height t compute at most t−1 keys a row beyond the visible ones. For a window t is an eighth of the keys
    that a row sees (extra pairs ≤ 1/8), but at least 16; causal tiles without a window have 32 rows, so the extra
    pairs are at most 32 / length of the visible ones. One tile where everything is visible.
    """
    shift = len_k - len_q
    behind = len_q + len_k if window is None else window  # len_q + len_k: beyond both ends
    ahead = 0 if causal else behind
    first_row = max(0, -shift - ahead)
    if len_k == 0:
        return ()
    rows = min(_height(len_q, len_k, causal, window), max_rows or len_q)
    found = []
    for row0 in range(first_row, len_q, max(1, rows)):
        row1 = min(row0 + rows, len_q)
        key0, key1 = max(0, row0 + shift - behind), min(len_k, row1 + shift + ahead)
        partial = row1 - 1 + shift - behind > key0 or row0 + shift + ahead + 1 < key1
        found.append(Tile(row0, row1, key0, key1, partial))
    return tuple(found)


def _height(len_q: int, len_k: int, causal: bool, window: int | None) -> int:
    """Rows of a tile; see `tiles`."""
    if window is None or window >= len_q + len_k:
        return CAUSAL_ROWS if causal else len_q
    span = window + 1 if causal else 2 * window + 1
    return max(MIN_ROWS, span // 8)


def tile_mask(tile: Tile, len_q: int, len_k: int, causal: bool, window: int | None) -> Tensor | None:
    """Bool [rows, keys] of what a tile's rows see on the CPU; None where that is everything."""
    if not tile.partial:
        return None
    rows, keys = tile.row1 - tile.row0, tile.key1 - tile.key0
    make = _cached_mask if rows * keys <= CACHED_MASK else _mask
    return make(rows, keys, tile.row0 + len_k - len_q - tile.key0, causal, window)


def _mask(rows: int, keys: int, position: int, causal: bool, window: int | None) -> Tensor:
    """Visibility of `keys` keys from 0 on, for `rows` queries from `position` on."""
    return _sees(torch.arange(position, position + rows)[:, None], torch.arange(keys), causal, window)


_cached_mask = lru_cache(maxsize=1024)(_mask)
