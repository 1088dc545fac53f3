"""RandomErasing: a random rectangle of each image is painted over, by a color or by noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from h5feed.augment.cpu import Image
from h5feed.augment.device import per_channel
from h5feed.augment.floats import as_row
from h5feed.augment.frame import Floats, Shapes
from h5feed.augment.ops import (
    CpuStep,
    ImageOp,
    Rows,
    below,
    check_numbers,
    check_pair,
    check_probability,
    refuse,
)

if TYPE_CHECKING:
    import torch

    from h5feed.augment.plan import Plan

__all__ = ["RandomErasing", "normal_block", "normal_grid"]

_TRIES: Final = 10  # of torchvision's RandomErasing, before it leaves the image alone
_MASK: Final = 0xFFFFFFFF

_MULTIPLIERS: Final = (0x7FEB352D, 0x846CA68B)
"""Of a 32-bit mixer of low bias (C. Wellons, "Prospecting for Hash Functions", lowbias32)."""


@dataclass(frozen=True)
class RandomErasing(ImageOp):
    """With probability `p`, paint a rectangle of random area and aspect ratio over.

    Before ToDtype its value is a color of 0..255, after it a value of the floats.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import RandomErasing, RandomResizedCrop
    >>> ops = [RandomResizedCrop(48), RandomErasing(p=0.25, value=(124, 116, 104))]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    """Smallest and largest share of the image's area."""
    ratio: tuple[float, float] = (0.3, 3.3)
    """Smallest and largest height / width; drawn evenly in its logarithm."""
    value: float | Sequence[float] | Literal["random"] = 0.0
    """One number, or one for each channel, or "random": a normal draw for each, after ToDtype."""
    uniforms: ClassVar[int] = 4 + 2 * _TRIES
    columns: ClassVar[int] = 5
    takes_floats: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_probability(self, self.p)
        check_pair(self, "scale", self.scale, 0, 1)
        if check_pair(self, "ratio", self.ratio, 0)[0] == 0:
            raise refuse(self, "ratio", self.ratio, "must be positive")
        if isinstance(self.value, str) and self.value != "random":
            raise refuse(self, "value", self.value, 'must be numbers or "random"')
        if not isinstance(self.value, str) and not isinstance(self.value, (int, float)):
            check_numbers(self, "value", self.value)

    def join(self, plan: Plan, position: int) -> None:
        """Become the next step. Raises UsageError where images have other channels than `value`."""
        color = self.color
        if color and len(color) not in (1, plan.channels):
            wrong = f"must be one number, or one for each of {plan.channels} channels"
            raise refuse(self, "value", self.value, wrong)
        if plan.floats is None and not color:
            wrong = "draws from a normal distribution: put the op after ToDtype and Normalize"
            raise refuse(self, "value", self.value, wrong)
        if plan.floats is None and not 0 <= min(color) <= max(color) <= 255:
            raise refuse(self, "value", self.value, "must lie within 0..255 before ToDtype")
        plan.add(self, position)

    @property
    def color(self) -> tuple[float, ...]:
        """`value` as one number or one for each channel; none where it is "random"."""
        if isinstance(self.value, str):
            return ()
        return (self.value,) if isinstance(self.value, (int, float)) else tuple(self.value)

    def draw(self, u: Floats, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return rows as torchvision draws them: the first of 10 tries that fits, if any.

        A row, float64: top, left, height and width of the rectangle (0 for none), and a seed below
        2**24, which float32 holds.
        """
        height, width = shapes.actual[:, 0], shapes.actual[:, 1]
        area = (height * width)[:, None] * (
            self.scale[0] + (self.scale[1] - self.scale[0]) * u[:, 4 : 4 + _TRIES]
        )
        low, high = np.log(self.ratio)
        aspect = np.exp(low + (high - low) * u[:, 4 + _TRIES :])
        h = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        w = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (h < height[:, None]) & (w < width[:, None])
        rows = np.arange(len(fits))
        first = fits.argmax(axis=1)
        h, w = h[rows, first], w[rows, first]
        erases = fits[rows, first] & (u[:, 0] < self.p)
        top, left = below(u[:, 1], height - h + 1), below(u[:, 2], width - w + 1)
        seed = below(u[:, 3], np.int64(1 << 24))
        made = np.stack([top, left, h, w, seed], axis=1)
        return np.where(erases[:, None], made, 0).astype(np.float64), shapes

    def cpu(self, rows: Rows) -> CpuStep:
        """Return the step that erases in place."""
        listed = rows.astype(np.int64).tolist()
        color = self.color
        paint: Image | None = None

        def step(i: int, src: Image, out: Image | None) -> Image:
            nonlocal paint
            top, left, h, w, seed = listed[i]
            if h and w:
                if not color:
                    paint = as_row(normal_block(seed, src.shape, top, left, h, w), src.dtype)
                elif paint is None:
                    paint = as_row(np.array(color, np.float32), src.dtype)
                src[top : top + h, left : left + w] = paint
            return src

        return step

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return images (B, C, H, W) with the rectangles painted over."""
        import torch

        top, left, h, w, seed = rows[:, :, None, None, None].unbind(1)
        y = torch.arange(size[0], device=images.device).view(1, 1, -1, 1)
        x = torch.arange(size[1], device=images.device).view(1, 1, 1, -1)
        inside = (y >= top) & (y < top + h) & (x >= left) & (x < left + w)
        if self.color:
            paint = per_channel(self.color, images)
        else:
            paint = normal_grid(seed, images.shape).to(images.dtype)
        return torch.where(inside, paint, images)


# Normal noise is a pure function of (seed, pixel, channel), the same in numpy and in torch.


def _mix(x: Any) -> Any:
    """Scramble 32-bit numbers held in 64-bit integers, numpy's or torch's."""
    x = ((x ^ (x >> 16)) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> 15)) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> 16)


