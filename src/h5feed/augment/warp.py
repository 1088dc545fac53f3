"""Rotation, affine maps and perspective: an image resampled by a map, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from h5feed.augment.cpu import Image, Scratch
from h5feed.augment.device import per_channel
from h5feed.augment.frame import Floats, Ints, Shapes
from h5feed.augment.ops import (
    CpuStep,
    ImageOp,
    Rows,
    below,
    check_fill,
    check_mask_fill,
    check_numbers,
    check_pair,
    check_probability,
    is_number,
    plain,
    refuse,
)
from h5feed.augment.places import Moves, warp_moves

if TYPE_CHECKING:
    import torch

__all__ = [
    "RandomAffine",
    "RandomPerspective",
    "RandomRotation",
    "WarpInterpolation",
    "WarpOp",
    "affine_maps",
    "check_warp",
    "true_sizes",
    "warp",
    "warp_batch",
    "warped",
]

WarpInterpolation = Literal["nearest", "bilinear"]

_FLAGS: Final = {
    "nearest": cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
    "bilinear": cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
}


class WarpOp(ImageOp):
    """Base: an image resampled by a map, of the same size; a subclass says which, in `draw`.

    A row, float64: a, b, c, d, e, f of the map from an output pixel (x, y) to the input position
    (a x + b y + c, d x + e y + f), pixel centres at whole numbers; with g, h, i both are divided by
    g x + h y + i.
    """

    columns: ClassVar[int] = 6
    resamples: ClassVar[bool] = True
    interpolation: WarpInterpolation
    fill: float | Sequence[float]
    mask_fill: int

    def cpu(self, rows: Rows) -> CpuStep:
        """Return the step that warps image i of the chunk."""
        return _warps(rows, self.interpolation, check_fill(self, self.fill))

    def mask(self, rows: Rows) -> CpuStep | None:
        """Return the step that warps mask i of the chunk."""
        return _warps(rows, "nearest", (self.mask_fill,))

    def moves(self, rows: Rows, size: Floats) -> Moves:
        """Return where boxes and keypoints go."""
        return warp_moves(rows, size)

    def device(
        self, rows: torch.Tensor, images: torch.Tensor, size: tuple[int, int]
    ) -> torch.Tensor:
        """Return the images (B, C, *size) warped."""
        return warp_batch(rows, images.float(), self.interpolation, check_fill(self, self.fill))


@dataclass(frozen=True)
class RandomAffine(WarpOp):
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
    interpolation: WarpInterpolation = "nearest"
    fill: float | Sequence[float] = 0
    """Color outside the image, 0..255."""
    center: Sequence[float] | None = None
    """(x, y) in pixels from the top left corner; None is the image's centre."""
    mask_fill: int = 0
    """Class number outside the masks, 0..255; such as the loss's ignore_index."""
    uniforms: ClassVar[int] = 6

    def __post_init__(self) -> None:
        _ = self.ranges
        check_warp(self)
        _check_center(self, self.center)

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
        return np.array([_angles(self, self.degrees), (-x, x), (-y, y), scale, along, down])

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
        """Return maps as torchvision draws them, in the unsqueezed image's proportions."""
        low, high = self.ranges.T
        drawn = low + (high - low) * u
        true = true_sizes(shapes)
        shift = np.rint(drawn[:, 1:3] * true[:, ::-1])
        center = _centers(self.center, true)
        rows = affine_maps(shapes, drawn[:, 0], shift, drawn[:, 3], drawn[:, 4:], center)
        return rows, warped(shapes, true)


