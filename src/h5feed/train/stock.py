"""torch's own DataLoader behind the `Loader` protocol: exact resume, equal steps on all ranks.

Worker processes that persist, pinned memory and copies that do not block are what PyTorch's
Performance Tuning Guide advises.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from h5feed.train.step import Batch

__all__ = ["Augmented", "ScoringLoader", "StockLoader"]

Key = tuple[int, int]
"""Epoch and index of a sample."""


class Augmented(Dataset[tuple[Tensor, Any]]):
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
    """A DataLoader whose order is a function of (seed, epoch), for training."""

    def __init__(
        self,
        dataset: Augmented,
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
        self, dataset: Augmented, count: int, batch_size: int, config: DataConfig, world: World
    ) -> None:
        batches = _Share(count, batch_size, world)
        self._loader = _dataloader(dataset, batches, config, world)
        self._device = world.device

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            yield _on_device(batch, self._device)


def _dataloader(
    dataset: Augmented, batches: Any, config: DataConfig, world: World
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
