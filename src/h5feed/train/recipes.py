"""What happens to an image before the model sees it, in training and in scoring."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from h5feed.augment import (
    CenterCrop,
    ColorJitter,
    Op,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from h5feed.errors import UsageError
from h5feed.optional import require
from h5feed.train.config import DataConfig

__all__ = ["scoring_ops", "to_torchvision", "training_ops"]

_SMALL = 64
"""Up to this side, images are the object itself, as CIFAR's: nothing is to be cropped away."""
_DENSE_SCALE = (0.25, 1.0)
"""Share of a scene that a crop keeps where every pixel has a label."""


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
    """
    crop = config.crop
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
        mask_fill = ignore_index if dense else 0
        ops.append(RandomCrop(size, padding=padding, mask_fill=mask_fill))
    if config.flip:
        ops.append(RandomHorizontalFlip())
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


def scoring_ops(
    config: DataConfig, size: int, stored: tuple[int, int] | None, *, dense: bool
) -> list[Op]:
    """Return the ops for scoring: the middle 7/8 of photos, the whole of everything else.

    224 of 256 px is what ImageNet's accuracies are stated for.
    """
    if config.crop in ("auto", "random-resized") and size > _SMALL and not dense:
        return [Resize(round(size * 8 / 7)), CenterCrop(size)]
    return [] if stored == (size, size) else [Resize((size, size))]


def to_torchvision(ops: Sequence[Op]) -> Any:
    """Return torchvision's transform that does the same; the ops have its names and arguments."""
    v2 = require("torchvision.transforms.v2", "train")
    made = [getattr(v2, type(op).__name__)(**_arguments(op)) for op in ops]
    return v2.Compose(made) if made else v2.Identity()


def _arguments(op: Any) -> dict[str, Any]:
    # Those of ours alone: interpolation and antialias, whose defaults mean the same in torchvision.
    ours_alone = ("interpolation", "antialias", "mask_fill")
    made = {f.name: getattr(op, f.name) for f in fields(op) if f.name not in ours_alone}
    if "fill" in made and op.mask_fill != 0:
        tensors = require("torchvision.tv_tensors", "train")
        made["fill"] = {tensors.Mask: op.mask_fill, "others": op.fill}
    return made
