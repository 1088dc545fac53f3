"""Which samples make each batch: the order asked for, its steps, and what happens to each."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset, Sampler

from h5feed.augment import Params, Pipeline
from h5feed.errors import UsageError
from h5feed.feed.files import PackedFiles
from h5feed.feed.options import Shuffle, Tail, check_ranks, check_whole
from h5feed.feed.order import (
    BlockShuffle,
    FullShuffle,
    Listed,
    Order,
    Repeated,
    Sequential,
    ShardShuffle,
    Weighted,
    spread_out,
)
from h5feed.feed.random import SeededDraws, hash_ints

__all__ = [
    "BatchPlan",
    "BlockShuffleSampler",
    "Drawing",
    "SampleOrder",
    "Samples",
    "ShardShuffleSampler",
    "ShuffleSampler",
    "Steps",
    "Weights",
    "choose_weights",
]

Indices = NDArray[np.int64]
Weights = Literal["balanced"] | ArrayLike | None

# Shuffled together where nobody says how many; docs/clusters.md has the reasons for shards.
_BLOCKS, _SHARDS = 16, 4
_AT_ONCE = 4096  # indices that a sampler computes at a time: numpy's cost per call is small then


class SampleOrder:
    """The order asked for.

    Args:
        count: samples of the dataset.
        shuffle: what is shuffled.
        sampler: decides the order of every epoch, by being asked again.
        indices: the samples to take at all; with a shuffle, in shuffled order.
        block: samples of a block, for shuffle="block".
        window: blocks, or shards of a stream, shuffled together; None: 16 blocks, 4 shards.
        streams: of shards, for shuffle="shards".
        shards: items of each shard, int64 (S,), and which item is stored at each place, int64
            (N,), shard after shard; None for the latter: as they are stored.
        weights: how often each sample is drawn, float64 (count,); None: each once.
        repeats: how often each sample comes in a row.
        items: int64 (count,), where the samples counted are a part of the items; None: all.

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
        window: int | None,
        streams: int,
        shards: tuple[Indices, Indices | None],
        weights: NDArray[np.float64] | None = None,
        repeats: int = 1,
        items: Indices | None = None,
    ) -> None:
        if shuffle not in (True, False, "block", "shards"):
            raise UsageError(f'shuffle={shuffle!r} is none of True, "block", "shards" and False')
        if window is None:
            window = _SHARDS if shuffle == "shards" else _BLOCKS
        check_whole(1, block=block, window=window, streams=streams, repeats=repeats)
        if sampler is not None:
            _check_sampler(sampler, shuffle, indices)
        if weights is not None and (sampler is not None or isinstance(shuffle, str)):
            other = f"sampler={sampler!r}" if sampler is not None else f'shuffle="{shuffle}"'
            raise UsageError(f"weights draw the samples, and {other} orders them: give one of them")
        self._count = count
        self._shuffle: Shuffle = shuffle
        self._sampler = sampler
        self._items = items
        chosen = items
        if indices is not None:
            chosen = self._at(_as_indices(indices, count, "indices"))
        self._indices = chosen
        self._block = block
        self._window = window
        self.streams = streams if shuffle == "shards" else 1
        """How many streams the positions are dealt to, in turn."""
        self._shards = shards
        if shuffle == "shards" and chosen is not None:
            self._shards = _part_of(shards, chosen)
        self._repeats = repeats
        self._weights = weights
        if weights is not None and indices is not None:
            self._weights = weights[_as_indices(indices, count, "indices")]
        if self._weights is not None and not self._weights.any():
            raise UsageError("weights are 0 for all samples that there are: nothing can be drawn")

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
        order: Order
        if self._sampler is not None:
            order = Listed(self._at(_ask(self._sampler, seed, epoch, self._count)))
        else:
            order = self._computed(len(self), seed, epoch)
            if self._indices is not None:
                order = Listed(self._indices, order)
        return order if self._repeats == 1 else Repeated(order, self._repeats, self.streams)

    @property
    def kind(self) -> str:
        """What tells this order from others of the same seed and epoch; not a sampler's list."""
        times = f", {self._repeats} times" if self._repeats > 1 else ""
        if self._sampler is not None:
            return "sampler" + times
        if self._weights is not None:
            kind = f"weighted {_crc(self._weights):08x}"
        elif self._shuffle == "block":
            kind = f"block {self._block}x{self._window}"
        elif self._shuffle == "shards":
            kind = f"shards {self.streams}x{self._window}"
        else:
            kind = "full" if self._shuffle else "none"
        part = "" if self._indices is None else f" of {_crc(self._indices):08x}"
        return kind + part + times

    def listed(self, order: Order) -> int:
        """Return the CRC-32 of what a sampler gave, 0 where there is none."""
        if self._sampler is None:
            return 0
        return _crc(order(np.arange(len(order))))

    def _at(self, places: Indices) -> Indices:
        return places if self._items is None else self._items[places]

    def _computed(self, count: int, seed: int, epoch: int) -> Order:
        if self._weights is not None:
            return Weighted(self._weights, seed, epoch)
        if self._shuffle == "block":
            return BlockShuffle(count, seed, epoch, block=self._block, window=self._window)
        if self._shuffle == "shards":
            counts, items = self._shards
            how = {"streams": self.streams, "window": self._window}
            return ShardShuffle(counts, seed, epoch, **how, items=items)
        return FullShuffle(count, seed, epoch) if self._shuffle else Sequential(count)


