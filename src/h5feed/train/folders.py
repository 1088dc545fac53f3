"""Training from folders of images, the way the blogs do: torchvision's ImageFolder."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from h5feed.errors import UsageError
from h5feed.optional import require
from h5feed.train.config import TrainConfig
from h5feed.train.data import Data, Loader, check_batch
from h5feed.train.distributed import World
from h5feed.train.packed import Kind, check_alike, choose_outputs
from h5feed.train.recipes import scoring_ops, to_torchvision, training_ops
from h5feed.train.stock import Augmented, ScoringLoader, StockLoader

__all__ = ["open_folders"]

_STATISTICS_OF = 256
_USUAL_SIZE = 224


def open_folders(config: TrainConfig, world: World, batch_size: int) -> Data:
    """Open TRAIN and --val as folders of class folders.

    Raises UsageError for a folder that is none, ImportError without torchvision.
    """
    if config.loss.task not in ("auto", "classification") and ":" not in config.loss.task:
        raise UsageError(f"--loader imagefolder has classes only, not --task {config.loss.task}")
    train = _open(config.train)
    kind = _kind(train, config, config.train)
    size = config.data.size or _USUAL_SIZE
    val_loader = None
    if config.val is not None:
        val = _open(config.val)
        check_alike(kind, _kind(val, config, config.val), config.train, config.val)
        scored = Augmented(val, _scoring_transform(config, size), seed=0, masks=False)
        val_loader = ScoringLoader(scored, len(val), batch_size, config.data, world)
    mean, std = _statistics(train, _scoring_transform(config, size))
    return Data(
        task=kind.task,
        num_outputs=kind.num_outputs,
        classes=kind.classes,
        mean=mean,
        std=std,
        size=size,
        train_loader=partial(_training, config, world, train, batch_size, mean),
        count=len(train),
        val_loader=val_loader,
    )


def _open(root: Path) -> Any:
    datasets = require("torchvision.datasets", "train")
    try:
        return datasets.ImageFolder(root)
    except (FileNotFoundError, NotADirectoryError) as ex:
        raise UsageError(f"--loader imagefolder cannot take {root}: {ex}") from ex


def _kind(folder: Any, config: TrainConfig, path: Path) -> Kind:
    classes = tuple(folder.classes)
    count = len(classes)
    if config.loss.num_outputs:
        count = choose_outputs(config.loss, "classification", count, path)
    return Kind(task="classification", num_outputs=count, classes=classes)


def _training(
    config: TrainConfig,
    world: World,
    folder: Any,
    batch_size: int,
    mean: tuple[float, ...],
    size: int,
) -> Loader:
    check_batch(config, world, len(folder))
    ops = to_torchvision(training_ops(config.data, size, None, dense=False, mean=mean))
    augmented = Augmented(folder, _to_tensor(ops), seed=config.seed, masks=False)
    return StockLoader(augmented, len(folder), batch_size, config.data, world, seed=config.seed)


def _scoring_transform(config: TrainConfig, size: int) -> Any:
    return _to_tensor(to_torchvision(scoring_ops(config.data, size, None, dense=False)))


def _to_tensor(transform: Any) -> Any:
    v2 = require("torchvision.transforms.v2", "train")
    return v2.Compose([transform, v2.PILToTensor()])


def _statistics(folder: Any, transform: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of evenly spaced images, 0 to 255."""
    count = min(len(folder), _STATISTICS_OF)
    chosen = np.linspace(0, len(folder) - 1, count).round().astype(int)
    pixels = np.stack([transform(folder[index][0]).numpy() for index in chosen.tolist()])
    means, stds = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3), dtype=np.float64)
    return tuple(means.tolist()), tuple(stds.clip(1.0).tolist())