@dataclass(frozen=True)
class RandomRotation(WarpOp):
    """Rotate around the centre; the image keeps its size.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, RandomRotation
    >>> ops = [RandomRotation(15, interpolation="bilinear"), CenterCrop(48)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    degrees: float | Sequence[float]
    """Counter-clockwise: a number d for within -d and d, or (min, max)."""
    interpolation: WarpInterpolation = "nearest"
    expand: bool = False
    """False: an image that grew by what it was turned would fit no batch."""
    center: Sequence[float] | None = None
    """(x, y) in pixels from the top left corner; None is the image's centre."""
    fill: float | Sequence[float] = 0
    """Color outside the image, 0..255."""
    mask_fill: int = 0
    """Class number outside the masks, 0..255; such as the loss's ignore_index."""
    uniforms: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _ = self.range
        check_warp(self)
        _check_center(self, self.center)
        if self.expand:
            wrong = "makes images of several sizes, which fit no batch: leave it out"
            raise refuse(self, "expand", self.expand, wrong)

    @property
    def range(self) -> tuple[float, float]:
        """(min, max) of the angle."""
        return _angles(self, self.degrees)

    def draw(self, u: Floats, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return maps as torchvision draws them, in the unsqueezed image's proportions."""
        low, high = self.range
        true, nothing = true_sizes(shapes), np.zeros((len(u), 2))
        clockwise = -(low + (high - low) * u[:, 0])
        center = _centers(self.center, true)
        rows = affine_maps(shapes, clockwise, nothing, np.ones(len(u)), nothing, center)
        return rows, warped(shapes, true)


@dataclass(frozen=True)
class RandomPerspective(WarpOp):
    """Tilt an image with probability `p`: its corners move inwards at random.

    >>> from h5feed import H5Dataset, H5Loader
    >>> from h5feed.augment import CenterCrop, RandomPerspective
    >>> ops = [RandomPerspective(0.3), CenterCrop(48)]
    >>> images, labels = next(iter(H5Loader(H5Dataset("photos.h5"), 4, augment=ops)))
    >>> images.shape
    torch.Size([4, 3, 48, 48])
    """

    distortion_scale: float = 0.5
    """How far a corner may move, as a share of half the width and height, 0 to 1."""
    p: float = 0.5
    interpolation: WarpInterpolation = "bilinear"
    fill: float | Sequence[float] = 0
    """Color outside the image, 0..255."""
    mask_fill: int = 0
    """Class number outside the masks, 0..255; such as the loss's ignore_index."""
    uniforms: ClassVar[int] = 9
    columns: ClassVar[int] = 9

    def __post_init__(self) -> None:
        check_probability(self, self.p)
        check_warp(self)
        scale = self.distortion_scale
        if not is_number(scale) or not 0 <= scale <= 1:
            raise refuse(self, "distortion_scale", scale, "must be a number from 0 to 1")

    def draw(self, u: Floats, shapes: Shapes) -> tuple[Rows, Shapes]:
        """Return maps as torchvision draws them, in the unsqueezed image's proportions."""
        true = true_sizes(shapes)
        whole = true[:, ::-1] - 1
        corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * whole[:, None]
        moved = self.corners(u[:, 1:], true)
        maps = _in_pixels(_perspectives(moved, corners), shapes, true)
        turned = (u[:, 0] < self.p) & (np.abs(np.linalg.det(maps)) > 1e-9)  # none onto a line
        maps[~turned] = np.eye(3)
        return maps.reshape(-1, 9), warped(shapes, true, turned)

    def corners(self, u: Floats, sizes: Ints) -> Ints:
        """Return (B, 4, 2) of x and y: where the corners of images (height, width) come to lie.

        From uniforms (B, 8); top left, top right, bottom right, bottom left.
        """
        inwards = below(u, np.tile((self.distortion_scale * (sizes // 2)).astype(np.int64) + 1, 4))
        inwards = inwards.reshape(-1, 4, 2)[:, :, ::-1]
        far = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], bool)
        return np.where(far, sizes[:, None, ::-1] - 1 - inwards, inwards)


def check_warp(op: Any) -> None:
    """Check what every op that warps has."""
    plain(op, interpolation=op.interpolation)
    check_fill(op, op.fill)
    check_mask_fill(op, getattr(op, "mask_fill", 0))
    if op.interpolation not in _FLAGS:
        wrong = 'must be "nearest" or "bilinear"'
        raise refuse(op, "interpolation", op.interpolation, wrong)


def true_sizes(shapes: Shapes) -> Ints:
    """Return (B, 2): heights and widths in which maps are drawn; a letterbox is not squeezed."""
    boxed = (shapes.boxes[:, 2:] != shapes.actual).any(axis=1, keepdims=True)
    return np.where(boxed, shapes.actual, shapes.true)


def warped(shapes: Shapes, true: Ints, which: NDArray[np.bool_] | None = None) -> Shapes:
    """Return what images have become, or those of them marked."""
    whole = Shapes.whole(shapes.actual).boxes
    if which is None:
        return Shapes(actual=shapes.actual, boxes=whole, true=true)
    return Shapes(
        actual=shapes.actual,
        boxes=np.where(which[:, None], whole, shapes.boxes),
        true=np.where(which[:, None], true, shapes.true),
    )


def affine_maps(
    shapes: Shapes, angle: Floats, shift: Floats, scale: Floats, shear: Floats, center: Floats
) -> Floats:
    """Return (B, 6) maps, see WarpOp: about `center` (B, 2), in the unsqueezed image's proportions.

    angle: (B,) degrees, clockwise. shift: (B, 2) pixels along x and y. shear: (B, 2) degrees.
    """
    maps = np.zeros((len(angle), 3, 3))
    maps[:, :2] = _inverse(angle, shift, scale, shear, center)
    maps[:, 2, 2] = 1
    return _in_pixels(maps, shapes, true_sizes(shapes))[:, :2].reshape(-1, 6)


def warp(
    image: Image, row: Floats, out: Image, interpolation: WarpInterpolation, fill: tuple[float, ...]
) -> None:
    """Write `image` (H, W) or (H, W, C) into `out`, of the same shape, by a row of WarpOp."""
    size, flags = (image.shape[1], image.shape[0]), _FLAGS[interpolation]
    border = (fill * 3)[:3]
    if len(row) == 6:
        matrix = row.reshape(2, 3)
        cv2.warpAffine(image, matrix, size, out, flags, cv2.BORDER_CONSTANT, border)
    else:
        matrix = row.reshape(3, 3)
        cv2.warpPerspective(image, matrix, size, out, flags, cv2.BORDER_CONSTANT, border)


def _warps(rows: Rows, interpolation: WarpInterpolation, fill: tuple[float, ...]) -> CpuStep:
    made = Scratch()
    still = (rows == np.eye(3).ravel()[: rows.shape[1]]).all(axis=1).tolist()

    def step(i: int, src: Image, out: Image | None) -> Image:
        if still[i] and out is None:
            return src
        image = made(*src.shape) if out is None else out
        if still[i]:
            image[...] = src
        else:
            warp(src, rows[i], image, interpolation, fill)
        return image

    return step


def warp_batch(
    rows: torch.Tensor,
    images: torch.Tensor,
    interpolation: WarpInterpolation,
    fill: tuple[float, ...],
) -> torch.Tensor:
    """Return float images (B, C, H, W), whole numbers, by float32 rows (B, 6) or (B, 9)."""
    import torch

    height, width = images.shape[2:]
    x = torch.arange(width, device=rows.device, dtype=torch.float32).view(1, 1, -1)
    y = torch.arange(height, device=rows.device, dtype=torch.float32).view(1, -1, 1)
    a, b, c, d, e, f, *last = rows[:, :, None, None].unbind(1)
    across, down = a * x + b * y + c, d * x + e * y + f
    if last:
        g, h, i = last
        behind = g * x + h * y + i
        behind = torch.where(behind == 0, 1e-9, behind)
        across, down = across / behind, down / behind
    grid = torch.stack([(2 * across + 1) / width - 1, (2 * down + 1) / height - 1], dim=3)
    color = per_channel(fill, images)
    # sampled as the difference from the fill, so that grid_sample's zeros mean the fill
    made = torch.nn.functional.grid_sample(
        images - color, grid, mode=interpolation, align_corners=False
    )
    return (made + color).round()


def _angles(op: WarpOp, degrees: float | Sequence[float]) -> tuple[float, float]:
    if not is_number(degrees):
        return check_pair(op, "degrees", degrees)
    if degrees < 0:
        raise refuse(op, "degrees", degrees, "must not be negative")
    return -degrees, degrees


def _check_center(op: WarpOp, center: Sequence[float] | None) -> None:
    if center is not None and len(check_numbers(op, "center", center)) != 2:
        raise refuse(op, "center", center, "must be a pair (x, y)")


def _centers(center: Sequence[float] | None, sizes: Ints) -> Floats:
    """Return (B, 2) or (1, 2) of x and y."""
    return sizes[:, ::-1] / 2 if center is None else np.array([center], float)


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


def _perspectives(moved: Ints, corners: Ints) -> Floats:
    """Return (B, 3, 3) maps from quadrilaterals `moved` to `corners`, both (B, 4, 2) of x and y."""
    x, y = moved.astype(np.float64).transpose(2, 0, 1)
    to = corners.astype(np.float64)
    ones, zeros = np.ones_like(x), np.zeros_like(x)
    across = np.stack([x, y, ones, zeros, zeros, zeros, -to[..., 0] * x, -to[..., 0] * y], axis=2)
    down = np.stack([zeros, zeros, zeros, x, y, ones, -to[..., 1] * x, -to[..., 1] * y], axis=2)
    system = np.concatenate([across, down], axis=1)
    wanted = np.concatenate([to[..., 0], to[..., 1]], axis=1)[..., None]
    try:
        found = np.linalg.solve(system, wanted)
    except np.linalg.LinAlgError:  # two corners of some image fell together
        found = np.linalg.pinv(system) @ wanted
    return np.concatenate([found[..., 0], ones[:, :1]], axis=1).reshape(-1, 3, 3)


def _in_pixels(maps: Floats, shapes: Shapes, true: Ints) -> Floats:
    """Return (B, 3, 3) maps between pixel centres of the images as they lie in memory.

    maps: between positions measured from the corner of images of their true sizes.
    """
    squeeze = np.ones((len(maps), 3))
    squeeze[:, :2] = shapes.actual[:, ::-1] / true[:, ::-1]
    made = maps * squeeze[:, :, None] / squeeze[:, None, :]
    made[:, :, 2] += 0.5 * (made[:, :, 0] + made[:, :, 1])
    made[:, :2] -= 0.5 * made[:, 2:]
    return np.asarray(made)
