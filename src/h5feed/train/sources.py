"""The files that a configuration names: opened, checked, and behind the loader it names."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from h5feed.errors import UsageError
from h5feed.feed import H5Dataset
from h5feed.feed.facts import channel_stats
from h5feed.feed.loader import H5Loader
from h5feed.train.config import DataConfig, TrainConfig
from h5feed.train.data import Data, Loader, check_batch
from h5feed.train.distributed import World
from h5feed.train.folders import open_folders
from h5feed.train.packed import Kind, check_alike, default_size, read_kind, stored_size
from h5feed.train.recipes import scoring_ops, to_torchvision, training_ops
from h5feed.train.step import Batch
from h5feed.train.stock import Augmented, ScoringLoader, StockLoader
from h5feed.train.synthetic import SyntheticLoader, random_batch

__all__ = ["open_data"]

_STATISTICS_OF = 1024
"""Images that mean and standard deviation are taken from; three digits are enough."""


def open_data(config: TrainConfig, world: World) -> Data:
    """Open what `config` names, behind the loader it names.

    Raises FileNotFoundError, H5FormatError, and UsageError for what cannot be trained on.
    """
    batch_size = part_size(config, world)
    if config.data.loader == "imagefolder":
        return open_folders(config, world, batch_size)
    train = _open(config.train, config.data)
    kind = read_kind(train, config.train, config.loss)
    size = config.data.size or default_size(train)
    stats = channel_stats(train.pixels, limit=_STATISTICS_OF)
    mean = tuple(255 * value for value in stats.mean)
    return Data(
        task=kind.task,
        num_outputs=kind.num_outputs,
        classes=kind.classes,
        mean=mean,
        std=tuple(max(1.0, 255 * value) for value in stats.std),
        size=size,
        train_loader=partial(_training, config, world, train, kind, batch_size, mean),
        count=len(train),
        val_loader=_scoring(config, world, kind, batch_size, size),
    )


def _open(path: Path, data: DataConfig) -> H5Dataset:
    """Open a file; torchvision's transforms see true proportions, as H5Loader's ops do."""
    return H5Dataset(path, aspect="source" if data.loader == "dataloader" else "stored")


def part_size(config: TrainConfig, world: World) -> int:
    """Return the images that one process computes at a time."""
    parts = config.speed.accumulate * world.size
    if config.batch_size % parts:
        raise UsageError(
            f"--batch-size {config.batch_size} cannot be shared by {world.size} processes in "
            f"--accumulate {config.speed.accumulate} equal parts: choose a multiple of {parts}"
        )
    return config.batch_size // parts


def _training(
    config: TrainConfig,
    world: World,
    ds: H5Dataset,
    kind: Kind,
    batch_size: int,
    mean: tuple[float, ...],
    size: int,
) -> Loader:
    """Make the training loader for images of `size` px."""
    check_batch(config, world, len(ds))
    data, dense = config.data, kind.task == "segmentation"
    ignored = config.loss.ignore_index
    ops = training_ops(data, size, stored_size(ds), dense=dense, ignore_index=ignored, mean=mean)
    if data.loader == "synthetic":
        batch = random_batch(
            kind.task, kind.num_outputs, batch_size, size, config.seed, world.device
        )
        return SyntheticLoader(batch, len(ds) // (batch_size * world.size))
    if data.loader == "dataloader":
        augmented = Augmented(ds, to_torchvision(ops), seed=config.seed, masks=dense)
        return StockLoader(augmented, len(ds), batch_size, data, world, seed=config.seed)
    return _packed_loader(
        config,
        world,
        ds,
        batch_size,
        shuffle=True,
        augment=ops,
        drop_last=True,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
    )


def _scoring(
    config: TrainConfig, world: World, kind: Kind, batch_size: int, size: int
) -> Iterable[Batch] | None:
    """Make the loader of this process's share of the images to score on."""
    if config.val is None:
        return None
    data, dense = config.data, kind.task == "segmentation"
    ds = _open(config.val, data)
    check_alike(kind, read_kind(ds, config.val, config.loss), config.train, config.val)
    ops = scoring_ops(data, size, stored_size(ds), dense=dense)
    if data.loader == "dataloader":
        augmented = Augmented(ds, to_torchvision(ops), seed=0, masks=dense)
        return ScoringLoader(augmented, len(ds), batch_size, data, world)
    return _packed_loader(
        config,
        world,
        ds,
        batch_size,
        shuffle=False,
        augment=ops,
        indices=range(world.rank, len(ds), world.size),
        rank=0,
        world_size=1,
    )


def _packed_loader(
    config: TrainConfig, world: World, ds: H5Dataset, batch_size: int, **options: Any
) -> Loader:
    """Make h5feed's own loader, or DALI's, which takes the same. ImportError without DALI."""
    data = config.data
    options |= {
        "device": world.device,
        "num_workers": "auto" if data.workers < 0 else max(1, data.workers),
        "prefetch": data.prefetch,
    }
    if data.loader == "dali":
        from h5feed.interop.dali import DaliLoader

        return DaliLoader(ds, batch_size, **options)
    return H5Loader(ds, batch_size, augment_on=data.augment_on, residency=data.residency, **options)
