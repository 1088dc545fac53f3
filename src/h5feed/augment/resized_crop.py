"""RandomResizedCrop, drawn as torchvision draws it, for a whole batch at once."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from h5feed.augment.crops import AxisOp, below, check_resampling
from h5feed.augment.frame import Antialias, Frame
from h5feed.augment.ops import Floats, Ints, check_pair, check_size, refuse

__all__ = ["RandomResizedCrop"]

_TRIES = 10  # of torchvision's RandomResizedCrop, before it falls back to the centre


@dataclass(frozen=True)
class RandomResizedCrop(AxisOp):
    """Crop a box of random area and aspect ratio, and resize it to `size`."""

    size: int | tuple[int, int]
    """Output size: a number, or (height, width)."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height; drawn evenly in its logarithm."""
    interpolation: Literal["bilinear"] = "bilinear"
    antialias: Antialias | None = None
    """None takes the pipeline's."""
    uniforms: ClassVar[int] = 2 + 2 * _TRIES
    resizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, "size", self.size)
        check_pair(self, "scale", self.scale, 0)
        if check_pair(self, "ratio", self.ratio, 0)[0] == 0:
            raise refuse(self, "ratio", self.ratio, "must be positive")
        check_resampling(self)

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return `size`."""
        return check_size(self, "size", self.size)

    def fold(self, frame: Frame, u: Floats) -> None:
        """Crop, then resize."""
        frame.crop(*self.boxes(frame.height, frame.width, u))
        frame.resize(*self.size_after(None))

    def boxes(self, height: Ints, width: Ints, u: Floats) -> tuple[Ints, Ints, Ints, Ints]:
        """Return top, left, height, width (each B) for images of height, width (each B)."""
        low, high = np.log(self.ratio)
        area = (height * width)[:, None] * (
            self.scale[0] + (self.scale[1] - self.scale[0]) * u[:, 2 : 2 + _TRIES]
        )
        aspect = np.exp(low + (high - low) * u[:, 2 + _TRIES :])
        w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (w > 0) & (w <= width[:, None]) & (h > 0) & (h <= height[:, None])
        rows = np.arange(len(fits))
        first = fits.argmax(axis=1)
        found = fits[rows, first]
        centre_h, centre_w = self._central(height, width)
        h = np.where(found, h[rows, first], centre_h)
        w = np.where(found, w[rows, first], centre_w)
        top = np.where(found, below(u[:, 0], height - h + 1), (height - h) // 2)
        left = np.where(found, below(u[:, 1], width - w + 1), (width - w) // 2)
        return top, left, h, w

    def _central(self, height: Ints, width: Ints) -> tuple[Ints, Ints]:
        """Return height, width of the central box of the nearest allowed ratio (the fallback)."""
        narrow = width / height < self.ratio[0]
        wide = width / height > self.ratio[1]
        h = np.where(narrow, np.rint(width / self.ratio[0]).astype(np.int64), height)
        w = np.where(wide, np.rint(height * self.ratio[1]).astype(np.int64), width)
        return h, w
