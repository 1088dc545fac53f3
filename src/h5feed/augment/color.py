"""ColorJitter, rounding where torchvision's uint8 functions do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import cv2
import numpy as np
import torch

from h5feed.augment.crop_cpu import Image
from h5feed.augment.gray import to_gray, to_gray_batch
from h5feed.augment.hue import shift_hue, shift_hue_batch
from h5feed.augment.ops import Floats, check_pair, is_number, refuse
from h5feed.augment.pixel import PixelOp

__all__ = ["ColorJitter"]

_LEVELS: Final = np.arange(256, dtype=np.float32)

Range = float | Sequence[float] | None


@dataclass(frozen=True)
class ColorJitter(PixelOp):
    """Change brightness, contrast, saturation and hue by random factors, in random order.

    Each is None, a number d (factors within 1 - d and 1 + d, at least 0; hue: within -d and d)
    or a pair (min, max).
    """

    brightness: Range = None
    contrast: Range = None
    saturation: Range = None
    hue: Range = None
    """Within -0.5 and 0.5: half the color circle."""
    columns: ClassVar[int] = 8
    """Which change comes first, second, third, fourth (0 to 3, in the order above); the factors."""
    uniforms: ClassVar[int] = 8
    colors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _ = self._ranges

    @property
    def _ranges(self) -> list[tuple[float, float]]:
        return [
            _range(self, "brightness", self.brightness, 1),
            _range(self, "contrast", self.contrast, 1),
            _range(self, "saturation", self.saturation, 1),
            _range(self, "hue", self.hue, 0),
        ]

    def rows(self, u: Floats) -> Floats:
        """Return an even permutation and four factors, those left out without effect."""
        low, high = np.array(self._ranges).T
        return np.concatenate([u[:, :4].argsort(axis=1), low + (high - low) * u[:, 4:]], axis=1)

    def on_cpu(self, row: list[float], image: Image) -> None:
        """Change one image."""
        for change in row[:4]:
            factor = row[4 + int(change)]
            if factor != _NEUTRAL[int(change)]:
                _CHANGES[int(change)](image, factor)

    def on_device(self, rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Change a batch: at each of the four turns, every image by its own change."""
        order, factors = rows[:, :4], rows[:, 4:]
        blends = any(
            given is not None for given in (self.brightness, self.contrast, self.saturation)
        )
        for turn in range(4):
            change = order[:, turn, None, None, None]
            factor = factors.gather(1, order[:, turn, None].long())[:, :, None, None]
            before = images
            if blends:
                gray = to_gray_batch(images)
                mean = gray.mean(dim=(2, 3), keepdim=True)
                base = torch.where(change == 2, gray, torch.where(change == 1, mean, 0.0))
                images = (images * factor + base * (1 - factor)).clamp(0, 255).floor()
            if self.hue is not None:
                turned = shift_hue_batch(before, factor)
                images = torch.where(change == 3, turned, images)
            else:
                images = torch.where(change == 3, before, images)
        return images


def _range(op: ColorJitter, name: str, value: Range, center: float) -> tuple[float, float]:
    bounds = (0.0, np.inf) if center else (-0.5, 0.5)
    if value is None:
        return center, center
    if isinstance(value, Sequence):
        return check_pair(op, name, value, *bounds)
    if not is_number(value) or value < 0:
        raise refuse(op, name, value, "must be None, a number not below 0, or a pair (min, max)")
    low = max(center - value, 0.0) if center else -value
    return check_pair(op, name, (low, center + value), *bounds)


_NEUTRAL: Final = (1.0, 1.0, 1.0, 0.0)


def _blend(image: Image, factor: float, base: float) -> None:
    """Move an image's levels away from `base` by a table: factor * level + (1 - factor) * base."""
    levels = _LEVELS * np.float32(factor) + np.float32((1 - factor) * base)
    cv2.LUT(image, levels.clip(0, 255).astype(np.uint8), image)


def _brightness(image: Image, factor: float) -> None:
    _blend(image, factor, 0.0)


def _contrast(image: Image, factor: float) -> None:
    _blend(image, factor, cv2.mean(to_gray(image))[0])


def _saturation(image: Image, factor: float) -> None:
    gray = cv2.cvtColor(to_gray(image), cv2.COLOR_GRAY2RGB)
    # addWeighted rounds to the nearest, torchvision down
    cv2.addWeighted(image, factor, gray, 1 - factor, -0.4999, image)


_CHANGES: Final = (_brightness, _contrast, _saturation, shift_hue)
