"""timm's training and validation scripts over packed files, by one line more in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from h5feed.augment import ToDtype, from_torchvision
from h5feed.errors import UsageError
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.loader import H5Loader
from h5feed.optional import require

__all__ = ["create_dataset", "create_loader"]

_OF_TRANSFORM = (
    *("no_aug", "train_crop_mode", "scale", "ratio", "hflip", "vflip", "color_jitter"),
    *("color_jitter_prob", "grayscale_prob", "gaussian_blur_prob", "auto_augment", "mean", "std"),
    *("crop_pct", "crop_mode", "crop_border_pixels", "re_prob", "re_mode", "re_count"),
)
_WITHOUT_EFFECT = (
    *("pin_memory", "use_prefetcher", "use_multi_epochs_loader", "persistent_workers"),
    *("worker_seeding", "distributed", "batch_choice_seed", "batch_choice_schedule"),
    *("batch_schedule_spread", "batch_schedule_random_mix", "fp16"),
)
_LEFT_OUT = (
    *("re_split", "num_aug_repeats", "num_aug_splits", "tf_preprocessing", "input_size_choices"),
    *("batch_size_choices", "batch_choice_weights", "batch_schedule_epochs", "num_batches"),
)


def create_dataset(name: str = "", root: Any = None, split: str = "val", **others: Any) -> Any:
    """Open the packed file `root`, or `root/{split}.h5`, in the place of timm's create_dataset.

    Its other arguments, which find and read image folders, are without effect but `class_map`.

    Raises UsageError where there is no such file, and for a `class_map`.
    """
    if root is None:
        raise UsageError("root=None: give the packed file, or the folder of train.h5 and val.h5")
    if others.get("class_map"):
        raise UsageError(
            f"class_map={others['class_map']!r}: classes are fixed when images are packed (pack-h5 "
            "has timm's class order as an option); leave class_map out"
        )
    path = Path(os.fspath(root))
    names = [split] if split != "validation" else [split, "val"]
    tried = [path / f"{one}.h5" for one in names] if path.is_dir() else [path]
    found = [one for one in tried if one.is_file()]
    if not found:
        raise UsageError(
            f"root={str(root)!r}, split={split!r}: there is no packed file {tried[0]}; make it "
            f"with `pack-h5 FOLDER {tried[0]}`"
        )
    return H5Dataset(found[0])


def create_loader(
    dataset: Any,
    input_size: Any,
    batch_size: int,
    is_training: bool = False,
    *,
    num_workers: int | str = "auto",
    interpolation: str = "bilinear",
    img_dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cuda",
    collate_fn: Callable[..., Any] | None = None,
    seed: int = 0,
    **others: Any,
) -> H5Loader:
    """Return an H5Loader in the place of timm's create_loader and its PrefetchLoader.

        from timm.data import create_dataset, create_loader, ...
        from h5feed.interop.timm import create_dataset, create_loader  # the line more

    Batches are those of timm's own transform for these arguments, made by ops of h5feed.augment:
    normalized, of `img_dtype`, in channels_last memory, on `device`. FastCollateMixup as
    `collate_fn` mixes them (each image with the one before it, where timm takes the batch from
    behind), and `loader.mixup_enabled = False` ends it. What differs: `interpolation="random"` is
    "bilinear"; ranks share the epoch without samplers; random numbers are a function of `seed`,
    which all ranks have in common.

    Raises UsageError that names an argument or a transform with no counterpart, AutoAugment for
    one: keep timm's create_loader, over `H5Dataset(path, output="pil")`, for those.
    """
    known = (*_OF_TRANSFORM, *_WITHOUT_EFFECT, *_LEFT_OUT)
    for name, value in others.items():
        if name not in known or (name in _LEFT_OUT and value):
            why = "is not supported by" if name in known else "is not an argument of"
            raise UsageError(
                f"{name}={value!r} {why} h5feed.interop.timm.create_loader: leave it out, or use "
                'timm\'s create_loader over H5Dataset(path, output="pil")'
            )
    transform = require("timm.data", "train").create_transform(
        input_size,
        is_training=is_training,
        interpolation="bilinear" if interpolation == "random" else interpolation,
        use_prefetcher=False,
        **{name: value for name, value in others.items() if name in _OF_TRANSFORM},
    )
    ops = list(from_torchvision(transform))
    dtype = torch.float16 if others.get("fp16") else img_dtype
    ops = [replace(op, dtype=dtype) if isinstance(op, ToDtype) else op for op in ops]
    if collate_fn is not None:
        ops += from_torchvision([collate_fn])
    return H5Loader(
        dataset,
        batch_size,
        shuffle=is_training,
        drop_last=is_training,
        augment=ops,
        device=device,
        num_workers=num_workers if num_workers else 1,
        seed=seed,
    )
