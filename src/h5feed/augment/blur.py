"""GaussianBlur, with reflected borders."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import cv2
import torch

from h5feed.augment.crop_cpu import Image
from h5feed.augment.ops import Floats, check_pair, check_size, is_number, refuse
from h5feed.augment.pixel import PixelOp

__all__ = ["GaussianBlur"]


@dataclass(frozen=True)
class GaussianBlur(PixelOp):
    """Blur with a Gaussian of random standard deviation."""

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
        batch, channels, height, width = images.shape
        along, down = check_size(self, "kernel_size", self.kernel_size)
        tall = images.transpose(1, 2).reshape(batch, height, channels * width)
        made = torch.bmm(_band(rows, height, down), tall).view(batch, height * channels, width)
        made = torch.bmm(made, _band(rows, width, along).transpose(1, 2))
        return made.view(batch, height, channels, width).transpose(1, 2).round()


def _band(rows: torch.Tensor, size: int, taps: int) -> torch.Tensor:
    """Return float32 (B, size, size): the share of input pixel j in output pixel i."""
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
