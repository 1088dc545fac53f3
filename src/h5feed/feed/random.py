"""Randomness as a function: numbers from (seed, epoch, sample index, stream, column), no state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["GOLDEN", "SeededDraws", "hash_ints", "mix64"]

U64 = NDArray[np.uint64]

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of SplitMix64
_MUL1, _MUL2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # Stafford's variant 13, as in SplitMix64
_TO_UNIT = 2.0**-53


def mix64(x: U64) -> U64:
    """Scramble `x` (uint64, any shape) in place by SplitMix64's finalizer and return it."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MUL1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MUL2)
    x ^= x >> np.uint64(31)
    return x


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MUL1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL2) & _MASK
    return x ^ (x >> 31)


def hash_ints(*values: int) -> int:
    """Return 64 bits that depend on every one of `values` (ints of any size) and their order."""
    state = len(values)
    for value in values:
        words = _words(abs(value))
        for word in (2 * len(words) + (value < 0), *words):
            state = _mix_int(_mix_int(state + GOLDEN) ^ word)
    return _mix_int(state)


def _words(value: int) -> list[int]:
    words = [value & _MASK]
    while value := value >> 64:
        words.append(value & _MASK)
    return words


class SeededDraws:
    """The random numbers of one batch: a pure function of seed, epoch and each sample's index.

    Every sample owns one SplitMix64 sequence per stream; `uniform` returns its first terms. So the
    numbers of a sample do not depend on the batch it came in, on threads or on ranks. Numbers that
    belong to the batch as a whole come from `batch_uniform`, keyed by `batch`.

    Args:
        seed: any int.
        epoch: any int.
        indices: int64 (B,), what tells the samples apart.
        batch: the number that tells batches apart: the position in the epoch at which it begins.

    """

    __slots__ = ("_batch_key", "_indices", "_keys", "_when")

    def __init__(
        self, seed: int, epoch: int, indices: NDArray[np.int64], *, batch: int = 0
    ) -> None:
        # Two multiplications per level, so that neighbouring indices share no structure.
        base = np.uint64(hash_ints(seed, epoch))
        keys = indices.astype(np.uint64)
        keys *= np.uint64(GOLDEN)
        keys += base
        self._keys = mix64(keys)
        self._indices, self._when = indices, (seed, epoch)
        self._batch_key = hash_ints(seed, epoch, batch, 0x6261746368)  # "batch"

    def __len__(self) -> int:
        return len(self._keys)

    def uniform(self, stream: int, count: int = 1) -> NDArray[np.float64]:
        """Return float64 (B, count) in [0, 1), multiples of 2**-53, one row per sample."""
        return _uniform(self._keys ^ np.uint64(hash_ints(stream)), count)

    def alternate(self, stream: int) -> NDArray[np.bool_]:
        """Return (B,): a bit of each sample's own in even epochs, the other one in odd ones."""
        seed, epoch = self._when
        keys = self._indices.astype(np.uint64)
        keys *= np.uint64(GOLDEN)
        keys += np.uint64(hash_ints(seed, stream, 0x616C7465726E))  # "altern"
        bits: NDArray[np.bool_] = mix64(keys) % np.uint64(2) != epoch % 2
        return bits

    def batch_uniform(self, stream: int, count: int = 1) -> NDArray[np.float64]:
        """Return float64 (count,) in [0, 1) that belong to the batch as a whole."""
        key = np.array([self._batch_key ^ hash_ints(stream)], np.uint64)
        return _uniform(key, count).reshape(count)


def _uniform(states: U64, count: int) -> NDArray[np.float64]:
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    bits = mix64(states[:, None] + steps)
    bits >>= np.uint64(11)
    unit: NDArray[np.float64] = bits.astype(np.float64)
    unit *= _TO_UNIT
    return unit
