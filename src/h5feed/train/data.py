"""What a run trains on: the files or folders that a configuration names, behind its loader."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5feed.augment import (
    AlternatingFlip,
    AugMix,
    AutoAugment,
    CenterCrop,
    ColorJitter,
    Op,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    TrivialAugmentWide,
)
from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.facts import channel_stats
from h5feed.feed.loader import H5Loader
from h5feed.optional import require
from h5feed.train.config import DataConfig, LossConfig, TrainConfig
from h5feed.train.distributed import World
from h5feed.train.loaders import (
    AugmentedSamples,
    Batch,
    Loader,
    ScoringLoader,
    StockLoader,
    SyntheticLoader,
    random_batch,
)

__all__ = [
    "Data",
    "check_batch",
    "default_size",
    "open_data",
    "part_size",
    "scoring_ops",
    "to_torchvision",
    "training_ops",
]

_STATISTICS_OF = 1024
"""Images that mean and standard deviation are taken from; three digits are enough."""
_FILES_STATISTICS_OF = 256
"""Likewise of a folder's files, each of which is decoded whole."""
_MASKS_LOOKED_AT = 512
_USUAL_SIZE = 224
"""Pixels: what ImageNet's models are trained and compared at."""
_SMALL = 64
"""Up to this side, images are the object itself, as CIFAR's: nothing is to be cropped away."""
_DENSE_SCALE = (0.25, 1.0)
"""Share of a scene that a crop keeps where every pixel has a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A set to train on, and perhaps one to score on.

    Data of your own, in memory, in the files' place:

    >>> import torch
    >>> from h5feed.train import train
    >>> from h5feed.train.config import DebugConfig, ModelConfig
    >>> from h5feed.train.loaders import SyntheticLoader, random_batch
    >>> def loader(size):
    ...     cpu = torch.device("cpu")
    ...     batch = random_batch("classification", 2, count=8, size=size, seed=0, device=cpu)
    ...     return SyntheticLoader(batch, batches=3)
    >>> mean, std = (127.0,) * 3, (74.0,) * 3
    >>> data = Data(
    ...     task="classification", num_outputs=2, mean=mean, std=std, size=16, train_loader=loader
    ... )
    >>> config = TrainConfig(
    ...     train=Path("nothing"),
    ...     epochs=2,
    ...     batch_size=8,
    ...     model=ModelConfig(model="resnet9-small"),
    ...     debug=DebugConfig(curves=False, tensorboard=False),
    ... )
    >>> train(config, data).steps
    6
    """

    task: str
    """What its targets are for: classification, multi-label, regression or segmentation."""
    num_outputs: int
    """Classes, or targets per image."""
    mean: tuple[float, ...]
    """Of the training pixels per channel, on the scale 0 to 255."""
    std: tuple[float, ...]
    """Likewise."""
    size: int
    """Side in pixels of the images that the model sees."""
    train_loader: Callable[[int], Loader]
    """Makes the training loader for images of a given side; equal batches, no short one.

    Raises UsageError where the images are too few for a batch.
    """
    classes: tuple[str, ...] = ()
    """Their names, where they have some."""
    count: int = 0
    """Images to train on; 0 if unknown."""
    val_loader: Iterable[Batch] | None = None
    """This process's share of the images to score on; the last batch may be short."""


