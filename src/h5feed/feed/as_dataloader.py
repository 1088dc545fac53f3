"""What other people's code reads from a torch DataLoader and gives to one, as H5Loader has it."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Sampler,
    Subset,
    default_collate,
    get_worker_info,
)

from h5feed.errors import UsageError
from h5feed.feed.dataloader import collate
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.iterator import BatchTask, Epoch
from h5feed.feed.sampling import Samples

if TYPE_CHECKING:
    from h5feed.feed.batch import BatchBuilder

__all__ = [
    "DataLoaderFacts",
    "LoaderCollate",
    "PlannedBatch",
    "StockOptions",
    "as_planned",
    "find_items",
    "places_of",
    "read_stock",
]

Indices = NDArray[np.int64]


# --- what it is given -----------------------------------------------------------------------------


class StockOptions(TypedDict, total=False):
    """DataLoader's other arguments, so that a line that makes one need change its class alone.

    Threads of this process make whole batches: most of these have nothing to say to them.
    """

    pin_memory: bool
    """Without effect: batches for a GPU go through page-locked memory anyway, see `device`."""
    persistent_workers: bool
    """Without effect: threads stay from pass to pass."""
    prefetch_factor: int | None
    """Without effect: see `prefetch`."""
    timeout: float
    """Without effect."""
    multiprocessing_context: Any
    """Without effect."""
    pin_memory_device: str
    """Without effect."""
    in_order: bool
    """Without effect: batches come in order."""
    worker_init_fn: Callable[[int], None] | None
    """Without effect: it seeds what transforms in Python draw from, and there are none."""
    generator: torch.Generator | None
    """Its `initial_seed()` is the seed."""
    collate_fn: Callable[[list[Any]], Any] | None
    """None, torch's default_collate or make_dataloader's: no other is called."""
    batch_sampler: None
    """None: H5Loader shares batches among the ranks itself."""


def read_stock(stock: StockOptions, seed: int) -> int:
    """Return the seed; UsageError for what is not an argument, or cannot be followed."""
    unknown = [name for name in stock if name not in StockOptions.__annotations__]
    if unknown:
        raise UsageError(
            f"{unknown[0]}={stock[unknown[0]]!r} is not an argument of H5Loader or DataLoader; "  # type: ignore[literal-required]
            "help(H5Loader) lists them"
        )
    given = stock.get("collate_fn")
    if given is not None and given not in (default_collate, collate):
        raise UsageError(
            f"collate_fn={given!r} would have to run in Python for every sample, and H5Loader's "
            "threads make whole batches: leave it out (MixUp and CutMix are ops for augment, "
            "keys= makes dicts), or use make_dataloader"
        )
    if stock.get("batch_sampler") is not None:
        raise UsageError(
            f"batch_sampler={stock['batch_sampler']!r}: H5Loader makes its batches itself, to "
            "share them among ranks and to resume; give sampler= and batch_size="
        )
    generator = stock.get("generator")
    if generator is None:
        return seed
    if not isinstance(generator, torch.Generator) or seed != 0:
        raise UsageError(
            f"generator={generator!r} with seed={seed!r}: H5Loader's order is a function of one "
            "seed, and takes a torch.Generator's initial_seed() for it; give one of the two"
        )
    return generator.initial_seed()


def find_items(dataset: Any) -> tuple[H5Dataset, Indices | None]:
    """Return the packed files under a dataset, and which of their items it has; None: all.

    `dataset` may be an H5Dataset, a Subset (random_split makes those) or a ConcatDataset of such,
    nested as they like. Raises UsageError for any other.
    """
    leaves: list[H5Dataset] = []
    starts: dict[int, int] = {}
    items = _items_of(dataset, dataset, leaves, starts)
    if len(leaves) == 1:
        return leaves[0], None if leaves[0] is dataset else items
    first = leaves[0]
    for other in leaves[1:]:
        for name in ("target", "target_transform", "target_dtype", "keys", "output", "aspect"):
            if getattr(other, name) != getattr(first, name):
                raise UsageError(
                    f"dataset={dataset!r} joins datasets of {name}={getattr(first, name)!r} and "
                    f"{name}={getattr(other, name)!r}; give them the same"
                )
    joint = H5Dataset(
        [path for leaf in leaves for path in leaf.files.paths],
        target_transform=first.target_transform,
        target_dtype=first.target_dtype,
        target=first.target,
        keys=first.keys,
        max_pixels=max(leaf.max_pixels for leaf in leaves),
    )
    return joint, items


def _items_of(dataset: Any, whole: Any, leaves: list[H5Dataset], starts: dict[int, int]) -> Indices:
    """Return the items of one dataset, as positions in all `leaves` one after the other."""
    if isinstance(dataset, H5Dataset):
        if id(dataset) not in starts:
            starts[id(dataset)] = sum(len(leaf) for leaf in leaves)
            leaves.append(dataset)
        start = starts[id(dataset)]
        return np.arange(start, start + len(dataset))
    if isinstance(dataset, Subset):
        chosen = np.asarray(dataset.indices, np.int64).reshape(-1)
        inner = _items_of(dataset.dataset, whole, leaves, starts)
        if chosen.size and not -len(inner) <= chosen.min() <= chosen.max() < len(inner):
            raise UsageError(
                f"dataset={whole!r} has indices from {chosen.min()} to {chosen.max()}, and what it "
                f"is a part of has 0 to {len(inner) - 1}"
            )
        picked: Indices = inner[chosen]
        return picked
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_items_of(d, whole, leaves, starts) for d in dataset.datasets])
    raise UsageError(
        f"dataset={whole!r} is not an H5Dataset, nor a Subset or ConcatDataset of such; for any "
        "other dataset use torch's DataLoader"
    )


# --- what is read from it -------------------------------------------------------------------------


class PlannedBatch(list[int]):
    """Positions in the loader's dataset, with all that decides what their batch looks like.

    A DataLoader over an H5Dataset with a loader's `batch_sampler` and `collate_fn` hands one
    through to the latter, which makes of it the batch that the loader would have delivered.
    """

    def __init__(self, places: list[int], samples: Samples | None = None) -> None:
        super().__init__(places)
        self.samples = samples

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedBatch, (list(self), self.samples)


class PlannedSubset(Subset[Any]):
    """A Subset that hands planned batches through, as H5Dataset does."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples, or the plan."""
        return indices if isinstance(indices, PlannedBatch) else super().__getitems__(indices)


