"""Changes of tone as torchvision has them: posterize, solarize, invert, equalize, sharpen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from h5feed.augment.cpu import Image
from h5feed.augment.ops import RandomChange, is_number, refuse

if TYPE_CHECKING:
    import torch

__all__ = [
    "RandomAdjustSharpness",
    "RandomAutocontrast",
    "RandomEqualize",
    "RandomInvert",
    "RandomPosterize",
    "RandomSolarize",
    "adjust_sharpness",
    "adjust_sharpness_batch",
    "autocontrast",
    "autocontrast_batch",
    "equalize",
    "equalize_batch",
    "invert",
    "invert_batch",
    "posterize",
    "posterize_batch",
    "solarize",
    "solarize_batch",
]

Number: TypeAlias = "float | torch.Tensor"

_LEVELS: Final = np.arange(256, dtype=np.float32)
_SHARPNESS: Final = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
"""Pillow's and torchvision's: what a smoothed image is, from which sharpness leads away."""


@dataclass(frozen=True)
class RandomPosterize(RandomChange):
    """Keep the upper `bits` of each channel, with probability `p`.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, RandomPosterize
    >>> ops = [CenterCrop(48), RandomPosterize(bits=2)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.dtype
    torch.uint8
    """

    bits: int
    """0 to 8."""
    p: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in range(9):
            raise refuse(self, "bits", self.bits, "must be a whole number from 0 to 8")

    def change(self, image: Image) -> None:
        """Clear the lower bits."""
        posterize(image, self.bits)

    def changed(self, images: torch.Tensor) -> torch.Tensor:
        """Clear the lower bits."""
        return posterize_batch(images, self.bits)


@dataclass(frozen=True)
class RandomSolarize(RandomChange):
    """Invert the levels from `threshold` on, with probability `p`.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, RandomSolarize
    >>> ops = [CenterCrop(48), RandomSolarize(threshold=128)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.dtype
    torch.uint8
    """

    threshold: float
    """0 to 255."""
    p: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.threshold) or not 0 <= self.threshold <= 255:
            raise refuse(self, "threshold", self.threshold, "must be a number from 0 to 255")

    def change(self, image: Image) -> None:
        """Invert the upper levels."""
        solarize(image, self.threshold)

    def changed(self, images: torch.Tensor) -> torch.Tensor:
        """Invert the upper levels."""
        return solarize_batch(images, self.threshold)


@dataclass(frozen=True)
class RandomInvert(RandomChange):
    """Turn an image into its negative, with probability `p`.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, RandomInvert
    >>> ops = [CenterCrop(48), RandomInvert(p=0.1)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.dtype
    torch.uint8
    """

    p: float = 0.5

    def change(self, image: Image) -> None:
        """Subtract from 255."""
        invert(image)

    def changed(self, images: torch.Tensor) -> torch.Tensor:
        """Subtract from 255."""
        return invert_batch(images)


@dataclass(frozen=True)
class RandomAutocontrast(RandomChange):
    """Stretch each channel to the full range, with probability `p`.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, RandomAutocontrast
    >>> ops = [CenterCrop(48), RandomAutocontrast()]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.dtype
    torch.uint8
    """

    p: float = 0.5

    def change(self, image: Image) -> None:
        """Stretch each channel."""
        autocontrast(image)

    def changed(self, images: torch.Tensor) -> torch.Tensor:
        """Stretch each channel."""
        return autocontrast_batch(images)


@dataclass(frozen=True)
class RandomEqualize(RandomChange):
    """Make each channel's levels about equally frequent, with probability `p`.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, RandomEqualize
    >>> ops = [CenterCrop(48), RandomEqualize()]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.dtype
    torch.uint8
    """

    p: float = 0.5

    def change(self, image: Image) -> None:
        """Look levels up in tables made of the channels' histograms."""
        equalize(image)

    def changed(self, images: torch.Tensor) -> torch.Tensor:
        """Look levels up in tables made of the channels' histograms."""
        return equalize_batch(images)


@dataclass(frozen=True)
class RandomAdjustSharpness(RandomChange):
    """Blur (below 1) or sharpen (above 1) an image, with probability `p`.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, RandomAdjustSharpness
    >>> ops = [CenterCrop(48), RandomAdjustSharpness(sharpness_factor=2)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.dtype
    torch.uint8
    """

    sharpness_factor: float
    """0 is blurred, 1 unchanged, 2 twice as sharp."""
    p: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = self.sharpness_factor
        if not is_number(factor) or not 0 <= factor < np.inf:
            raise refuse(self, "sharpness_factor", factor, "must be a number not below 0")

    def change(self, image: Image) -> None:
        """Move every pixel but the outermost away from what smoothing makes of it."""
        adjust_sharpness(image, self.sharpness_factor)

    def changed(self, images: torch.Tensor) -> torch.Tensor:
        """Move every pixel but the outermost away from what smoothing makes of it."""
        return adjust_sharpness_batch(images, self.sharpness_factor)


# What happens to one image, uint8 (H, W, C), in place; and to a batch, float32 (B, C, H, W) of
# whole numbers 0..255, by one number or (B, 1, 1, 1) of them. Named as torchvision's functions.


def posterize(image: Image, bits: float) -> None:
    """Keep the upper bits, 0 to 8."""
    np.bitwise_and(image, np.uint8(256 - (1 << (8 - int(bits))) & 255), out=image)


def posterize_batch(images: torch.Tensor, bits: Number) -> torch.Tensor:
    """Keep the upper bits, 0 to 8."""
    import torch

    step = torch.exp2(8 - torch.as_tensor(bits, dtype=images.dtype)).round()
    return (images / step).floor() * step


def solarize(image: Image, threshold: float) -> None:
    """Invert the levels from `threshold` on, by a table."""
    table = np.where(threshold <= _LEVELS, 255 - _LEVELS, _LEVELS)
    cv2.LUT(image, table.astype(np.uint8), image)


def solarize_batch(images: torch.Tensor, threshold: Number) -> torch.Tensor:
    """Invert the levels from `threshold` on."""
    import torch

    return torch.where(images >= threshold, 255 - images, images)


def invert(image: Image, _: float = 0) -> None:
    """Subtract from 255."""
    np.subtract(255, image, out=image)


def invert_batch(images: torch.Tensor, _: Number = 0) -> torch.Tensor:
    """Subtract from 255."""
    return 255 - images


def autocontrast(image: Image, _: float = 0) -> None:
    """Stretch each channel to the full range, by a table."""
    lines = image.reshape(len(image), -1)  # numpy is 60 times slower along the first two axes
    low = lines.min(axis=0).reshape(-1, image.shape[2]).min(axis=0)
    high = lines.max(axis=0).reshape(-1, image.shape[2]).max(axis=0)
    span = np.maximum(high.astype(np.float32) - low, 1)
    table = (_LEVELS[:, None] - low) * (255 / span)
    table[:, low == high] = _LEVELS[:, None]
    _look_up(image, table)


def autocontrast_batch(images: torch.Tensor, _: Number = 0) -> torch.Tensor:
    """Stretch each channel to the full range."""
    import torch

    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    stretched = (images - low) * (255 / (high - low).clamp(min=1))
    return torch.where(high > low, stretched.clamp(0, 255).floor(), images)


def equalize(image: Image, _: float = 0) -> None:
    """Make each channel's levels about equally frequent, by tables made of their histograms."""
    channels = range(image.shape[2])
    counts = [cv2.calcHist([image], [c], None, [256], [0, 256]).ravel() for c in channels]
    _look_up(image, _equalizing(np.stack(counts).astype(np.int64)).T)


def equalize_batch(images: torch.Tensor, _: Number = 0) -> torch.Tensor:
    """Make each channel's levels about equally frequent, by tables made of their histograms."""
    import torch

    batch, channels, height, width = images.shape
    levels = images.long().reshape(batch * channels, height * width)
    counts = torch.zeros(batch * channels, 256, device=images.device)
    counts.scatter_add_(1, levels, torch.ones_like(levels, dtype=torch.float32))
    last = counts.gather(1, levels.amax(dim=1, keepdim=True))
    step = ((height * width - last) / 255).floor()
    sums = counts.cumsum(dim=1) - counts  # of the levels below
    table = ((sums + (step / 2).floor()) / step.clamp(min=1)).floor().clamp(0, 255)
    table = torch.where(step > 0, table, torch.arange(256.0, device=images.device))
    return table.gather(1, levels).view_as(images)


def adjust_sharpness(image: Image, factor: float) -> None:
    """Move every pixel but the outermost away from what smoothing makes of it."""
    if min(image.shape[:2]) <= 2:
        return
    smooth = cv2.filter2D(image, -1, _SHARPNESS)
    inner = image[1:-1, 1:-1]
    # addWeighted rounds to the nearest, torchvision down
    made = cv2.addWeighted(inner, factor, smooth[1:-1, 1:-1], 1 - factor, -0.4999)
    inner[...] = made.reshape(inner.shape)


def adjust_sharpness_batch(images: torch.Tensor, factor: Number) -> torch.Tensor:
    """Move every pixel but the outermost away from what smoothing makes of it."""
    import torch

    batch, channels, height, width = images.shape
    if min(height, width) <= 2:
        return images
    kernel = torch.from_numpy(_SHARPNESS).to(images.device)[None, None]
    planes = images.reshape(batch * channels, 1, height, width)
    smooth = torch.nn.functional.conv2d(planes, kernel).round()
    smooth = smooth.view(batch, channels, height - 2, width - 2)
    made = images.clone()
    inner = made[..., 1:-1, 1:-1]
    made[..., 1:-1, 1:-1] = (inner * factor + smooth * (1 - factor)).clamp(0, 255).floor()
    return made


def _look_up(image: Image, table: NDArray[np.float32]) -> None:
    """Replace the levels of uint8 (H, W, C) by those of a table (256, C), rounded down."""
    levels = np.ascontiguousarray(table.clip(0, 255).astype(np.uint8))
    cv2.LUT(image, levels[None] if image.shape[2] > 1 else levels, image)


def _equalizing(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return tables (C, 256) that equalize channels of these histograms, as Pillow makes them."""
    last = np.array([row[np.flatnonzero(row)[-1]] for row in counts])
    step = (counts.sum(axis=1) - last) // 255
    sums = counts.cumsum(axis=1) - counts  # of the levels below
    table = (sums + (step // 2)[:, None]) // np.maximum(step, 1)[:, None]
    return np.where(step[:, None] > 0, table, np.arange(256)).astype(np.float32)
