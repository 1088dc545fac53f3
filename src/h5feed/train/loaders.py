"""What batches come through: the `Loader` protocol, torch's DataLoader behind it, and noise.

H5Loader keeps the protocol as it is. torch's DataLoader gets exact resume and equal steps on all
ranks here; worker processes that persist, pinned memory and copies that do not block are what
PyTorch's Performance Tuning Guide advises.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from h5feed.feed.dataloader import collate
from h5feed.feed.order import FullShuffle
from h5feed.feed.random import hash_ints
from h5feed.feed.sampling import Steps
from h5feed.system import available_cores
from h5feed.train.config import DataConfig
from h5feed.train.distributed import World

__all__ = [
    "AugmentedSamples",
    "Batch",
    "Loader",
    "ScoringLoader",
    "StockLoader",
    "SyntheticLoader",
    "random_batch",
]

Batch = tuple[Tensor, Tensor]
Key = tuple[int, int]
"""Epoch and index of a sample."""


class Loader(Protocol):
    """Batches of one process, on its device; H5Loader and whatever takes its place.

    Images are uint8 (B, 3, H, W), channels_last; targets int64 (B,), float32 (B, K), or for
    masks uint8 or int64 (B, H, W).
    """

    def __iter__(self) -> Iterator[Batch]:
        """Yield what is left of the epoch; all of it unless a state was loaded."""
        ...

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`: its own order and its own augmentation."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands: what was handed out counts, what was prefetched does not."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there again."""
        ...