def _bits(seed: Any, position: Any) -> tuple[Any, Any]:
    """Return two independent 32-bit hashes of a seed below 2**24 and a pixel's position."""
    key = _mix(seed + 0x9E3779B9)
    first = _mix(key ^ position)
    return first, _mix((first + key) & _MASK)


def normal_block(
    seed: int, shape: tuple[int, ...], top: int, left: int, height: int, width: int
) -> NDArray[np.float32]:
    """Return float32 (height, width, C), a box of an image of `shape` (H, W, C)."""
    y = np.arange(top, top + height, dtype=np.int64)[:, None, None]
    x = np.arange(left, left + width, dtype=np.int64)[None, :, None]
    c = np.arange(shape[2], dtype=np.int64)[None, None, :]
    first, second = _bits(np.array([seed]), (y * shape[1] + x) * shape[2] + c)
    # Box and Muller, Ann. Math. Stat. 29 (1958)
    radius = np.sqrt(-2 * np.log((first.astype(np.float32) + 0.5) * np.float32(2**-32)))
    angle = second.astype(np.float32) * np.float32(2 * math.pi * 2**-32)
    return np.asarray(radius * np.cos(angle), np.float32)


def normal_grid(seed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return float32 images of `shape` (B, C, H, W) for seeds (B, 1, 1, 1)."""
    import torch

    _, channels, height, width = shape
    device = seed.device
    y = torch.arange(height, device=device).view(1, 1, -1, 1)
    x = torch.arange(width, device=device).view(1, 1, 1, -1)
    c = torch.arange(channels, device=device).view(1, -1, 1, 1)
    first, second = _bits(seed.to(torch.int64), (y * width + x) * channels + c)
    radius = torch.sqrt(-2 * torch.log((first.float() + 0.5) * 2**-32))
    return radius * torch.cos(second.float() * (2 * math.pi * 2**-32))