class PlannedConcat(ConcatDataset[Any]):
    """The same of a ConcatDataset."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples, or the plan."""
        return indices if isinstance(indices, PlannedBatch) else [self[at] for at in indices]


def as_planned(dataset: Any) -> Any:
    """Return a dataset that hands planned batches through; one of a class of the caller's as is."""
    if type(dataset) is Subset:
        return PlannedSubset(dataset.dataset, dataset.indices)
    return PlannedConcat(dataset.datasets) if type(dataset) is ConcatDataset else dataset


class DataLoaderFacts:
    """Attributes of a DataLoader, for code that asks.

    Further ones: `dataset`, `batch_size`, `drop_last`, `num_workers` (threads).
    """

    batch_size: int
    drop_last: bool
    prefetch: int
    pin_memory = False
    """Batches are delivered on the device."""
    pin_memory_device = ""
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    """None: nothing of the caller's runs in the workers."""
    multiprocessing_context: Any = None
    """None: the workers are threads, or processes that `engine` starts in its own way."""
    generator: torch.Generator | None = None
    """None: the order is a function of `seed`."""
    persistent_workers = True
    in_order = True

    @property
    def prefetch_factor(self) -> int:
        """Batches in the making at once, of all workers together."""
        return self.prefetch

    @property
    def sampler(self) -> LoaderSampler:
        """The order of this rank's samples, with a `set_epoch` that is the loader's."""
        return LoaderSampler(self)

    @property
    def batch_sampler(self) -> LoaderBatchSampler:
        """The same in batches. Iterating it is a pass, as iterating the loader is."""
        return LoaderBatchSampler(self)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`."""

    @abstractmethod
    def _share(self) -> int:
        """Return how many samples of a whole epoch this rank has."""

    @abstractmethod
    def _places(self) -> Iterator[NDArray[np.int64]]:
        """Give the positions in `dataset` of this rank's batches in the next pass."""

    @abstractmethod
    def _plans(self) -> Iterator[PlannedBatch]:
        """Give the batches of a pass as plans, and count them as delivered."""


class LoaderSampler(Sampler[int]):
    """What `loader.sampler` is. `len` is what one rank has of a whole epoch."""

    def __init__(self, loader: DataLoaderFacts) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader._share()

    def __iter__(self) -> Iterator[int]:
        for places in self._loader._places():
            yield from places.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Make the loader's next pass that of `epoch`."""
        self._loader.set_epoch(epoch)


class LoaderBatchSampler(BatchSampler):
    """What `loader.batch_sampler` is."""

    def __init__(self, loader: DataLoaderFacts) -> None:
        super().__init__(loader.sampler, loader.batch_size, loader.drop_last)
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader._plans()

    def set_epoch(self, epoch: int) -> None:
        """Make the loader's next pass that of `epoch`."""
        self._loader.set_epoch(epoch)


class LoaderCollate:
    """What `loader.collate_fn` is: makes planned batches on the CPU, in any process.

    Args:
        build: makes what makes batches, once in each process that needs it.
        changes: the ops of the loader, which samples of the dataset have not seen.

    """

    def __init__(self, build: Callable[[], BatchBuilder], changes: object) -> None:
        self._build = build
        self._changes = changes
        self._built: tuple[int, BatchBuilder] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}

    def __call__(self, samples: Any) -> Any:
        """Return the batch of a PlannedBatch, or of a list of samples of a loader without ops."""
        if isinstance(samples, PlannedBatch) and samples.samples is not None:
            if self._built is None or self._built[0] != os.getpid():
                if get_worker_info() is not None:
                    cv2.setNumThreads(0)  # a forked worker waits forever for the parent's threads
                self._built = os.getpid(), self._build()
            return _make(self._built[1], samples.samples)
        if self._changes:
            raise UsageError(
                f"collate_fn gets samples of the dataset, which augment={self._changes!r} has not "
                "seen: iterate the loader itself (after load_state_dict, in mid-epoch), or make it "
                "of an H5Dataset, a Subset or a ConcatDataset of torch's own"
            )
        return collate(samples)


class _Planned:
    """One batch in the place of a ReadAhead, and the calling thread in that of an engine."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def samples(self, step: int) -> Samples:
        return self._samples

    def chunk(self, count: int, prefetch: int) -> int:
        return count

    def fill(self, task: BatchTask, chunks: Sequence[range]) -> None:
        for rows in chunks:
            task.fill(rows)


def _make(builder: BatchBuilder, samples: Samples) -> Any:
    one: Any = _Planned(samples)
    epoch = Epoch(builder=builder, ahead=one, engine=one)
    epoch.iterator = lambda: one
    task = BatchTask(epoch, 0)
    task.plan()
    if task.error is not None:
        raise task.take_error()
    return task.batch


def places_of(items: Indices | None) -> Callable[[Indices], Indices]:
    """Return the way back from items to where a dataset of these has them."""
    if items is None:
        return lambda found: found
    order = np.argsort(items, kind="stable")
    ordered = items[order]

    def back(found: Indices) -> Indices:
        places: Indices = order[np.searchsorted(ordered, found)]
        return places

    return back
