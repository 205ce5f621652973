"""64-bit hashes in NumPy that are equal in every process, on every machine and with every library version.

    mix64(np.arange(3))            # integers
    hash_strings(pa.array(["a"]))  # strings, without a Python object per string

The ids of hashed tables and the shuffled row order depend on them, so a change here breaks saved runs.
"""

from typing import Any

import numpy as np
import pyarrow as pa

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
UInt64 = np.ndarray[Any, np.dtype[np.uint64]]


def mix64(values: np.ndarray) -> UInt64:
    """SplitMix64's finaliser for integers of any width (modulo 2⁶⁴): a bijection that mixes every bit."""
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64) + GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _M1
        x = (x ^ (x >> np.uint64(27))) * _M2
        return x ^ (x >> np.uint64(31))


def combine(*parts: int) -> int:
    """One 64-bit key from several integers; their order matters."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = mix64(key ^ mix64(np.array([part & 0xFFFFFFFFFFFFFFFF], np.uint64)))
    return int(key[0])


def permutation(count: int, *key: int) -> np.ndarray:
    """int64 [count]: a permutation of 0 … count−1 that depends only on (count, key)."""
    ranks = mix64(np.arange(count, dtype=np.uint64) ^ np.uint64(combine(*key)))
    return np.argsort(ranks, kind="stable")


def hash_strings(strings: Any) -> UInt64:
    """uint64 [N] of an Arrow string array without nulls: hashes of its UTF-8 bytes.

    Each string is split into 8-byte little-endian words (zero-padded); the mixed words, keyed by position, are added,
    and the sum is mixed with the length.
    """
    array = strings.cast(pa.large_string())
    if len(array) == 0:
        return np.zeros(0, np.uint64)
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
    lengths = np.diff(offsets)
    words = np.maximum((lengths + 7) // 8, 1)
    first_word = np.cumsum(words) - words
    padded = np.zeros(int(words.sum()) * 8, np.uint8)
    if lengths.sum():
        data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
        padded[np.arange(data.size) + np.repeat(first_word * 8 - (offsets[:-1] - offsets[0]), lengths)] = data
    position = np.arange(int(words.sum())) - np.repeat(first_word, words)
    with np.errstate(over="ignore"):
        mixed = mix64(padded.view("<u8") + mix64(position))
        return mix64(np.add.reduceat(mixed, first_word) + lengths.astype(np.uint64))
