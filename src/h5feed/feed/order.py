"""The order of samples: a pure function of (seed, epoch, position), evaluated for a batch.

A shuffled order is a permutation that is computed where it is asked for, by a small Feistel network
over the positions, instead of a list that is shuffled at the start of an epoch: a batch
costs the same at ten thousand and at ten million items, and resuming needs no replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
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
    "ShardShuffle",
    "Weighted",
    "permute",
    "permute_each",
    "spread_out",
]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Sizes = np.uint64 | U64

# Four rounds make a pseudorandom permutation (Luby and Rackoff). Halves of a few values need more:
# all 720 permutations of six items come up equally often from 16 rounds on, at 8 far from it.
_ROUNDS, _ROUNDS_SMALL, _SMALL = 8, 24, 256
_SHARDS, _WINDOWS = 0x736861726473, 0x77696E646F77  # "shards", "window"
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


class ShardShuffle:
    """Shards in random order on several streams, samples shuffled within a window of a stream.

    The shards of an epoch, permuted, lie in one row of samples, which is cut into `streams` parts
    of one length, give or take a sample: position p is place p // streams of stream p % streams.
    So every position has one sample and every sample one position, whatever the shards' sizes. A
    cut may go through a shard: the two streams that share it come to it at the same time, because
    every other stream walks its part from the end. Which part is which stream's is `spread_out`.

    Args:
        counts: int64 (S,), samples of each shard.
        seed: any int.
        epoch: any int.
        streams: how many there are; those that read share them out, see Steps.
        window: shards of a stream that are shuffled together.
        items: int64 (N,), which sample is stored at each place, shard after shard; None: as stored.

    """

    def __init__(
        self,
        counts: I64,
        seed: int,
        epoch: int,
        *,
        streams: int,
        window: int,
        items: I64 | None = None,
    ) -> None:
        shards = permute(np.arange(len(counts)), len(counts), hash_ints(seed, epoch, _SHARDS))
        self._starts = _sums(counts[shards])  # where each shard begins in the row
        self._stored = _sums(counts)[shards]  # and where it is stored
        self._items = items
        self._key = np.uint64(hash_ints(seed, epoch, _WINDOWS))
        count, part = int(self._starts[-1]), np.argsort(spread_out(streams))
        lengths = np.empty(streams, np.int64)  # of the parts, along the row
        lengths[part] = count // streams + (np.arange(streams) < count % streams)
        cuts = _sums(lengths)
        self._forward = np.where(part % 2 == 0, 1, -1)
        self._first = np.where(part % 2 == 0, cuts[part], cuts[part + 1] - 1)
        self._windows = self._begin_windows(cuts, window)

    def _begin_windows(self, cuts: I64, window: int) -> I64:
        """Return where each window begins in the row, and where the last one ends.

        Streams come to new windows at different times, so that reads are spread over the epoch.
        """
        count = self._starts[-1]
        pieces = np.unique(np.append(self._starts, cuts))
        pieces = pieces[pieces < count]
        part = np.searchsorted(cuts, pieces, side="right") - 1
        number = np.arange(len(pieces)) - np.searchsorted(pieces, cuts[part])  # in its stream
        begins = (number == 0) | ((number + part) % window == 0)
        return np.append(pieces[begins], count)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __call__(self, positions: I64) -> I64:
        """Return the samples at `positions`; no cost but for these positions."""
        place, stream = np.divmod(positions, len(self._first))
        row = self._first[stream] + self._forward[stream] * place
        window = np.searchsorted(self._windows, row, side="right") - 1
        low = self._windows[window]
        keys = mix64((window.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN) + self._key)
        mixed = low + permute_each(row - low, self._windows[window + 1] - low, keys)
        shard = np.searchsorted(self._starts, mixed, side="right") - 1
        stored: I64 = self._stored[shard] + (mixed - self._starts[shard])
        return stored if self._items is None else self._items[stored].astype(np.int64, copy=False)

    def draw_keys(self, positions: I64, indices: I64) -> I64:
        """Return `indices`."""
        return indices


class BlockShuffle(ShardShuffle):
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
        sizes = np.minimum(block, count - np.arange(0, count, block))
        super().__init__(sizes, seed, epoch, streams=1, window=window)


@lru_cache
def spread_out(streams: int) -> I64:
    """Return whose each part of an epoch's row is: int64 (streams,), read-only.

    Streams that are neighbours get parts that lie far apart: by the digits of their number in
    reverse (van der Corput). So every run of positions has its fair share of every stretch of the
    row, and readers who divide the row into equal stretches have the same to do in each step.

    >>> spread_out(8).tolist()
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    part = np.zeros(1, np.int64)
    rest, factor = streams, 2
    while rest > 1:
        if rest % factor:
            factor += 1 if factor * factor <= rest else rest - factor
            continue
        rest //= factor
        part = np.concatenate([part + digit * rest for digit in range(factor)])
    found = np.argsort(part)
    found.flags.writeable = False
    return found


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

    So an epoch has a part of the samples: the first of `inner`, which should shuffle. In a row is
    in the row of one of the `streams` of `inner`: that many positions apart.
    """

    def __init__(self, inner: Order, times: int, streams: int = 1) -> None:
        self._inner = inner
        self._times = times
        self._streams = streams

    def __len__(self) -> int:
        return len(self._inner)

    def __call__(self, positions: I64) -> I64:
        """Return the samples at `positions`."""
        return self._inner(self._inside(positions)[0])

    def draw_keys(self, positions: I64, indices: I64) -> I64:
        """Return the inner order's keys, another one for each repeat."""
        inside, repeat = self._inside(positions)
        return self._inner.draw_keys(inside, indices) ^ (repeat << 41)

    def _inside(self, positions: I64) -> tuple[I64, I64]:
        """Return the inner order's positions, and which repeat stands at each of ours."""
        place, stream = np.divmod(positions, self._streams)
        return place // self._times * self._streams + stream, place % self._times


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


