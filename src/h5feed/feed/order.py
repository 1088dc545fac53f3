"""The order of samples: a pure function of (seed, epoch, position), evaluated for a batch.

A shuffled order is a permutation that is computed where it is asked for, by a small Feistel network
over the positions, instead of a list that is shuffled at the start of an epoch: a batch
costs the same at ten thousand and at ten million items, and resuming needs no replay.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from h5feed.feed.random import GOLDEN, hash_ints, mix64

__all__ = [
    "BlockShuffle",
    "FullShuffle",
    "Listed",
    "Order",
    "Repeated",
    "Sequential",
    "Weighted",
    "permute",
]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

# Four rounds make a pseudorandom permutation (Luby and Rackoff). Halves of a few values need more:
# all 720 permutations of six items come up equally often from 16 rounds on, at 8 far from it.
_ROUNDS, _ROUNDS_SMALL, _SMALL = 8, 24, 256
_MUL1, _MUL2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Order(Protocol):
    """Which sample stands at which position of the epoch."""

    def __len__(self) -> int:
        """Return how many positions the epoch has, before any padding."""
        ...

    def __call__(self, positions: I64) -> I64:
        """Return the sample indices, int64, at `positions` (int64, each in [0, len))."""
        ...

    def draw_keys(self, positions: I64, indices: I64) -> I64:
        """Return what the samples' random numbers are keyed by.

        The indices, made to differ where one sample comes several times in an epoch.
        """
        ...


class Sequential:
    """The samples as they lie in the file."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __call__(self, positions: I64) -> I64:
        """Return `positions` themselves."""
        return positions

    def draw_keys(self, positions: I64, indices: I64) -> I64:
        """Return `indices`."""
        return indices


class FullShuffle:
    """A pseudorandom permutation of all samples, another one for every (seed, epoch)."""

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        self._count = count
        self._key = hash_ints(seed, epoch, 0x66756C6C)  # "full"

    def __len__(self) -> int:
        return self._count

    def __call__(self, positions: I64) -> I64:
        """Return the samples at `positions`; no cost but for these positions."""
        return permute(positions, self._count, self._key)

    def draw_keys(self, positions: I64, indices: I64) -> I64:
        """Return `indices`."""
        return indices


class BlockShuffle:
    """Blocks of neighbouring samples in random order, samples shuffled within a window of blocks.

    Reads stay in long runs, for disks and networks that hate seeks. The price is that samples meet
    only those of the same window, so a file in class order needs large windows.

    Args:
        count: number of samples.
        seed: any int.
        epoch: any int.
        block: samples in a block; the last one may be shorter.
        window: blocks that are shuffled together.

    """

    def __init__(self, count: int, seed: int, epoch: int, *, block: int, window: int) -> None:
        self._count = count
        blocks = -(-count // block)
        order = permute(np.arange(blocks), blocks, hash_ints(seed, epoch, 0x626C6F636B))
        self._first = order * block  # sample at which the n-th block to come begins
        sizes = np.minimum(block, count - self._first)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])  # its first position
        self._windows = np.append(self._starts[:-1:window], count)
        self._key = hash_ints(seed, epoch, 0x77696E646F77)  # "window"

    def __len__(self) -> int:
        return self._count

    def __call__(self, positions: I64) -> I64:
        """Return the samples at `positions`."""
        window = np.searchsorted(self._windows, positions, side="right") - 1
        mixed = np.empty_like(positions)
        for number in np.unique(window):  # a batch touches one window, seldom two
            here = window == number
            low, high = self._windows[number], self._windows[number + 1]
            key = hash_ints(self._key, int(number))
            mixed[here] = low + permute(positions[here] - low, int(high - low), key)
        block = np.searchsorted(self._starts, mixed, side="right") - 1
        samples: I64 = self._first[block] + (mixed - self._starts[block])
        return samples

    def draw_keys(self, positions: I64, indices: I64) -> I64:
        """Return `indices`."""
        return indices


class Weighted:
    """Samples drawn with replacement, each as often as its weight says.

    Args:
        weights: float64 (n,), at least 0 and not all 0.
        seed: any int.
        epoch: any int.

    """

    def __init__(self, weights: NDArray[np.float64], seed: int, epoch: int) -> None:
        self._ends = np.cumsum(weights)
        self._key = hash_ints(seed, epoch, 0x776569676874)  # "weight"
        self._last = int(np.flatnonzero(weights)[-1])

    def __len__(self) -> int:
        return len(self._ends)

    def __call__(self, positions: I64) -> I64:
        """Return the samples drawn at `positions`."""
        states = positions.astype(np.uint64)
        states *= np.uint64(GOLDEN)
        states += np.uint64(self._key)
        drawn = (mix64(states) >> np.uint64(11)) * 2.0**-53 * self._ends[-1]
        found = np.searchsorted(self._ends, drawn, side="right")
        samples: I64 = np.minimum(found, self._last)  # rounding may reach the very end
        return samples

    def draw_keys(self, positions: I64, indices: I64) -> I64:
        """Return numbers of the positions: the same sample may stand at many."""
        keys: I64 = positions | (1 << 62)
        return keys


