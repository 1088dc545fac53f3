"""Which order a loader was asked for, and that order for a given seed and epoch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from h5feed.errors import UsageError
from h5feed.feed.order import BlockShuffle, FullShuffle, Listed, Order, Sequential
from h5feed.feed.random import hash_ints
from h5feed.feed.whole import check_whole

__all__ = ["Arrangement", "Shuffle"]

Shuffle = bool | Literal["block"]
"""True: all samples; "block": blocks, and samples within a window of blocks; False: none."""


class Arrangement:
    """The order asked for.

    Args:
        count: samples of the dataset.
        shuffle: what is shuffled.
        sampler: decides the order of every epoch, by being asked again.
        indices: the samples to take at all; with a shuffle, in shuffled order.
        block: samples of a block, for shuffle="block".
        window: blocks shuffled together.

    Raises UsageError for arguments that contradict each other.

    """

    def __init__(
        self,
        count: int,
        *,
        shuffle: Shuffle,
        sampler: Sampler[Any] | None,
        indices: Sequence[int] | None,
        block: int,
        window: int,
    ) -> None:
        if shuffle not in (True, False, "block"):
            raise UsageError(f'shuffle={shuffle!r} is none of True, "block" and False')
        check_whole(1, block=block, window=window)
        if sampler is not None:
            _check_sampler(sampler, shuffle, indices)
        self._count = count
        self._shuffle: Shuffle = shuffle
        self._sampler = sampler
        self._indices = None if indices is None else _as_indices(indices, count, "indices")
        self._block = block
        self._window = window

    def __len__(self) -> int:
        if self._sampler is not None:
            return len(self._sampler)  # type: ignore[arg-type]
        return self._count if self._indices is None else len(self._indices)

    def samples(self, epoch: int) -> int:
        """Return how many samples an epoch has; a sampler is told which epoch, as for its order."""
        if self._sampler is not None:
            _tell(self._sampler, epoch)
        return len(self)

    def order(self, seed: int, epoch: int) -> Order:
        """Return the order of an epoch; UsageError where a sampler gives none."""
        if self._sampler is not None:
            return Listed(_ask(self._sampler, seed, epoch, self._count))
        computed = self._computed(len(self), seed, epoch)
        return computed if self._indices is None else Listed(self._indices, computed)

    @property
    def kind(self) -> str:
        """What tells this order from others of the same seed and epoch; not a sampler's list."""
        if self._sampler is not None:
            return "sampler"
        if self._shuffle == "block":
            kind = f"block {self._block}x{self._window}"
        else:
            kind = "full" if self._shuffle else "none"
        return kind if self._indices is None else f"{kind} of {_crc(self._indices):08x}"

    def listed(self, order: Order) -> int:
        """Return the CRC-32 of what a sampler gave, 0 where there is none."""
        if self._sampler is None:
            return 0
        return _crc(order(np.arange(len(order))))

    def _computed(self, count: int, seed: int, epoch: int) -> Order:
        if self._shuffle == "block":
            return BlockShuffle(count, seed, epoch, block=self._block, window=self._window)
        return FullShuffle(count, seed, epoch) if self._shuffle else Sequential(count)


def _check_sampler(sampler: Any, shuffle: Shuffle, indices: Any) -> None:
    if shuffle or indices is not None:
        raise UsageError(
            "sampler decides the order alone: leave shuffle and indices out, or leave it out"
        )
    if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
        raise UsageError(
            f"sampler={type(sampler).__name__} would be split among the ranks twice: H5Loader does "
            "it by rank and world_size, taken from torch.distributed; leave sampler out, or give "
            "one of all ranks' samples together"
        )
    if not hasattr(sampler, "__len__"):
        raise UsageError(f"sampler={sampler!r} has no len(); H5Loader needs one that has")


def _tell(sampler: Any, epoch: int) -> None:
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def _ask(sampler: Any, seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """Return what a sampler yields for an epoch.

    Torch's own samplers draw from the global generator where they were given none: it is
    seeded for them, and put back, so that they repeat what they did.
    """
    _tell(sampler, epoch)
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed: that seeds every GPU's generator, too, and those are the trainer's
        torch.default_generator.manual_seed(hash_ints(seed, epoch) >> 1)
        indices = _as_indices(list(sampler), count, "sampler")
    if len(indices) != len(sampler):
        raise UsageError(
            f"sampler gave {len(indices)} indices, and its len() is {len(sampler)}, by which every "
            "rank counts its steps: make the two agree"
        )
    return indices


def _as_indices(values: Sequence[Any], count: int, argument: str) -> NDArray[np.int64]:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of several lengths: a BatchSampler's, the last one short
        array = np.empty(len(values), object)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise UsageError(
            f"{argument} must give one whole number per sample, got an array of shape "
            f"{array.shape} and type {array.dtype} (a BatchSampler is no Sampler here)"
        )
    if array.size and not (array.min() >= 0 and array.max() < count):
        raise UsageError(
            f"{argument} gives indices from {array.min()} to {array.max()}; the dataset has 0 to "
            f"{count - 1}"
        )
    return array.astype(np.int64)


def _crc(array: NDArray[np.int64]) -> int:
    return zlib.crc32(array.tobytes())