def _sums(counts: I64) -> I64:
    """Return 0 and the sums of the first 1, 2, … counts."""
    sums: I64 = np.append(0, np.cumsum(counts, dtype=np.int64))
    return sums


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
    root = int(np.ceil(np.sqrt(count)))
    left_size, right_size = np.uint64(root), np.uint64(-(-count // root))
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


def permute_each(positions: I64, counts: I64, keys: U64) -> I64:
    """Return where permutations of range(counts[k]), one per keys[k], send positions[k].

    What `permute` is for one permutation, for one of each position; all arrays are (B,).
    """
    where = np.empty_like(positions)
    for few, rounds in ((True, _ROUNDS_SMALL), (False, _ROUNDS)):
        at = np.flatnonzero((counts < _SMALL) == few)
        if not at.size:
            continue
        count = counts[at].astype(np.uint64)
        left_size = np.ceil(np.sqrt(count)).astype(np.uint64)
        right_size = (count + left_size - np.uint64(1)) // left_size
        steps = np.arange(1, rounds + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        round_keys = mix64(steps[:, None] + keys[at])
        values = positions[at].astype(np.uint64)
        outside = np.arange(len(at))
        while outside.size:
            values[outside] = _feistel(
                values[outside], left_size[outside], right_size[outside], round_keys[:, outside]
            )
            outside = outside[values[outside] >= count[outside]]
        where[at] = values.astype(np.int64)
    return where


def _feistel(values: U64, left_size: Sizes, right_size: Sizes, keys: Iterable[Sizes]) -> U64:
    """Move (B,) `values` by one round per key; sizes and each key are one number, or (B,)."""
    left, right = np.divmod(values, right_size)
    for key in keys:
        # One half is moved by a function of the other, then they change places.
        left += _below(right, key, left_size)
        np.subtract(left, left_size, out=left, where=left >= left_size)
        left, right, left_size, right_size = right, left, right_size, left_size
    # After an even number of rounds the halves are back in their places.
    left *= right_size
    left += right
    return left


def _below(values: U64, key: Sizes, size: Sizes) -> U64:
    """Return a hash of `values` in [0, size), by multiplication (Lemire), for size < 2**32."""
    hashed = values ^ key
    hashed *= _MUL1
    hashed ^= hashed >> np.uint64(32)
    hashed *= _MUL2
    hashed >>= np.uint64(32)
    hashed *= size
    hashed >>= np.uint64(32)
    return hashed