class Repeated:
    """Each sample `times` in a row, differently augmented; as many positions as without.

    So an epoch has a part of the samples: the first of `inner`, which should shuffle.
    """

    def __init__(self, inner: Order, times: int) -> None:
        self._inner = inner
        self._times = times

    def __len__(self) -> int:
        return len(self._inner)

    def __call__(self, positions: I64) -> I64:
        """Return the samples at `positions`."""
        return self._inner(positions // self._times)

    def draw_keys(self, positions: I64, indices: I64) -> I64:
        """Return the inner order's keys, another one for each repeat."""
        keys: I64 = self._inner.draw_keys(positions // self._times, indices)
        return keys ^ (positions % self._times << 41)


class Listed:
    """An order that somebody else decided: a list of indices, or what a Sampler yielded.

    Args:
        indices: int64 (n,), in the order of the epoch; repeats are allowed.
        inner: an order over the positions of `indices`, where the list is to be shuffled.

    """

    def __init__(self, indices: I64, inner: Order | None = None) -> None:
        self._indices = indices
        self._inner = inner or Sequential(len(indices))
        self._repeat = _count_repeats(indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __call__(self, positions: I64) -> I64:
        """Return the listed samples at `positions`."""
        samples: I64 = self._indices[self._inner(positions)]
        return samples

    def draw_keys(self, positions: I64, indices: I64) -> I64:
        """Return the inner order's, plus 2**40 for every earlier listing of the same sample."""
        keys = self._inner.draw_keys(positions, indices)
        return keys if self._repeat is None else keys + (self._repeat[self._inner(positions)] << 40)


def _count_repeats(indices: I64) -> I64 | None:
    """Return for each entry how often it was listed before it; None where nothing repeats."""
    by_index = np.argsort(indices, kind="stable")
    ordered = indices[by_index]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    if len(starts) == len(indices):
        return None
    lengths = np.diff(np.append(starts, len(ordered)))
    repeat = np.empty_like(indices)
    repeat[by_index] = np.arange(len(ordered)) - np.repeat(starts, lengths)
    return repeat


def permute(positions: I64, count: int, key: int) -> I64:
    """Return where a permutation of range(count), one per `key`, sends `positions`.

    A Feistel network over Z_a × Z_b with a·b just above `count` (Black and Rogaway 2002);
    what falls outside walks on until it is inside, which happens to fewer than one in √count.

    Args:
        positions: int64 (B,), each in [0, count).
        count: size of the permuted range.
        key: 64 bits that choose the permutation.

    Returns:
        int64 (B,).

    """
    if count < 2:
        return positions
    left_size = int(np.ceil(np.sqrt(count)))
    right_size = -(-count // left_size)
    rounds = _ROUNDS_SMALL if count < _SMALL else _ROUNDS
    keys = [np.uint64(hash_ints(key, number)) for number in range(rounds)]
    values = _feistel(positions.astype(np.uint64), left_size, right_size, keys)
    outside = np.flatnonzero(values >= count)
    while outside.size:
        walked = _feistel(values[outside], left_size, right_size, keys)
        values[outside] = walked
        outside = outside[walked >= count]
    where: I64 = values.astype(np.int64)
    return where


def _feistel(values: U64, left_size: int, right_size: int, keys: list[np.uint64]) -> U64:
    left, right = np.divmod(values, np.uint64(right_size))
    for key in keys:
        # One half is moved by a function of the other, then they change places.
        left += _below(right, key, left_size)
        np.subtract(left, np.uint64(left_size), out=left, where=left >= left_size)
        left, right, left_size, right_size = right, left, right_size, left_size
    # After an even number of rounds the halves are back in their places.
    left *= np.uint64(right_size)
    left += right
    return left


def _below(values: U64, key: np.uint64, size: int) -> U64:
    """Return a hash of `values` in [0, size), by multiplication (Lemire), for size < 2**32."""
    hashed = values ^ key
    hashed *= _MUL1
    hashed ^= hashed >> np.uint64(32)
    hashed *= _MUL2
    hashed >>= np.uint64(32)
    hashed *= np.uint64(size)
    hashed >>= np.uint64(32)
    return hashed
