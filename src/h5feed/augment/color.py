"""ColorJitter, RandomGrayscale, Grayscale and GaussianBlur, rounding where torchvision does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import cv2
import numpy as np

from h5feed.augment.cpu import Image, Scratch
from h5feed.augment.frame import Floats
from h5feed.augment.ops import (
    CpuStep,
    ImageOp,
    RandomChange,
    Rows,
    check_pair,
    check_size,
    is_number,
    refuse,
)

if TYPE_CHECKING:
    import torch

    from h5feed.augment.plan import Plan

__all__ = [
    "ColorJitter",
    "GaussianBlur",
    "Grayscale",
    "RandomGrayscale",
    "adjust_brightness",
    "adjust_brightness_batch",
    "adjust_contrast",
    "adjust_contrast_batch",
    "adjust_saturation",
    "adjust_saturation_batch",
    "shift_hue",
    "shift_hue_batch",
    "to_gray",
    "to_gray_batch",
]

_GRAY: Final = (0.2989, 0.587, 0.114)
"""torchvision's weights of R, G, B (rgb_to_grayscale)."""
_LEVELS: Final = np.arange(256, dtype=np.float32)
_TO_BYTE = 255.999  # torchvision's way back to uint8 (to_dtype_image), rounding down

Range = float | Sequence[float] | None


@dataclass(frozen=True)
class ColorJitter(ImageOp):
    """Change brightness, contrast, saturation and hue by random factors, in random order.

    Each is None, a number d (factors within 1 - d and 1 + d, at least 0; hue: within -d and d)
    or a pair (min, max).

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import ColorJitter, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), ColorJitter(0.4, 0.4, 0.4, hue=0.1)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    brightness: Range = None
    contrast: Range = None
    saturation: Range = None
    hue: Range = None
    """Within -0.5 and 0.5: half the color circle."""
    columns: ClassVar[int] = 8
    """Which change comes first, second, third, fourth (0 to 3, in the order above); the factors."""
    uniforms: ClassVar[int] = 8
    needs_color: ClassVar[bool] = True

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
        import torch

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
                images = _blend_batch(images, factor, base)
            if self.hue is not None:
                turned = shift_hue_batch(before, factor)
                images = torch.where(change == 3, turned, images)
            else:
                images = torch.where(change == 3, before, images)
        return images


@dataclass(frozen=True)
class RandomGrayscale(RandomChange):
    """Take the color out with probability `p`; three equal channels remain.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import RandomGrayscale, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), RandomGrayscale(p=0.2)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    p: float = 0.1
    needs_color: ClassVar[bool] = True

    def change(self, image: Image) -> None:
        """Put its gray into all channels."""
        cv2.cvtColor(to_gray(image), cv2.COLOR_GRAY2RGB, image)

    def changed(self, images: torch.Tensor) -> torch.Tensor:
        """Return the grays, (B, 1, H, W), which stand for all channels."""
        return to_gray_batch(images)


