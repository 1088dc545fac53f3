"""Grayscale and RandomGrayscale, rounding down as torchvision does."""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import cv2
import numpy as np
import torch

from h5feed.augment.crop_cpu import Image, Scratch
from h5feed.augment.frame import Shapes
from h5feed.augment.ops import Draws, Floats, Op, check_probability, refuse
from h5feed.augment.pixel import PixelOp
from h5feed.augment.stages import Rows, Step

__all__ = ["GRAY", "GrayStage", "Grayscale", "RandomGrayscale", "to_gray", "to_gray_batch"]

GRAY: Final = (0.2989, 0.587, 0.114)
"""torchvision's weights of R, G, B (rgb_to_grayscale)."""


def to_gray(image: Image) -> Image:
    """Return uint8 (H, W), rounded down, of an RGB image."""
    return cv2.transform(image, np.array([[*GRAY, -0.5]]))


def to_gray_batch(images: torch.Tensor) -> torch.Tensor:
    """Return float (B, 1, H, W), rounded down, of RGB images of 0..255."""
    red, green, blue = images.unbind(1)
    return (GRAY[0] * red + GRAY[1] * green + GRAY[2] * blue).floor()[:, None]


@dataclass(frozen=True)
class RandomGrayscale(PixelOp):
    """Take the color out with probability `p`; three equal channels remain."""

    p: float = 0.1
    columns: ClassVar[int] = 1
    """1 for gray, 0 for unchanged."""
    uniforms: ClassVar[int] = 1
    colors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_probability(self, self.p)

    def rows(self, u: Floats) -> Floats:
        """Mark the images whose uniform lies below p."""
        return (u < self.p).astype(np.float64)

    def on_cpu(self, row: list[float], image: Image) -> None:
        """Change one image."""
        if row[0]:
            cv2.cvtColor(to_gray(image), cv2.COLOR_GRAY2RGB, image)

    def on_device(self, rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Change the images marked."""
        return torch.where(rows[:, :, None, None] > 0, to_gray_batch(images), images)


@dataclass(frozen=True)
class Grayscale(Op):
    """Take the color out of every image."""

    num_output_channels: Literal[1, 3] = 1
    """3 keeps three equal channels."""

    def __post_init__(self) -> None:
        if self.num_output_channels not in (1, 3):
            raise refuse(self, "num_output_channels", self.num_output_channels, "must be 1 or 3")


class GrayStage:
    """Grayscale to one channel."""

    columns = 0
    resamples = True

    def size_after(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return the same size."""
        return size

    def draw(self, draws: Draws, view: int, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return rows without columns: nothing is random."""
        return np.empty((len(shapes.actual), 0)), shapes

    def cpu(self, rows: Rows) -> Step:
        """Return the step from (H, W, 3) to (H, W, 1)."""
        made = Scratch()

        def step(i: int, src: Image, out: Image | None) -> Image:
            image = made(src.shape[0], src.shape[1], 1) if out is None else out
            image[..., 0] = to_gray(src)
            return image

        return step

    def mask(self, rows: Rows) -> Step | None:
        """Masks have no colors."""
        return None

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return (B, 1, H, W)."""
        return to_gray_batch(images.float())
