"""A learnable set in memory, so that the trainer is tested without any file."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from h5feed.train.config import (
    DataConfig,
    DebugConfig,
    DistributedConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RecipeConfig,
    ScheduleConfig,
    SpeedConfig,
    TrainConfig,
)
from h5feed.train.data import Data

_SUBTREES = {
    "model": ModelConfig,
    "loss": LossConfig,
    "data": DataConfig,
    "recipe": RecipeConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "speed": SpeedConfig,
    "distributed": DistributedConfig,
    "debug": DebugConfig,
}


def make_config(out: Path, **options) -> TrainConfig:
    """A small run on the CPU; `options` are flat, as on the command line."""
    flat = {
        "epochs": 2,
        "batch_size": 16,
        "device": "cpu",
        "model": f"{__name__}:tiny",
        "log_every": 1,
        "lr": 0.01,
        "curves": False,
        "tensorboard": False,
        **options,
    }
    trees = {}
    for name, kind in _SUBTREES.items():
        names = kind.__dataclass_fields__
        trees[name] = kind(**{key: flat.pop(key) for key in list(flat) if key in names})
    return TrainConfig(train=Path("none.h5"), out=out, **flat, **trees)


class MemoryLoader:
    """Batches of tensors in memory; order a function of (seed, epoch)."""

    def __init__(self, images, targets, batch, *, seed=0, rank=0, world_size=1, shuffle=True):
        self.images, self.targets, self.batch = images, targets, batch
        self.seed, self.rank, self.world_size, self.shuffle = seed, rank, world_size, shuffle
        self.epoch, self.done = 0, 0

    def __len__(self):
        return len(self.images) // (self.batch * self.world_size)

    def set_epoch(self, epoch):
        self.epoch, self.done = epoch, 0

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]

    def __iter__(self):
        count = len(self.images)
        order = np.arange(count)
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(count)
        while self.done < len(self):
            first = (self.done * self.world_size + self.rank) * self.batch
            chosen = torch.from_numpy(order[first : first + self.batch])
            self.done += 1
            yield self.images[chosen], self.targets[chosen]


def make_images(count=64, size=8, classes=4, seed=0):
    """Images whose class is the brightest channel or quarter; uint8, channels_last."""
    draws = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 120, (count, 3, size, size), generator=draws, dtype=torch.uint8)
    labels = torch.arange(count) % classes
    half = size // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = (label // 2) * half, (label % 2) * half
        image[:, top : top + half, left : left + half] += 100
    return images.contiguous(memory_format=torch.channels_last), labels


def make_data(
    config: TrainConfig, *, count=64, size=8, world=(0, 1), several=False, **changes
) -> Data:
    """A `Data` over `make_images`; with `several`, each image has two classes."""
    images, labels = make_images(count, size)
    if several:
        both = torch.stack((labels, (labels + 1) % 4), 1)
        labels = torch.zeros(count, 4).scatter_(1, both, 1)
    rank, world_size = world
    batch = config.batch_size // (config.speed.accumulate * world_size)

    def train_loader(side):
        resized = images
        if side != size:
            resized = torch.nn.functional.interpolate(images.float(), side)
        return MemoryLoader(
            resized, labels, batch, seed=config.seed, rank=rank, world_size=world_size
        )

    data = Data(
        task="multi-label" if several else "classification",
        num_outputs=4,
        mean=(100.0, 100.0, 100.0),
        std=(50.0, 50.0, 50.0),
        size=size,
        train_loader=train_loader,
        val_loader=list(
            MemoryLoader(images[rank::world_size], labels[rank::world_size], 8, shuffle=False)
        ),
    )
    return replace(data, **changes)


def tiny(num_outputs: int) -> torch.nn.Module:
    """A network without batch norm, so that splitting a batch changes nothing."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.GroupNorm(2, 8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(128, num_outputs),
    )


def error_on_full_disk(most: int, work: Callable[[], Any]) -> str:
    """What `work` raises in a process whose files may have no more than `most` bytes, or ""."""
    import resource

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        try:
            work()
        except BaseException as ex:
            os.write(writer, f"{type(ex).__name__}: {ex}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader, "rb") as file:
        return file.read().decode()