@dataclass(frozen=True)
class Grayscale(ImageOp):
    """Take the color out of every image.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, Grayscale
    >>> ops = [CenterCrop(48), Grayscale()]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 1, 48, 48])
    """

    num_output_channels: Literal[1, 3] = 1
    """3 keeps three equal channels."""
    resamples: ClassVar[bool] = True
    needs_color: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.num_output_channels not in (1, 3):
            raise refuse(self, "num_output_channels", self.num_output_channels, "must be 1 or 3")

    def join(self, plan: Plan, position: int) -> None:
        """Become the next step, after which images have one channel; or RandomGrayscale(p=1)."""
        plan.check_takes(self)
        if self.num_output_channels == 3:
            plan.add(RandomGrayscale(p=1), position)
        else:
            plan.add(self, position)
            plan.channels = 1

    def cpu(self, rows: Rows) -> CpuStep:
        """Return the step from (H, W, 3) to (H, W, 1)."""
        made = Scratch()

        def step(i: int, src: Image, out: Image | None) -> Image:
            image = made(src.shape[0], src.shape[1], 1) if out is None else out
            image[..., 0] = to_gray(src)
            return image

        return step

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return (B, 1, H, W)."""
        return to_gray_batch(images.float())


@dataclass(frozen=True)
class GaussianBlur(ImageOp):
    """Blur with a Gaussian of random standard deviation.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import GaussianBlur, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), GaussianBlur(5, sigma=(0.1, 2))]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    kernel_size: int | Sequence[int]
    """Taps, odd: a number, or (along x, along y)."""
    sigma: float | Sequence[float] = (0.1, 2.0)
    """Standard deviation in pixels: a number, or (min, max)."""
    columns: ClassVar[int] = 1
    """The standard deviation."""
    uniforms: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if any(size % 2 == 0 for size in check_size(self, "kernel_size", self.kernel_size)):
            raise refuse(self, "kernel_size", self.kernel_size, "must be odd")
        if self._sigma[0] <= 0:
            raise refuse(self, "sigma", self.sigma, "must be positive")

    @property
    def _sigma(self) -> tuple[float, float]:
        items = [self.sigma] if is_number(self.sigma) else self.sigma
        pair = list(items) * 2 if isinstance(items, Sequence) and len(items) == 1 else items
        return check_pair(self, "sigma", pair)

    def rows(self, u: Floats) -> Floats:
        """Return standard deviations (B, 1)."""
        low, high = self._sigma
        return low + (high - low) * u

    def on_cpu(self, row: list[float], image: Image) -> None:
        """Blur one image."""
        along, down = check_size(self, "kernel_size", self.kernel_size)
        x = cv2.getGaussianKernel(along, row[0], cv2.CV_32F)
        y = cv2.getGaussianKernel(down, row[0], cv2.CV_32F)
        cv2.sepFilter2D(image, -1, x, y, image, borderType=cv2.BORDER_REFLECT_101)

    def on_device(self, rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Blur a batch: two products with banded matrices."""
        import torch

        batch, channels, height, width = images.shape
        along, down = check_size(self, "kernel_size", self.kernel_size)
        tall = images.transpose(1, 2).reshape(batch, height, channels * width)
        made = torch.bmm(_band(rows, height, down), tall).view(batch, height * channels, width)
        made = torch.bmm(made, _band(rows, width, along).transpose(1, 2))
        return made.view(batch, height, channels, width).transpose(1, 2).round()


def to_gray(image: Image) -> Image:
    """Return uint8 (H, W), rounded down, of an RGB image."""
    return cv2.transform(image, np.array([[*_GRAY, -0.5]]))


def to_gray_batch(images: torch.Tensor) -> torch.Tensor:
    """Return float (B, 1, H, W), rounded down, of RGB images of 0..255."""
    red, green, blue = images.unbind(1)
    return (_GRAY[0] * red + _GRAY[1] * green + _GRAY[2] * blue).floor()[:, None]


def shift_hue(image: Image, factor: float) -> None:
    """Change uint8 RGB (H, W, 3) in place.

    In floats: cv2's uint8 HSV holds hue in 256 steps, which moves colors by up to 13 levels.
    """
    hsv = cv2.cvtColor(image * np.float32(1 / 255), cv2.COLOR_RGB2HSV)
    hue = hsv[..., 0]
    hue += np.float32(factor * 360)
    if factor > 0:
        np.subtract(hue, 360, out=hue, where=hue >= 360)
    else:
        np.add(hue, 360, out=hue, where=hue < 0)
    rgb = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    rgb *= np.float32(_TO_BYTE)
    np.copyto(image, rgb, casting="unsafe")


def shift_hue_batch(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return float32 RGB (B, 3, H, W) of whole numbers 0..255, hues turned by (B, 1, 1, 1).

    The formulas are those of en.wikipedia.org/wiki/HSL_and_HSV ("HSV to RGB alternative").
    """
    import torch

    red, green, blue = (images / 255).unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    per = torch.where(chroma > 0, 1 / chroma, 0.0)
    hue = torch.where(
        value == red,
        (green - blue) * per,
        torch.where(value == green, 2 + (blue - red) * per, 4 + (red - green) * per),
    )
    hue = hue + 6 * factor[:, 0]
    made = []
    for corner in (5, 3, 1):
        k = torch.remainder(hue + corner, 6)
        made.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return (torch.stack(made, dim=1) * _TO_BYTE).clamp(0, 255).floor()


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


def _blend_batch(
    images: torch.Tensor, factor: torch.Tensor, base: torch.Tensor | float
) -> torch.Tensor:
    return (images * factor + base * (1 - factor)).clamp(0, 255).floor()


def adjust_brightness(image: Image, factor: float) -> None:
    """Multiply the levels of uint8 (H, W, 3) in place."""
    _blend(image, factor, 0.0)


def adjust_brightness_batch(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return float32 (B, 3, H, W) of whole numbers 0..255, levels multiplied by (B, 1, 1, 1)."""
    return _blend_batch(images, factor, 0.0)


def adjust_contrast(image: Image, factor: float) -> None:
    """Move uint8 (H, W, 3) away from its mean gray, in place."""
    _blend(image, factor, cv2.mean(to_gray(image))[0])


def adjust_contrast_batch(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return float32 (B, 3, H, W) of whole numbers 0..255, moved away from their mean grays."""
    return _blend_batch(images, factor, to_gray_batch(images).mean(dim=(2, 3), keepdim=True))


def adjust_saturation(image: Image, factor: float) -> None:
    """Move uint8 (H, W, 3) away from its grays, in place."""
    gray = cv2.cvtColor(to_gray(image), cv2.COLOR_GRAY2RGB)
    # addWeighted rounds to the nearest, torchvision down
    cv2.addWeighted(image, factor, gray, 1 - factor, -0.4999, image)


def adjust_saturation_batch(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return float32 (B, 3, H, W) of whole numbers 0..255, moved away from their grays."""
    return _blend_batch(images, factor, to_gray_batch(images))


_CHANGES: Final = (adjust_brightness, adjust_contrast, adjust_saturation, shift_hue)


def _band(rows: torch.Tensor, size: int, taps: int) -> torch.Tensor:
    """Return float32 (B, size, size): the share of input pixel j in output pixel i."""
    import torch

    sigma = rows[:, :, None]
    i = torch.arange(size, device=rows.device, dtype=torch.float32).view(1, -1, 1)
    j = i.transpose(1, 2)
    reach = taps // 2

    def share(distance: torch.Tensor) -> torch.Tensor:
        return torch.exp(-0.5 * (distance / sigma) ** 2) * (distance.abs() <= reach)

    weights = share(j - i)
    weights = weights + share(i + j) * (j > 0)  # reflected at the first pixel,
    weights = weights + share(2 * (size - 1) - j - i) * (j < size - 1)  # and at the last
    return weights / weights.sum(dim=2, keepdim=True)