class AugmentedSamples(Dataset[tuple[Tensor, Any]]):
    """A map-style dataset under torchvision transforms, random as a function.

    Samples are asked for by (epoch, index), from which, with `seed`, the transforms' generator
    is set: workers, batches and a resume change no image. Masks get their image's geometry.
    """

    def __init__(
        self, source: Dataset[Any], transform: Callable[..., Any], *, seed: int, masks: bool
    ) -> None:
        self._source, self._transform = source, transform
        self._seed, self._masks = seed, masks

    def __getitem__(self, key: Key) -> tuple[Tensor, Any]:
        epoch, index = key
        image, target = self._source[index]
        with _seeded(hash_ints(self._seed, epoch, index)):
            if not self._masks:
                return self._transform(image), target
            from torchvision.tv_tensors import Image, Mask  # its transforms tell them apart so

            image, target = self._transform(Image(image), Mask(target))
            return image.as_subclass(Tensor), target.as_subclass(Tensor)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Let the CPU's generator begin at `seed`, and afterwards go on where it stood.

    torch.manual_seed in fork_rng does the same and asks every kind of device besides: 98 µs a
    sample where this takes 2, of some 460 for the whole sample.
    """
    generator = torch.default_generator
    before = generator.get_state()
    try:
        generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(before)


class StockLoader:
    """A DataLoader whose order is a function of (seed, epoch), for training.

    >>> from h5feed import H5Dataset
    >>> from h5feed.train.config import DataConfig
    >>> ds = H5Dataset("photos.h5")
    >>> world = World(rank=0, size=1, device=torch.device("cpu"))
    >>> samples = AugmentedSamples(ds, lambda image: image, seed=0, masks=False)
    >>> loader = StockLoader(samples, len(ds), 4, DataConfig(workers=0), world, seed=0)
    >>> [labels.shape for images, labels in loader]
    [torch.Size([4]), torch.Size([4]), torch.Size([4])]
    """

    def __init__(
        self,
        dataset: AugmentedSamples,
        count: int,
        batch_size: int,
        config: DataConfig,
        world: World,
        *,
        seed: int,
    ) -> None:
        """`count` are the samples of `dataset`, `batch_size` this process's own."""
        self._batches = _Batches(count, batch_size, world, seed)
        self._loader = _dataloader(dataset, self._batches, config, world)
        self._world = world

    def __len__(self) -> int:
        return len(self._batches.steps(0))

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            self._batches.consumed += self._batches.stride
            yield _on_device(batch, self._world.device)

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`."""
        self._batches.epoch, self._batches.consumed = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the samples that all processes together have had of it."""
        return {"epoch": self._batches.epoch, "consumed": self._batches.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there again, at any batch and world size."""
        self._batches.epoch, self._batches.consumed = state["epoch"], state["consumed"]


class _Batches:
    """A batch sampler: lists of keys, from where the epoch stands."""

    def __init__(self, count: int, batch_size: int, world: World, seed: int) -> None:
        self._count, self._batch_size, self._world, self._seed = count, batch_size, world, seed
        self.epoch, self.consumed = 0, 0
        self.stride = batch_size * world.size

    def steps(self, start: int) -> Steps:
        return Steps(
            samples=self._count,
            batch_size=self._batch_size,
            rank=self._world.rank,
            world_size=self._world.size,
            drop_last=True,
            start=start,
        )

    def __len__(self) -> int:
        return len(self.steps(self.consumed))

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, steps = self.epoch, self.steps(self.consumed)
        order = FullShuffle(self._count, self._seed, epoch)
        for step in range(len(steps)):
            yield [(epoch, index) for index in order(steps.positions(step)).tolist()]


@dataclass(frozen=True)
class _Share:
    """A batch sampler over one process's share of the images to score on, in order."""

    count: int
    batch_size: int
    world: World

    def __iter__(self) -> Iterator[list[Key]]:
        mine = range(self.world.rank, self.count, self.world.size)
        for first in range(0, len(mine), self.batch_size):
            yield [(0, index) for index in mine[first : first + self.batch_size]]


class ScoringLoader:
    """A DataLoader over one process's share of the images to score on."""

    def __init__(
        self,
        dataset: AugmentedSamples,
        count: int,
        batch_size: int,
        config: DataConfig,
        world: World,
    ) -> None:
        batches = _Share(count, batch_size, world)
        self._loader = _dataloader(dataset, batches, config, world)
        self._device = world.device

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            yield _on_device(batch, self._device)


def _dataloader(
    dataset: AugmentedSamples, batches: Any, config: DataConfig, world: World
) -> DataLoader[Any]:
    workers = config.workers
    if workers < 0:
        workers = max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=config.pin_memory and world.device.type == "cuda",
        persistent_workers=config.persistent_workers and workers > 0,
        prefetch_factor=config.prefetch if workers else None,
        # It draws a number for its workers in every epoch; from torch's own generator, a resumed
        # run would draw one more, and dropout others from there on.
        generator=torch.Generator(),
    )


def _on_device(batch: Any, device: torch.device) -> Batch:
    images, targets = batch
    return images.to(device, non_blocking=True), targets.to(device, non_blocking=True)


class SyntheticLoader:
    """The same random batch, on the device already, as often as an epoch has batches.

    >>> batch = random_batch("classification", 10, 8, 32, seed=0, device=torch.device("cpu"))
    >>> len(list(SyntheticLoader(batch, batches=5)))
    5
    """

    def __init__(self, batch: Batch, batches: int) -> None:
        self._batch, self._batches = batch, batches
        self._epoch, self._done = 0, 0

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        while self._done < self._batches:
            self._done += 1
            yield self._batch

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, which is like every other."""
        self._epoch, self._done = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches were handed out."""
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after as many."""
        self._epoch, self._done = state["epoch"], state["done"]


def random_batch(
    task: str, num_outputs: int, count: int, size: int, seed: int, device: torch.device
) -> Batch:
    """Return noise that has the types and shapes of a batch of `count` images of `size` px.

    >>> cpu = torch.device("cpu")
    >>> images, masks = random_batch("segmentation", 3, count=2, size=32, seed=0, device=cpu)
    >>> images.shape, masks.shape
    (torch.Size([2, 3, 32, 32]), torch.Size([2, 32, 32]))
    """
    draws = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=draws)
    images = pixels.to(device).permute(0, 3, 1, 2)
    if task == "regression":
        return images, torch.randn(count, num_outputs, generator=draws).to(device)
    if task == "multi-label":
        return images, torch.randint(0, 2, (count, num_outputs), generator=draws).float().to(device)
    shape = (count, size, size) if task == "segmentation" else (count,)
    return images, torch.randint(0, num_outputs, shape, generator=draws).to(device)
