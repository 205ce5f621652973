"""FLOP formulas of the attention family, torch-free: the plan counts with them, and the ops register them.

A pair is one query that sees one key. Useful work alone counts: a forward of `4 · heads · head_dim · pairs` (two
matrix products), a backward of exactly twice that; recomputed scores, masks and padding count nothing.

    python -c "from gemctl.specs.flops import pairs; print(pairs([3, 0, 5], [3, 4, 5], causal=True))"   # 21
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Lengths = Sequence[int] | NDArray[np.int64]


def pairs(len_q: Lengths, len_k: Lengths, causal: bool = False, window: int | None = None) -> int:
    """(query, key) pairs of sequences with `len_q[b]` queries and `len_k[b]` keys, summed over b; exact.

    Query i stands at key position `i + len_k − len_q`: the last query beside the last key. It sees the keys within
    ±`window` of there (None: all of them), and with `causal` none that is later.
    """
    queries, keys = np.asarray(len_q, np.int64), np.asarray(len_k, np.int64)
    ahead: int | None = 0 if causal else window
    seen = queries * keys if ahead is None else _clipped_sum(queries, keys, ahead + 1)
    if window is not None:
        seen = seen - _clipped_sum(queries, keys, -window)
    return int(seen.sum())


def block_pairs(lengths: Lengths, block_size: int) -> int:
    """Pairs of block attention: sequences cut into blocks from their start, each block seeing itself alone."""
    full, rest = np.divmod(np.asarray(lengths, np.int64), block_size)
    return int((full * block_size**2 + rest**2).sum())


def pooled_pairs(seeds: int, len_k: Lengths) -> int:
    """Pairs of `seeds` shared queries over every sequence's keys."""
    return int(seeds * np.asarray(len_k, np.int64).sum())


def attention_forward(pair_count: int, heads: int, head_dim: int) -> int:
    """FLOPs of QKᵀ and PV over `pair_count` pairs and `heads` query heads of `head_dim`."""
    return 4 * heads * head_dim * pair_count


def attention_backward(pair_count: int, heads: int, head_dim: int) -> int:
    """FLOPs of the four products of the backward, exactly twice the forward."""
    return 2 * attention_forward(pair_count, heads, head_dim)


def _clipped_sum(queries: NDArray[np.int64], keys: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
    """Σ over query positions p of p + shift clipped to 0 … keys: how many keys lie before position p + shift."""

    def below(last: NDArray[np.int64]) -> NDArray[np.int64]:
        """Σ of clip(t, 0, keys) over t ≤ last."""
        ramp = np.clip(last, 0, keys)
        return ramp * (ramp + 1) // 2 + keys * np.maximum(last - keys, 0)

    last = keys - 1 + shift
    return below(last) - below(last - queries)
