"""RandomAffine: rotation, translation, scaling and shear, as one resampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import cv2
import numpy as np

from h5feed.augment.cpu import Image, Scratch
from h5feed.augment.device import per_channel
from h5feed.augment.frame import Floats, Shapes
from h5feed.augment.ops import (
    CpuStep,
    ImageOp,
    Rows,
    check_fill,
    check_mask_fill,
    check_numbers,
    check_pair,
    is_number,
    plain,
    refuse,
)
from h5feed.augment.places import Moves, warp_moves

if TYPE_CHECKING:
    import torch

__all__ = ["RandomAffine"]


@dataclass(frozen=True)
class RandomAffine(ImageOp):
    """Rotate, move, scale and shear around the centre; the image keeps its size.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, RandomAffine
    >>> ops = [RandomAffine(15, scale=(0.9, 1.1), interpolation="bilinear"), CenterCrop(48)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    degrees: float | Sequence[float]
    """Rotation, clockwise: a number d for within -d and d, or (min, max)."""
    translate: Sequence[float] | None = None
    """Largest shift as shares of (width, height)."""
    scale: Sequence[float] | None = None
    """(min, max) factor."""
    shear: float | Sequence[float] | None = None
    """Degrees along x: a number d for within -d and d, or (min, max); or (…, min, max along y)."""
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    fill: float | Sequence[float] = 0
    """Color outside the image, 0..255."""
    center: Sequence[float] | None = None
    """(x, y) in pixels from the top left corner; None is the image's centre."""
    mask_fill: int = 0
    """Class number outside the masks, 0..255; such as the loss's ignore_index."""
    uniforms: ClassVar[int] = 6
    columns: ClassVar[int] = 6
    resamples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        plain(self, interpolation=self.interpolation)
        _ = self.ranges
        check_fill(self, self.fill)
        check_mask_fill(self, self.mask_fill)
        if self.center is not None and len(check_numbers(self, "center", self.center)) != 2:
            raise refuse(self, "center", self.center, "must be a pair (x, y)")
        if self.interpolation not in ("nearest", "bilinear"):
            wrong = 'must be "nearest" or "bilinear"'
            raise refuse(self, "interpolation", self.interpolation, wrong)

    @property
    def ranges(self) -> Floats:
        """(min, max) of angle, shift along x and y (shares), scale, shear along x and y: (6, 2)."""
        shift = (0.0, 0.0)
        if self.translate is not None:
            shift = check_numbers(self, "translate", self.translate)  # type: ignore[assignment]
            if len(shift) != 2 or not all(0 <= share <= 1 for share in shift):
                raise refuse(self, "translate", self.translate, "must be two shares within 0..1")
        scale = (1.0, 1.0)
        if self.scale is not None:
            scale = check_pair(self, "scale", self.scale, 0)
            if scale[0] == 0:
                raise refuse(self, "scale", self.scale, "must be positive")
        along, down = self._shears()
        x, y = shift
        return np.array([self._angles(), (-x, x), (-y, y), scale, along, down])

    def _angles(self) -> tuple[float, float]:
        if not is_number(self.degrees):
            return check_pair(self, "degrees", self.degrees)
        if self.degrees < 0:
            raise refuse(self, "degrees", self.degrees, "must not be negative")
        return -self.degrees, self.degrees

    def _shears(self) -> tuple[tuple[float, float], tuple[float, float]]:
        shear = self.shear
        if shear is None:
            return (0, 0), (0, 0)
        if isinstance(shear, Sequence):
            if len(shear) == 4:
                return check_pair(self, "shear", shear[:2]), check_pair(self, "shear", shear[2:])
            return check_pair(self, "shear", shear), (0, 0)
        if not is_number(shear) or shear < 0:
            raise refuse(self, "shear", shear, "must be a number not below 0, or 2 or 4 numbers")
        return (-shear, shear), (0, 0)

    def draw(self, u: Floats, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return maps as torchvision draws them, in the unsqueezed image's proportions.

        A row, float64: a, b, c, d, e, f of the map from an output pixel (x, y) to the input
        position (a x + b y + c, d x + e y + f), pixel centres at whole numbers.
        """
        low, high = self.ranges.T
        drawn = low + (high - low) * u
        boxed = (shapes.boxes[:, 2:] != shapes.actual).any(axis=1, keepdims=True)
        true = np.where(boxed, shapes.actual, shapes.true)  # a letterbox is not squeezed
        shift = np.rint(drawn[:, 1:3] * true[:, ::-1])
        center = true[:, ::-1] / 2 if self.center is None else np.array([self.center], float)
        matrix = _inverse(drawn[:, 0], shift, drawn[:, 3], drawn[:, 4:], center)
        rows = _in_pixels(matrix, shapes.actual[:, ::-1] / true[:, ::-1])
        after = Shapes(actual=shapes.actual, boxes=Shapes.whole(shapes.actual).boxes, true=true)
        return rows, after

    def cpu(self, rows: Rows) -> CpuStep:
        """Return the step that warps image i of the chunk."""
        linear = self.interpolation == "bilinear"
        return self._warp(
            rows, cv2.INTER_LINEAR if linear else cv2.INTER_NEAREST, check_fill(self, self.fill)
        )

    def mask(self, rows: Rows) -> CpuStep:
        """Return the step that warps mask i of the chunk."""
        return self._warp(rows, cv2.INTER_NEAREST, (self.mask_fill,))

    def moves(self, rows: Rows, size: Floats) -> Moves:
        """Return where boxes and keypoints go."""
        return warp_moves(rows.reshape(-1, 2, 3), size)

    def _warp(self, rows: Rows, interpolation: int, fill: tuple[float, ...]) -> CpuStep:
        maps = rows.reshape(-1, 2, 3)
        flags = interpolation | cv2.WARP_INVERSE_MAP
        border = (fill * 3)[:3]
        made = Scratch()

        def step(i: int, src: Image, out: Image | None) -> Image:
            height, width = src.shape[:2]
            image = made(*src.shape) if out is None else out
            cv2.warpAffine(src, maps[i], (width, height), image, flags, cv2.BORDER_CONSTANT, border)
            return image

        return step

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return the images (B, C, *size) warped."""
        import torch

        height, width = size
        images = images.float()
        x = torch.arange(width, device=rows.device, dtype=torch.float32).view(1, 1, -1)
        y = torch.arange(height, device=rows.device, dtype=torch.float32).view(1, -1, 1)
        a, b, c, d, e, f = rows[:, :, None, None].unbind(1)
        across, down = a * x + b * y + c, d * x + e * y + f
        grid = torch.stack([(2 * across + 1) / width - 1, (2 * down + 1) / height - 1], dim=3)
        color = per_channel(check_fill(self, self.fill), images)
        # sampled as the difference from the fill, so that grid_sample's zeros mean the fill
        made = torch.nn.functional.grid_sample(
            images - color, grid, mode=self.interpolation, align_corners=False
        )
        return (made + color).round()


def _inverse(angle: Floats, shift: Floats, scale: Floats, shear: Floats, center: Floats) -> Floats:
    """Return (B, 2, 3) maps from output to input positions, both measured from the corner.

    The formulas are torchvision's (_get_inverse_affine_matrix): centre, then rotation, scale and
    shears about it, then shift.
    """
    rotation, along, down = np.radians(angle), np.radians(shear[:, 0]), np.radians(shear[:, 1])
    a = np.cos(rotation - down) / np.cos(down)
    b = -(a * np.tan(along) + np.sin(rotation))
    c = np.sin(rotation - down) / np.cos(down)
    d = np.cos(rotation) - c * np.tan(along)
    turn = np.stack([d, -b, -c, a], axis=1).reshape(-1, 2, 2) / scale[:, None, None]
    moved = (turn @ (center + shift)[:, :, None])[:, :, 0]
    return np.concatenate([turn, (center - moved)[:, :, None]], axis=2)


def _in_pixels(matrix: Floats, squeeze: Floats) -> Floats:
    """Return (B, 6) maps between pixel centres of images squeezed by (x, y) factors (B, 2)."""
    turn = matrix[:, :, :2] * squeeze[:, :, None] / squeeze[:, None, :]
    offset = matrix[:, :, 2] * squeeze + turn.sum(axis=2) * 0.5 - 0.5
    return np.concatenate([turn, offset[:, :, None]], axis=2).reshape(-1, 6)