def open_data(config: TrainConfig, world: World) -> Data:
    """Open what `config` names, behind the loader it names.

    Raises FileNotFoundError, H5FormatError, ImportError without the loader's library, and
    UsageError for what cannot be trained on.

    >>> from h5feed.train.distributed import join_world
    >>> with join_world("cpu") as world:
    ...     data = open_data(TrainConfig(train=Path("photos.h5"), batch_size=4), world)
    ...     images, labels = next(iter(data.train_loader(data.size)))
    >>> data.task, data.num_outputs, images.shape
    ('classification', 2, torch.Size([4, 3, 64, 64]))
    """
    batch_size = part_size(config, world)
    train = _open(config.train, config)
    size = config.data.size or train.usual_size
    val_loader = None
    if config.val is not None:
        val = _open(config.val, config)
        _check_alike(train.targets, val.targets, config.train, config.val)
        val_loader = _scoring(config, world, val, batch_size, config.data.val_size or size)
    mean, std = _statistics(train, config, size)
    return Data(
        task=train.targets.task,
        num_outputs=train.targets.num_outputs,
        classes=train.targets.classes,
        mean=mean,
        std=std,
        size=size,
        train_loader=partial(_training, config, world, train, batch_size, mean),
        count=len(train.dataset),
        val_loader=val_loader,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Targets:
    """What the targets of a set are."""

    task: str
    """classification, multi-label, regression or segmentation."""
    num_outputs: int
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A packed file, or a folder of class folders."""

    dataset: Any
    """An H5Dataset, or torchvision's ImageFolder."""
    targets: _Targets
    stored: tuple[int, int] | None
    """(height, width) in which its images are handed out; None where they differ."""
    usual_size: int
    """Side in pixels of the images that a model sees, unless --size says another."""

    @property
    def dense(self) -> bool:
        """Whether each pixel has a class."""
        return self.targets.task == "segmentation"

    def augmented(self, ops: Sequence[Op], seed: int) -> AugmentedSamples:
        """Return the set under torchvision's transforms that do what `ops` do."""
        transform = to_torchvision(ops)
        if not isinstance(self.dataset, H5Dataset):
            v2 = require("torchvision.transforms.v2", "train")
            transform = v2.Compose([transform, v2.PILToTensor()])
        return AugmentedSamples(self.dataset, transform, seed=seed, masks=self.dense)


def _open(path: Path, config: TrainConfig) -> _Opened:
    if config.data.loader == "imagefolder":
        return _open_folder(path, config.loss)
    # torchvision's transforms see true proportions, as H5Loader's ops do.
    ds = H5Dataset(path, aspect="source" if config.data.loader == "dataloader" else "stored")
    targets = _read_targets(ds, path, config.loss)
    spec = ds.files.specs["images"]
    unlike = ds.aspect == "source" and spec.fit in ("stretch", "pad")
    return _Opened(
        dataset=ds,
        targets=targets,
        stored=None if unlike else spec.common_size,
        usual_size=default_size(ds),
    )


def default_size(ds: H5Dataset) -> int:
    """Return the side of the images that a model sees: the stored short side, up to 224 px."""
    spec = ds.files.specs["images"]
    return min(spec.height or _USUAL_SIZE, spec.width or _USUAL_SIZE, _USUAL_SIZE)


def _open_folder(root: Path, loss: LossConfig) -> _Opened:
    """Open class folders of image files, the way the blogs do."""
    if loss.task not in ("auto", "classification") and ":" not in loss.task:
        raise UsageError(f"--loader imagefolder has classes only, not --task {loss.task}")
    datasets = require("torchvision.datasets", "train")
    try:
        folder = datasets.ImageFolder(root)
    except (FileNotFoundError, NotADirectoryError) as ex:
        raise UsageError(f"--loader imagefolder cannot take {root}: {ex}") from ex
    count = len(folder.classes)
    if loss.num_outputs:
        count = _choose_outputs(loss, "classification", count, root)
    targets = _Targets(task="classification", num_outputs=count, classes=tuple(folder.classes))
    return _Opened(dataset=folder, targets=targets, stored=None, usual_size=_USUAL_SIZE)


def _statistics(
    train: _Opened, config: TrainConfig, size: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of evenly spaced images, 0 to 255."""
    if isinstance(train.dataset, H5Dataset):
        stats = channel_stats(train.dataset.files, limit=_STATISTICS_OF)
        mean, std = 255 * np.array(stats.mean), 255 * np.array(stats.std)
    else:
        count = len(train.dataset)
        chosen = np.linspace(0, count - 1, min(count, _FILES_STATISTICS_OF)).round().astype(int)
        scored = train.augmented(scoring_ops(config.data, size, None, dense=False), seed=0)
        pixels = np.stack([scored[0, index][0].numpy() for index in chosen.tolist()])
        mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3), dtype=np.float64)
    return tuple(mean.tolist()), tuple(std.clip(1.0).tolist())


def part_size(config: TrainConfig, world: World) -> int:
    """Return the images that one process computes at a time."""
    parts = config.speed.accumulate * world.size
    if config.batch_size % parts:
        raise UsageError(
            f"--batch-size {config.batch_size} cannot be shared by {world.size} processes in "
            f"--accumulate {config.speed.accumulate} equal parts: choose a multiple of {parts}"
        )
    return config.batch_size // parts


def check_batch(config: TrainConfig, world: World, images: int) -> None:
    """Raise UsageError where `images`, for all processes together, do not make one batch."""
    if config.batch_size <= images:
        return
    parts = config.speed.accumulate * world.size
    most = images - images % parts
    advice = f"take {most} or fewer" if most else f"it takes {parts} for a batch at least"
    raise UsageError(
        f"--batch-size {config.batch_size} is more than the {images} images of "
        f"{config.train}: {advice}"
    )


def _training(
    config: TrainConfig,
    world: World,
    train: _Opened,
    batch_size: int,
    mean: tuple[float, ...],
    size: int,
) -> Loader:
    """Make the training loader for images of `size` px."""
    data, count, seed = config.data, len(train.dataset), config.seed
    check_batch(config, world, count)
    _check_sampling(config, train.targets)
    ops = training_ops(
        data,
        size,
        train.stored,
        dense=train.dense,
        ignore_index=config.loss.ignore_index,
        mean=mean,
    )
    if data.loader == "synthetic":
        targets = train.targets
        batch = random_batch(
            targets.task, targets.num_outputs, batch_size, size, seed, world.device
        )
        return SyntheticLoader(batch, count // (batch_size * world.size))
    if data.loader in ("dataloader", "imagefolder"):
        return StockLoader(train.augmented(ops, seed), count, batch_size, data, world, seed=seed)
    return _packed_loader(
        config,
        world,
        train.dataset,
        batch_size,
        shuffle=True,
        augment=ops,
        drop_last=True,
        seed=seed,
        rank=world.rank,
        world_size=world.size,
        **({"weights": "balanced"} if data.balance else {}),
        **({"repeats": data.aug_repeats} if data.aug_repeats > 1 else {}),
    )


def _check_sampling(config: TrainConfig, targets: _Targets) -> None:
    """Raise UsageError where images cannot be drawn as they are asked for."""
    data = config.data
    asked = "--balance" if data.balance else f"--aug-repeats {data.aug_repeats}"
    if not data.balance and data.aug_repeats == 1:
        return
    if data.loader not in ("h5loader", "synthetic"):
        raise UsageError(
            f"{asked} is for --loader h5loader, and {data.loader} takes each image once an epoch: "
            "leave it out"
        )
    if data.balance and targets.task != "classification":
        raise UsageError(
            f"--balance needs one class an image, and {config.train} is for {targets.task}: leave "
            "it out"
        )


def _scoring(
    config: TrainConfig, world: World, val: _Opened, batch_size: int, size: int
) -> Iterable[Batch]:
    """Make the loader of this process's share of the images to score on."""
    count = len(val.dataset)
    ops = scoring_ops(config.data, size, val.stored, dense=val.dense)
    if config.data.loader in ("dataloader", "imagefolder"):
        return ScoringLoader(val.augmented(ops, seed=0), count, batch_size, config.data, world)
    return _packed_loader(
        config,
        world,
        val.dataset,
        batch_size,
        shuffle=False,
        augment=ops,
        indices=range(world.rank, count, world.size),
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


def _read_targets(ds: H5Dataset, path: Path, config: LossConfig) -> _Targets:
    """Return what `ds` can be trained for; UsageError where that is not what is asked for."""
    files = ds.files
    has = "classification"
    if "masks" in files.specs:
        has = "segmentation"
    elif files.labels.ndim == 2:
        # Numbers to be predicted have no names of classes.
        named = len(files.classes) == files.labels.shape[1]
        has = "multi-label" if named else "regression"
    wanted = has if config.task == "auto" or ":" in config.task else config.task
    _check_column(wanted, has, path)
    if wanted == "segmentation":
        found = named = _classes_in_masks(ds, config.ignore_index)
    elif wanted in ("regression", "multi-label"):
        found = named = int(files.labels.shape[1])
        if wanted == "multi-label":
            _check_shares(files.labels, path)
    else:
        _check_labels(files.labels, path)
        found = int(files.labels.max(initial=-1)) + 1
        named = len(files.classes) or found
    outputs = named
    if config.num_outputs:
        outputs = _choose_outputs(config, wanted, found, path)
    classes = files.classes if wanted in ("classification", "multi-label") else ()
    return _Targets(task=wanted, num_outputs=outputs, classes=classes)


def _choose_outputs(config: LossConfig, task: str, found: int, path: Path) -> int:
    """Return --num-outputs; UsageError where our loss cannot learn the `found` targets with it."""
    given = config.num_outputs
    if ":" in config.task:  # the user's own loss, which may take any number
        return given
    if task in ("regression", "multi-label") and given != found:
        raise UsageError(
            f"--num-outputs {given}: {path} has {found} targets an image, each of which needs one "
            "output; leave it out"
        )
    if given < found:
        raise UsageError(
            f"--num-outputs {given} is too small: {path} has class numbers up to {found - 1}, "
            f"which need {found}; leave it out to take the file's"
        )
    return given


def _check_column(wanted: str, has: str, path: Path) -> None:
    if wanted == "segmentation" and has != "segmentation":
        raise UsageError(
            f"--task segmentation needs masks, and {path} has none: pack it with --masks DIR"
        )
    if wanted == "regression" and has not in ("regression", "multi-label"):
        raise UsageError(
            f"--task regression needs a column of targets, and {path} has classes: pack it with a "
            "--manifest of numbers"
        )
    if wanted == "multi-label" and has not in ("regression", "multi-label"):
        raise UsageError(
            f"--task multi-label needs 0 or 1 for each class of an image, and {path} has one class "
            "an image: pack it with a --manifest whose label column names several"
        )
    if wanted == "classification" and has == "multi-label":
        raise UsageError(
            f"--task classification needs a class per image, and {path} has any number of them: "
            "take --task multi-label"
        )
    if wanted == "classification" and has == "regression":
        raise UsageError(
            f"--task classification needs a class per image, and {path} has numbers: take "
            "--task regression"
        )


def _check_labels(labels: npt.NDArray[np.int64], path: Path) -> None:
    if missing := int((labels < 0).sum()):
        raise UsageError(
            f"{path} has {missing} of {len(labels)} images without a class (label -1): pack a "
            "folder of class folders, or a --manifest with a label column"
        )


def _check_shares(labels: npt.NDArray[np.float32], path: Path) -> None:
    if not ((labels >= 0) & (labels <= 1)).all():  # NaN is neither
        raise UsageError(
            f"--task multi-label needs 0 or 1 for each class, and {path} has other numbers among "
            "its labels: take --task regression, or pack it anew"
        )


def _classes_in_masks(ds: H5Dataset, ignore_index: int) -> int:
    """Return the highest class number of evenly spaced masks, and one."""
    count = min(len(ds), _MASKS_LOOKED_AT)
    chosen = np.linspace(0, len(ds) - 1, count).round().astype(np.int64)
    ds.files.announce(chosen, ["masks"])
    found = 0
    for index in chosen.tolist():
        mask = ds.files.item("masks", index)
        found = max(found, int(mask.max(initial=0, where=mask != ignore_index)))
    return found + 1


def _check_alike(train: _Targets, val: _Targets, train_path: Path, val_path: Path) -> None:
    """Raise UsageError unless what was learned on one set can be scored on the other."""
    if strange := sorted(set(train.classes) ^ set(val.classes)):
        shown = ", ".join(strange[:5]) + (", ..." if len(strange) > 5 else "")
        raise UsageError(
            f"--val {val_path} and {train_path} have not the same classes; in one of them only: "
            f"{shown}. Pack both with the same classes"
        )
    if val.classes != train.classes:
        raise UsageError(
            f"--val {val_path} and {train_path} number the same classes in another order: pack "
            "both alike, with the same --class-order"
        )
    fits = val.num_outputs <= train.num_outputs
    if val.task in ("regression", "multi-label"):
        fits = val.num_outputs == train.num_outputs
    if not fits:
        what = "targets an image" if val.task == "regression" else "classes"
        raise UsageError(
            f"--val {val_path} has {val.num_outputs} {what}, and {train_path} has "
            f"{train.num_outputs}: score on a set of the same kind"
        )


def training_ops(
    config: DataConfig,
    size: int,
    stored: tuple[int, int] | None,
    *,
    dense: bool,
    ignore_index: int = 0,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
) -> list[Op]:
    """Return the ops for images of `size` px from ones stored as (height, width).

    `stored` is None where stored images have several sizes. Where masks are padded, they get
    `ignore_index`; what is erased gets the color `mean`, 0 to 255.
    random-crop pads by an eighth (4 of 32 px, as in He et al. 2016); random-resized is Szegedy
    et al. 2015 as torchvision has it.

    >>> training_ops(DataConfig(crop="random-resized"), 224, (256, 256), dense=False)
    [RandomResizedCrop(size=224, ...), RandomHorizontalFlip(p=0.5)]
    """
    crop, mask_fill = config.crop, ignore_index if dense else 0
    if crop == "auto":
        crop = "random-crop" if size <= _SMALL and not dense else "random-resized"
    ops: list[Op] = []
    if crop == "random-resized":
        scale = _DENSE_SCALE if dense else RandomResizedCrop.scale
        ops.append(RandomResizedCrop(size, scale=scale))
    elif stored != (size, size):
        ops.append(Resize((size, size)))
    if crop == "random-crop":
        padding = max(1, size // 8) if config.padding < 0 else config.padding
        ops.append(
            RandomCrop(size, padding=padding, padding_mode=config.padding_mode, mask_fill=mask_fill)
        )
    if config.flip:
        ops.append(AlternatingFlip() if config.alternating_flip else RandomHorizontalFlip())
    ops += _policy(config, mask_fill, dense=dense)
    if jitter := config.color_jitter:
        ops.append(ColorJitter(jitter, jitter, jitter))
    if config.random_erase:
        if dense:
            raise UsageError(
                f"--random-erase {config.random_erase} would paint over what masks still name: "
                "leave it out for segmentation"
            )
        ops.append(RandomErasing(config.random_erase, value=[float(round(v)) for v in mean]))
    return ops


def _policy(config: DataConfig, mask_fill: int, *, dense: bool) -> list[Op]:
    name = config.auto_augment
    if name == "none":
        return []
    if dense and config.loader in ("dataloader", "imagefolder"):
        raise UsageError(
            f"--auto-augment {name} with --loader {config.loader} is torchvision's, which does not "
            "move masks: take --loader h5loader, or leave it out"
        )
    if name == "ra":
        return [RandAugment(magnitude=config.ra_magnitude, mask_fill=mask_fill)]
    if name == "ta_wide":
        return [TrivialAugmentWide(mask_fill=mask_fill)]
    return [AugMix()] if name == "augmix" else [AutoAugment(name, mask_fill=mask_fill)]


def scoring_ops(
    config: DataConfig, size: int, stored: tuple[int, int] | None, *, dense: bool
) -> list[Op]:
    """Return the ops for scoring: the middle 7/8 of photos, the whole of everything else.

    ImageNet's accuracies are stated for 224 of 256 px.

    >>> scoring_ops(DataConfig(), 224, (256, 256), dense=False)
    [Resize(size=256, ...), CenterCrop(size=224, ...)]
    """
    resized = config.val_resize
    if 0 < resized < size:
        raise UsageError(
            f"--val-resize {resized} is less than the {size} px that are scored: give at least "
            "those, or a smaller --val-size"
        )
    if config.crop in ("auto", "random-resized") and size > _SMALL and not dense:
        resized = resized or round(size * 8 / 7)
    if resized:
        return [Resize(resized), CenterCrop(size)]
    return [] if stored == (size, size) else [Resize((size, size))]


def to_torchvision(ops: Sequence[Op]) -> Any:
    """Return torchvision's transform that does the same; the ops have its names and arguments."""
    v2 = require("torchvision.transforms.v2", "train")
    if strange := [op for op in ops if not hasattr(v2, type(op).__name__)]:
        raise UsageError(
            f"{strange[0]!r} has no counterpart in torchvision: leave it out, or take --loader "
            "h5loader"
        )
    made = [getattr(v2, type(op).__name__)(**_arguments(op)) for op in ops]
    return v2.Compose(made) if made else v2.Identity()


def _arguments(op: Any) -> dict[str, Any]:
    # Those of ours alone: interpolation and antialias, whose defaults mean the same in torchvision.
    ours_alone = ("interpolation", "antialias", "mask_fill")
    made = {f.name: getattr(op, f.name) for f in fields(op) if f.name not in ours_alone}
    if "policy" in made:
        v2 = require("torchvision.transforms.v2", "train")
        made["policy"] = v2.AutoAugmentPolicy(made["policy"])
    if "fill" in made and getattr(op, "mask_fill", 0) != 0:
        tensors = require("torchvision.tv_tensors", "train")
        made["fill"] = {tensors.Mask: op.mask_fill, "others": op.fill}
    return made