def _part_of(shards: tuple[Indices, Indices | None], items: Indices) -> tuple[Indices, Indices]:
    """Return how many of `items` each shard has, and the order in which they are stored there.

    That is, as `items` are counted: int64 (S,) and (len(items),).
    """
    counts, stored = shards
    place = items
    if stored is not None:
        places = np.empty_like(stored)
        places[stored] = np.arange(len(stored), dtype=stored.dtype)
        place = places[items]
    shard = np.searchsorted(np.cumsum(counts), place, side="right")
    return np.bincount(shard, minlength=len(counts)), np.argsort(place, kind="stable")


def choose_weights(weights: Weights, labels: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return float64 (N,) of an array, or of "balanced": each class as often as any other.

    labels: those of the N samples. Raises UsageError for what are no weights of them.
    """
    if weights is None:
        return None
    if isinstance(weights, str):
        if weights != "balanced":
            raise UsageError(f'weights={weights!r} is neither "balanced" nor an array')
        if labels.ndim != 1 or labels.min() < 0:
            raise UsageError(
                'weights="balanced" needs a class of every sample, and here are '
                + ("targets" if labels.ndim != 1 else "samples without one")
                + ": give an array of weights"
            )
        balanced: NDArray[np.float64] = 1.0 / np.bincount(labels)[labels]
        return balanced
    try:
        found = np.asarray(weights, np.float64)
    except (TypeError, ValueError) as ex:
        raise UsageError(
            f"weights={type(weights).__name__} is not an array of numbers ({ex})"
        ) from ex
    if found.shape != labels.shape[:1]:
        raise UsageError(
            f"weights have the shape {found.shape}, and there are {len(labels)} samples: give one "
            "number for each"
        )
    if not (np.isfinite(found) & (found >= 0)).all():
        raise UsageError("weights must be finite and at least 0")
    return found


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
    if getattr(sampler, "world_size", 1) > 1:
        raise UsageError(
            f"sampler={type(sampler).__name__} gives one of {sampler.world_size} ranks its share, "
            "and H5Loader would split that again: leave its rank and world_size out"
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
            f"{array.shape} and type {array.dtype} (a BatchSampler is not a Sampler here)"
        )
    if array.size and not (array.min() >= 0 and array.max() < count):
        raise UsageError(
            f"{argument} gives indices from {array.min()} to {array.max()}; the dataset has 0 to "
            f"{count - 1}"
        )
    return array.astype(np.int64)


def _crc(array: NDArray[Any]) -> int:
    return zlib.crc32(array.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The batches of one rank from position `start` of an epoch on; every rank has as many.

    A step takes the next `batch_size · world_size` positions, and each rank its own run of them. So
    what is left of an epoch is one number, which means the same at any batch and world size.

    Where the order has several streams, a step's positions are first divided among the nodes, by
    streams: node n of P gets the n-th of P equal shares, in the order of the parts that the
    streams walk (see ShardShuffle), so that each has streams of its own, and shares one with its
    neighbour where P does not divide them. Its ranks take their runs of that.
    """

    samples: int
    """Positions of the epoch."""
    batch_size: int
    """Samples of one rank in a step."""
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    """Leave out what does not fill a batch on every rank."""
    tail: Tail = "pad"
    """What evens out a short last step: ranks repeat samples, or some are left out."""
    start: int = 0
    """Positions already consumed by all ranks together."""
    streams: int = 1
    """Streams of the order: position p is in stream p % streams."""
    nodes: int = 1
    """Machines, with world_size / nodes ranks each, that should read streams of their own."""

    @property
    def stride(self) -> int:
        """Positions that a full step takes."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        full, rest = divmod(max(self.samples - self.start, 0), self.stride)
        return full + (self._last_share(rest) > 0)

    def share(self, step: int) -> int:
        """Return how many samples each rank has in a step."""
        rest = self.samples - self.start - step * self.stride
        return self.batch_size if rest >= self.stride else self._last_share(rest)

    def first(self, step: int) -> int:
        """Return a number of this rank's batch: where it begins, were ranks all that divides it."""
        return self.start + step * self.stride + self.rank * self.share(step)

    def positions(self, step: int) -> NDArray[np.int64]:
        """Return int64 (share,): this rank's positions.

        Those past the end are begun again from 0; with streams, each from its own last one.
        """
        positions = self._unbounded(step)
        if positions[-1] >= self.samples:
            if self.streams > 1:
                late = np.maximum(positions - self.samples + self.streams, 0) // self.streams
                positions -= late * self.streams
            positions %= self.samples
        return positions

    def repeats(self, step: int) -> int:
        """Return how many of this rank's samples of a step are there only to fill it."""
        if self.start + (step + 1) * self.stride <= self.samples:
            return 0
        return int((self._unbounded(step) >= self.samples).sum())

    def _unbounded(self, step: int) -> NDArray[np.int64]:
        """Return this rank's positions as if the epoch had no end."""
        share, first = self.share(step), self.start + step * self.stride
        if self.nodes == 1 or self.streams == 1:
            return np.arange(share) + (first + self.rank * share)
        ranks = self.world_size // self.nodes
        node, rank = divmod(self.rank, ranks)
        mine = _streams_of(node, self.nodes, first, share * ranks, self.streams)
        return mine[rank * share : (rank + 1) * share]

    def consumed(self, steps: int) -> int:
        """Return the positions consumed by all ranks once `steps` steps are done."""
        return min(self.start + steps * self.stride, self.samples)

    def _last_share(self, rest: int) -> int:
        if self.drop_last:
            return 0
        if self.tail == "pad":
            return -(-rest // self.world_size)
        return rest // self.world_size


def _streams_of(node: int, nodes: int, first: int, count: int, streams: int) -> NDArray[np.int64]:
    """Return a node's positions, int64 (count,) in order, of the nodes * count from `first` on."""
    along = spread_out(streams)
    after = (along - first) % streams  # where each comes first, counted from `first`
    has = (nodes * count - after + streams - 1) // streams
    before = np.cumsum(has) - has
    low = np.clip(node * count - before, 0, has)  # which of each stream's positions are the node's
    mine = np.clip((node + 1) * count - before, 0, has) - low
    number = np.arange(count) - np.repeat(np.cumsum(mine) - mine - low, mine)
    return np.sort(first + np.repeat(after, mine) + number * streams)


class Samples(NamedTuple):
    """The samples of a batch."""

    indices: Indices
    """(B,) which items."""
    params: Params | None
    """What happens to them; None where nothing does."""
    announced: int = 0
    """Bytes announced on the occasion, of the batches that follow."""


class Drawing:
    """Draws the parameters of any samples of a data set, from what is known of their sizes."""

    def __init__(self, files: PackedFiles, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._files = files
        cropped = files.specs["images"].fit == "crop"  # what was cut off is gone
        self._source = "shapes" if cropped else "source_shapes"

    def __call__(self, draws: SeededDraws, indices: Indices) -> Params:
        """Return the parameters of samples `indices`, one row of `draws` each."""
        stored, source = (self._files.rows(name, indices) for name in ("shapes", self._source))
        boxes = self._files.rows("letterbox", indices) if self._files.has_letterbox else None
        return self.pipeline.draw(draws, stored, source, boxes)


class BatchPlan:
    """The batches of one pass.

    Args:
        order: which item stands at which position.
        steps: which positions make a batch.
        drawing: makes parameters; None where images are delivered as they are.
        seed: of the random numbers.
        epoch: of the random numbers.

    """

    def __init__(
        self, order: Order, steps: Steps, drawing: Drawing | None, *, seed: int, epoch: int
    ) -> None:
        self.order = order
        self.steps = steps
        self._drawing = drawing
        self._key = seed, epoch
        self.alone = drawing is not None and drawing.pipeline.uses_batch
        """Parameters must be drawn for each batch alone, because its images are mixed."""

    def samples(self, first: int, last: int) -> list[Samples]:
        """Return what steps `first` to `last` - 1 are made of; where `alone`, one step at a time.

        Several together cost little more than one.
        """
        parts = [self.steps.positions(step) for step in range(first, last)]
        positions = np.concatenate(parts)
        indices = self.order(positions)
        params = None
        if self._drawing is not None:
            keys = self.order.draw_keys(positions, indices)
            params = self._drawing(
                SeededDraws(*self._key, keys, batch=self.steps.first(first)), indices
            )
        made, begin = [], 0
        for part in parts:
            rows = slice(begin, begin + len(part))
            mine = params if params is None or self.alone else params[rows]
            made.append(Samples(indices[rows], mine))
            begin += len(part)
        return made


class _OrderSampler(Sampler[int]):
    """Base: an order of h5feed.feed.order as a torch Sampler, or one rank's share of it."""

    def __init__(self, data_source: Sized, *, seed: int, rank: int, world_size: int) -> None:
        check_whole(None, seed=seed)
        check_ranks(rank, world_size)
        self.data_source = data_source
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def __len__(self) -> int:
        """Return how many indices a pass gives, on every rank the same."""
        return -(-len(self.data_source) // self.world_size)

    def __iter__(self) -> Iterator[int]:
        """Give the indices of this rank in the epoch; nothing is kept but a few thousand."""
        order = self._order(len(self.data_source))
        for positions in self._positions(len(self.data_source)):
            yield from order(positions).tolist()

    def _positions(self, count: int) -> Iterator[Indices]:
        positions = range(self.rank, self.world_size * len(self), self.world_size)
        for begin in range(0, len(positions), _AT_ONCE):
            some = positions[begin : begin + _AT_ONCE]
            yield np.arange(some.start, some.stop, some.step) % count

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; UsageError for a number below 0, or none."""
        check_whole(0, epoch=epoch)
        self.epoch = epoch

    @abstractmethod
    def _order(self, count: int) -> Order: ...


class ShuffleSampler(_OrderSampler):
    """All samples in random order, for any DataLoader: the order of H5Loader(shuffle=True).

    The order is a function of (seed, epoch), computed as it is asked for: ten million samples take
    no list and no time to begin. As with torch's DistributedSampler, call `set_epoch` before each
    epoch, or the order repeats, and give `rank` and `world_size` where processes share an epoch;
    each then gets every world_size-th sample, and the first few again if they do not divide.

    >>> from torch.utils.data import DataLoader
    >>> sampler = ShuffleSampler(range(6), seed=1)
    >>> loader = DataLoader(range(6), batch_size=2, sampler=sampler)
    >>> for epoch in range(2):
    ...     sampler.set_epoch(epoch)
    ...     print(sorted(torch.cat(list(loader)).tolist()))
    [0, 1, 2, 3, 4, 5]
    [0, 1, 2, 3, 4, 5]

    Args:
        data_source: the dataset, or anything else that has its length.
        seed: any int.
        rank: of this process.
        world_size: how many processes share an epoch.

    Raises UsageError for an argument that is wrong.

    """

    def __init__(
        self, data_source: Sized, *, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(data_source, seed=seed, rank=rank, world_size=world_size)

    def _order(self, count: int) -> Order:
        return FullShuffle(count, self.seed, self.epoch)


class BlockShuffleSampler(_OrderSampler):
    """Blocks of neighbours in random order, samples shuffled within a window of blocks.

    The order of H5Loader(shuffle="block"), for any DataLoader: reads stay in long runs, for disks
    and networks that hate seeks. Samples meet only those of the same window of `window * block`.
    `set_epoch`, `rank` and `world_size` are those of ShuffleSampler.

    >>> sampler = BlockShuffleSampler(range(6), block=3, window=1, seed=1)
    >>> first = list(sampler)[:3]  # a whole block comes before the next one begins
    >>> sorted(first) in ([0, 1, 2], [3, 4, 5])
    True

    Args:
        data_source: the dataset, or anything else that has its length.
        block: samples of a block; what lies in 8 MB is a good number, 40 raw images of 256x256.
        window: blocks that are shuffled together.
        seed: any int.
        rank: of this process.
        world_size: how many processes share an epoch.

    Raises UsageError for an argument that is wrong.

    """

    def __init__(
        self,
        data_source: Sized,
        *,
        block: int,
        window: int = 16,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(data_source, seed=seed, rank=rank, world_size=world_size)
        check_whole(1, block=block, window=window)
        self.block = block
        self.window = window

    def _order(self, count: int) -> Order:
        return BlockShuffle(count, self.seed, self.epoch, block=self.block, window=self.window)


class ShardShuffleSampler(_OrderSampler):
    """Shards in random order on several streams, samples shuffled within a window of a stream.

    The order of H5Loader(shuffle="shards"), for any DataLoader: ranks read shards of their own, a
    few at a time. `set_epoch`, `rank` and `world_size` are those of ShuffleSampler, but each rank
    gets the samples of its streams; all are made of one length by repeating some of the last.

    >>> from torch.utils.data import ConcatDataset
    >>> from h5feed import H5Dataset
    >>> shards = ConcatDataset([H5Dataset("photos.h5"), H5Dataset("more.h5")])  # 12 images each
    >>> sampler = ShardShuffleSampler(shards, streams=1, window=1, seed=1)
    >>> first = list(sampler)[:12]  # one shard comes before the other
    >>> sorted(first) in (list(range(12)), list(range(12, 24)))
    True

    Args:
        data_source: an H5Dataset, or a Subset or ConcatDataset of such; each file is a shard.
        streams: how many streams the shards are dealt to, which the ranks share out.
        window: shards of a stream that are shuffled together.
        seed: any int.
        rank: of this process.
        world_size: how many processes share an epoch.

    Raises UsageError for an argument that is wrong.

    """

    def __init__(
        self,
        data_source: Dataset[Any],
        *,
        streams: int = 64,
        window: int = _SHARDS,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        from h5feed.feed.as_dataloader import find_items  # which imports this module

        packed, items = find_items(data_source)
        super().__init__(cast(Sized, data_source), seed=seed, rank=rank, world_size=world_size)
        check_whole(1, streams=streams, window=window)
        self.streams = streams
        self.window = window
        shards = packed.files.shards
        self._shards = shards if items is None else _part_of(shards, items)

    def _positions(self, count: int) -> Iterator[Indices]:
        steps = Steps(
            samples=count,
            batch_size=_AT_ONCE,
            rank=self.rank,
            world_size=self.world_size,
            streams=self.streams,
            nodes=self.world_size,
        )
        return map(steps.positions, range(len(steps)))

    def _order(self, count: int) -> Order:
        counts, items = self._shards
        how = {"streams": self.streams, "window": self.window}
        return ShardShuffle(counts, self.seed, self.epoch, **how, items=items)
